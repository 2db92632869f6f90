// What a person does on the page becomes a request, and what the server says is drawn.
// The server holds the state. Names come from files: they are only ever set as text.

const at = (id) => document.getElementById(id);
const AT_ONCE = 3; // photographs on their way at the same time
const OURS = "application/x-ibaml"; // a photograph of this page that is dragged
const GONE = "The server does not answer: is ibaml serve still running?";

let state = { classes: [], queries: [], notes: [], undo: null, unsaved: false, upload: Infinity };

if (location.search) history.replaceState(null, "", "/"); // the token stays out of sight

// --- asking ---------------------------------------------------------------------------------------

async function ask(path, options = {}) {
  try {
    const answer = await fetch(path, options);
    const json = answer.headers.get("content-type")?.startsWith("application/json");
    return json ? await answer.json() : { refused: await answer.text() };
  } catch {
    return { refused: GONE, gone: true };
  }
}

/** Ask for a change, then draw. Returns what was done, or null after showing why it was not. */
async function change(path, fields, problems) {
  const answer = await ask(path, { method: "POST", body: JSON.stringify(fields) });
  if (answer.refused !== undefined) {
    complain(problems, answer.refused);
    return null;
  }
  await refresh();
  return answer;
}

async function refresh() {
  const answer = await ask("/state");
  if (answer.refused !== undefined) complain(at("classes-problems"), answer.refused);
  else if (!(answer.version < state.version)) {
    state = answer;
    draw();
  }
}

let due = null;
function refreshSoon() {
  due ??= setTimeout(async () => {
    await refresh();
    due = null;
  }, 250);
}

const say = (sentence) => { at("said").textContent = sentence; };

/** Show a sentence where something went wrong, until it is dismissed. */
function complain(problems, sentence) {
  if ([...problems.children].some((p) => p.firstChild.textContent === sentence)) return;
  const line = document.createElement("p");
  line.append(made("span", sentence), made("button", "Dismiss"));
  line.lastChild.type = "button";
  line.lastChild.onclick = () => line.remove();
  problems.append(line);
  while (problems.children.length > 30) problems.firstChild.remove();
}

function made(tag, words, kind = "") {
  const node = document.createElement(tag);
  node.textContent = words;
  if (kind) node.className = kind;
  return node;
}

// --- photographs come in --------------------------------------------------------------------------

const waiting = [];
let total = 0, done = 0, running = 0, failed = 0;

/** Read photographs: {file, label}; label null is one to name. */
function send(items, problems) {
  for (const { file, label } of items) {
    total += 1;
    if (file.size > state.upload) {
      const most = Math.floor(state.upload / 2 ** 20);
      complain(problems, `${file.name}: the file has more than ${most} MB.`);
      done += 1;
      failed += 1;
    } else waiting.push({ file, label, problems });
  }
  if (waiting.length) say(`Reading ${waiting.length} photographs.`);
  while (running < AT_ONCE && waiting.length) sendNext();
  drawWork();
}

async function sendNext() {
  running += 1;
  for (let next = waiting.shift(); next; next = waiting.shift()) {
    const words = new URLSearchParams({ name: next.file.name });
    if (next.label !== null) words.set("class", next.label);
    const answer = await ask(`/picture?${words}`, { method: "POST", body: next.file });
    done += 1;
    if (answer.refused !== undefined) {
      failed += 1;
      complain(next.problems, answer.refused);
      if (answer.gone) done += waiting.splice(0).length;
    }
    drawWork();
    refreshSoon();
  }
  running -= 1;
  if (running || waiting.length) return;
  await refresh();
  if (running) return; // more came meanwhile: they are counted together
  const read = total - failed;
  say(`${read} photographs read${failed ? `, ${failed} refused` : ""}.`);
  total = done = failed = 0;
  drawWork();
}

function drawWork() {
  at("work").hidden = !running;
  at("work-words").textContent = `Reading photograph ${Math.min(done + 1, total)} of ${total} …`;
  at("progress").max = Math.max(total, 1);
  at("progress").value = done;
}

/** Files of a drop, and of the folders in it, each with the folder it lies in. */
async function gathered(transfer) {
  const items = [...transfer.items].filter((item) => item.kind === "file");
  const found = [];
  const roots = items.map((item) => item.webkitGetAsEntry?.() ?? item.getAsFile());
  for (const root of roots) {
    if (root instanceof File) found.push({ file: root, folder: null });
    else if (root) await walk(root, null, found);
  }
  return found.filter(({ file }) => !file.name.startsWith(".") && file.name !== "Thumbs.db");
}

async function walk(entry, folder, found) {
  if (found.length >= 2000) return;
  if (entry.isFile) {
    const file = await new Promise((got) => entry.file(got, () => got(null)));
    if (file) found.push({ file, folder });
    return;
  }
  const reader = entry.createReader();
  for (;;) {
    const some = await new Promise((got) => reader.readEntries(got, () => got([])));
    if (!some.length) return;
    for (const one of some) await walk(one, entry.name, found);
  }
}

/** Photographs dropped outside a class: their folders are the classes. */
async function sendToNew(found) {
  const problems = at("classes-problems");
  const typed = at("new-name").value.trim();
  const folders = [...new Set(found.map(({ folder }) => folder ?? ""))];
  for (const folder of folders) {
    const label = await classFor(folder || typed || freeName(), problems);
    if (label === null) continue;
    if (!folder) at("new-name").value = "";
    const files = found.filter((one) => (one.folder ?? "") === folder);
    send(files.map(({ file }) => ({ file, label })), problemsOf(label));
    if (!folder && !typed) startRenaming(label);
  }
}

/** The number of a class of this name, which is made if there is none; null if it cannot be. */
async function classFor(name, problems) {
  const there = state.classes.find((one) => one.name === name.trim());
  return there?.id ?? (await change("/class", { name }, problems))?.done ?? null;
}

function freeName() {
  let number = state.classes.length + 1;
  while (state.classes.some((one) => one.name === `class ${number}`)) number += 1;
  return `class ${number}`;
}

/** A place where photographs are dropped, of this page (moved) or from outside (read). Its label is
 * a class's number, null for those to name, undefined for a new class. */
function zone(node, label, problems, take) {
  const mine = (event) => [...event.dataTransfer.types].some((t) => t === "Files" || t === OURS);
  let inside = 0;
  const over = (change) => {
    inside = Math.max(0, inside + change);
    node.classList.toggle("over", inside > 0);
  };
  node.addEventListener("dragenter", (event) => mine(event) && over(1));
  node.addEventListener("dragleave", (event) => mine(event) && over(-1));
  node.addEventListener("drop", async (event) => {
    over(-inside);
    if (!mine(event)) return;
    event.preventDefault();
    event.stopPropagation();
    const own = event.dataTransfer.getData(OURS);
    if (own) {
      if (label !== undefined) await move(Number(own), label, problems);
      else await moveToNew(Number(own), at("new-name").value.trim(), problems);
    } else {
      const found = await gathered(event.dataTransfer);
      if (take) take(found);
      else send(found.map(({ file }) => ({ file, label })), problems);
    }
  });
}

/** A button opens the file picker. */
function picker(button, input, label, problems) {
  button.onclick = () => input.click();
  input.onchange = () => {
    send([...input.files].map((file) => ({ file, label })), problems);
    input.value = "";
  };
}

// --- changes --------------------------------------------------------------------------------------

async function move(id, label, problems) {
  const name = nameOf(id);
  const kind = label === null ? "to be named" : `an example of ${classOf(label)?.name}`;
  if (await change("/move", { id, to: label }, problems)) say(`${name} is ${kind} now.`);
}

async function moveToNew(id, typed, problems) {
  const label = await classFor(typed || freeName(), problems);
  if (label === null) return;
  at("new-name").value = "";
  await move(id, label, problems);
  if (!typed) startRenaming(label);
}

const classOf = (label) => state.classes.find((one) => one.id === label);

async function remove(id, problems) {
  const name = nameOf(id);
  if (await change("/remove", { ids: [id] }, problems)) say(`${name} is removed.`);
}

function nameOf(id) {
  const all = [...state.classes.flatMap((one) => one.examples), ...state.queries];
  return all.find((one) => one.id === id)?.name ?? "the photograph";
}

at("undo").onclick = async () => {
  const answer = await change("/undo", {}, at("classes-problems"));
  if (!answer) return;
  say(`${answer.done} is back.`);
  if (at("undo").hidden) at("new-name").focus();
};

at("save").onclick = async () => {
  try {
    const answer = await fetch("/save");
    if (answer.headers.get("content-type") !== "application/octet-stream") {
      complain(at("classes-problems"), (await answer.json()).refused);
      return;
    }
    const link = made("a", "");
    link.href = URL.createObjectURL(await answer.blob());
    link.download = "shop.ibaml";
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
    say("Saved as shop.ibaml, among your downloads.");
  } catch {
    complain(at("classes-problems"), GONE);
  }
  await refresh();
};

at("new-class").onsubmit = async (event) => {
  event.preventDefault();
  const name = at("new-name").value;
  const answer = await change("/class", { name }, at("classes-problems"));
  if (!answer) return;
  at("new-name").value = "";
  say(`The class ${name} is there: add photographs of it.`);
  cardOf(answer.done)?.querySelector(".add").focus();
};

// --- drawing --------------------------------------------------------------------------------------

/** Make a node's children those of a list, keeping the ones that are there. */
function sync(parent, items, key, make, fill) {
  const there = new Map([...parent.children].map((node) => [node.dataset.key, node]));
  const wanted = new Set(items.map((item) => String(key(item))));
  there.forEach((node, name) => wanted.has(name) || node.remove());
  items.forEach((item, i) => {
    const name = String(key(item));
    const node = there.get(name) ?? make(item);
    node.dataset.key = name;
    if (parent.children[i] !== node) parent.insertBefore(node, parent.children[i] ?? null);
    fill(node, item);
  });
}

const copy = (id) => at(id).content.firstElementChild.cloneNode(true);
const within = (list, id) => [...at(list).children].find((one) => one.dataset.key === String(id));
const cardOf = (label) => within("classes", label);
const queryOf = (id) => within("queries", id);
const problemsOf = (label) => cardOf(label)?.querySelector(".problems") ?? at("classes-problems");
const percent = (p) => (p > 0.995 ? "> 99 %" : p < 0.005 ? "< 1 %" : `${Math.round(100 * p)} %`);

function draw() {
  const examples = state.classes.reduce((sum, one) => sum + one.examples.length, 0);
  at("start").hidden = state.classes.length > 0;
  sync(at("classes"), state.classes, (one) => one.id, classCard, fillClass);
  sync(at("queries"), state.queries, (one) => one.id, queryCard, fillQuery);
  at("ask-words").textContent = examples
    ? "Drop photographs here, or"
    : "Once a class has a photograph, drop new ones here: each gets its class, or unknown.";
  at("choose").classList.toggle("main", examples > 0);
  at("undo").hidden = state.undo === null;
  at("undo").textContent = `Bring back ${state.undo}`;
  at("save").disabled = !examples;
  at("unsaved").textContent = !examples ? "" : state.unsaved ? "Not saved yet" : "Saved";
  at("notes").replaceChildren(...state.notes.map((words) => made("p", words)));
  drawNext();
}

function drawNext() {
  const ranked = state.queries.filter((one) => one.next).sort((a, b) => a.next - b.next);
  const hint = at("label-next");
  hint.hidden = !ranked.length;
  const row = made("div", "", "row");
  ranked.forEach((one) => {
    const button = made("button", one.name, "small");
    button.type = "button";
    button.onclick = () => queryOf(one.id)?.querySelector("select").focus();
    row.append(button);
  });
  hint.replaceChildren(made("p", "Label these next: they teach the most."), row);
}

function picture(one) {
  if (!one.picture) return made("span", one.name, "plain");
  const image = new Image();
  image.src = `/thumbnail/${one.id}`;
  image.alt = one.name;
  image.draggable = false;
  return image;
}

function carried(node, id) {
  node.draggable = true;
  node.addEventListener("dragstart", (event) => {
    event.dataTransfer.setData(OURS, String(id));
    event.dataTransfer.effectAllowed = "move";
  });
}

function classCard({ id }) {
  const card = copy("class-card");
  const part = (name) => card.querySelector(`.${name}`);
  const problems = part("problems");
  const form = part("renaming");
  picker(part("add"), card.querySelector("input[type=file]"), id, problems);
  zone(card, id, problems);
  const end = () => {
    form.hidden = true;
    part("rename").focus();
  };
  part("rename").onclick = () => startRenaming(id);
  part("cancel").onclick = end;
  form.addEventListener("keydown", (event) => event.key === "Escape" && end());
  form.onsubmit = async (event) => {
    event.preventDefault();
    const name = form.querySelector("input").value;
    if (!(await change("/rename", { class: id, name }, problems))) return;
    end();
    say(`The class is called ${name} now.`);
  };
  part("remove").onclick = async () => {
    const { name } = classOf(id);
    if (!(await change("/remove-class", { class: id }, problems))) return;
    say(`The class ${name} is removed.`);
    at("new-name").focus();
  };
  return card;
}

function startRenaming(label) {
  const form = cardOf(label)?.querySelector(".renaming");
  if (!form) return;
  form.hidden = false;
  const input = form.querySelector("input");
  input.value = classOf(label).name;
  input.select();
  input.focus();
}

function fillClass(card, { id, name, examples }) {
  const part = (kind) => card.querySelector(`.${kind}`);
  const count = examples.length;
  card.querySelector("h3").textContent = name;
  card.setAttribute("aria-label", `class ${name}`);
  part("rename").setAttribute("aria-label", `Rename the class ${name}`);
  part("remove").setAttribute("aria-label", `Remove the class ${name}`);
  part("add").setAttribute("aria-label", `Add photographs of ${name}`);
  card.querySelector(".renaming input").setAttribute("aria-label", `New name of the class ${name}`);
  part("count").textContent = count === 1 ? "1 example" : `${count} examples`;
  const make = (one) => tile(one, id);
  sync(part("tiles"), examples, (one) => one.id, make, (node, one) => {
    node.firstElementChild.setAttribute("aria-label", `${one.name}, example of ${name}: show or move`);
    node.lastElementChild.setAttribute("aria-label", `Remove ${one.name} from ${name}`);
  });
}

function tile(one, label) {
  const node = copy("tile");
  const [open, cross] = node.children;
  open.append(picture(one));
  open.onclick = () => show(one, label);
  cross.onclick = async () => {
    const card = cardOf(label);
    const next = node.nextElementSibling ?? node.previousElementSibling;
    await remove(one.id, card.querySelector(".problems"));
    (next?.isConnected ? next.lastElementChild : card.querySelector(".add")).focus();
  };
  carried(node, one.id);
  return node;
}

/** The dialog of one example. */
function show(one, label) {
  at("example-name").textContent = one.name;
  at("example-picture").replaceChildren(picture(one));
  const select = at("example-class");
  const options = state.classes.map(({ id, name }) => new Option(name, id, false, id === label));
  select.replaceChildren(...options, new Option("none: a photograph to name", ""));
  at("example-move").onclick = async () => {
    at("example").close();
    await move(one.id, select.value ? Number(select.value) : null, problemsOf(label));
  };
  at("example-remove").onclick = async () => {
    at("example").close();
    await remove(one.id, problemsOf(label));
    cardOf(label)?.querySelector(".add").focus();
  };
  at("example").showModal();
}
at("example-close").onclick = () => at("example").close();

function queryCard(one) {
  const card = copy("query-card");
  const problems = card.querySelector(".problems");
  card.querySelector(".shown").append(picture(one));
  card.querySelector(".name").textContent = one.name;
  const select = card.querySelector("select");
  select.setAttribute("aria-label", `Class of ${one.name}`);
  select.onchange = () => { select.dataset.chosen = "yes"; };
  card.querySelector(".keep").setAttribute("aria-label", `Add ${one.name} to the class`);
  card.querySelector(".remove").setAttribute("aria-label", `Remove ${one.name}`);
  const leave = async (act) => {
    const next = card.nextElementSibling ?? card.previousElementSibling;
    await act();
    if (!card.isConnected) (next?.isConnected ? next.querySelector(".remove") : at("choose")).focus();
  };
  card.querySelector(".keep").onclick = () =>
    select.value
      ? leave(() => move(one.id, Number(select.value), problems))
      : moveToNew(one.id, "", at("ask-problems"));
  card.querySelector(".remove").onclick = () => leave(() => remove(one.id, problems));
  carried(card, one.id);
  return card;
}

function fillQuery(card, one) {
  const known = one.label !== undefined;
  card.classList.toggle("unknown", Boolean(one.unknown));
  const part = (name) => card.querySelector(`.${name}`);
  part("label").textContent = known ? one.label : "no answer yet";
  part("percent").textContent = known && !one.unknown ? percent(one.classes[0].probability) : "";
  part("sure").hidden = !one.sure;
  part("next").hidden = !one.next;
  part("next").textContent = `label next: ${one.next}`;
  part("why").hidden = !one.unknown;
  if (one.unknown) part("why").textContent = `It looks like none of your classes. If it is of one of them, the likeliest is ${classOf(one.best)?.name}.`;
  const others = (one.classes ?? []).filter((each, i) => i === 0 || each.probability >= 0.01);
  part("bars").replaceChildren(...(others.length > 1 ? others : []).map(bar));
  part("nearest").hidden = !known;
  const all = state.classes.flatMap((each) => each.examples.map((e) => ({ ...e, of: each.name })));
  const like = (one.nearest ?? []).map((id) => all.find((e) => e.id === id)).filter(Boolean);
  const same = like.every((e) => e.picture && e.of === one.label);
  part("nearest").classList.toggle("same", same);
  sync(part("nearest").lastElementChild, like, (e) => `${e.id} ${e.of}`, nearExample, () => {});
  const select = card.querySelector("select");
  const options = [...state.classes, { id: "", name: "a new class …" }];
  const key = ({ id, name }) => `${id} ${name}`;
  if (select.dataset.key !== options.map(key).join("\n")) {
    const before = select.dataset.chosen ? select.value : "";
    select.replaceChildren(...options.map(({ id, name }) => new Option(name, id)));
    select.dataset.key = options.map(key).join("\n");
    if (before && classOf(Number(before))) select.value = before;
    else delete select.dataset.chosen;
  }
  if (!select.dataset.chosen) select.value = one.best ?? options[0].id;
}

function bar({ name, probability }) {
  const line = made("li", "");
  const track = made("div", "", "track");
  const fill = made("div", "", "fill");
  fill.style.width = `${100 * probability}%`;
  track.append(fill);
  line.append(made("span", name, "of"), track, made("span", percent(probability), "much"));
  return line;
}

function nearExample(one) {
  const line = made("li", "");
  const small = made("span", "", "small");
  small.append(picture(one));
  if (!one.picture) small.className = "small named";
  line.append(small, made("span", one.of, "of"));
  return line;
}

// --- the page -------------------------------------------------------------------------------------

picker(at("choose"), at("files"), null, at("ask-problems"));
zone(at("ask").parentElement, null, at("ask-problems"));
zone(at("new-class"), undefined, at("classes-problems"), sendToNew);
at("start").classList.add("zone");
zone(at("start"), undefined, at("classes-problems"), sendToNew);
document.addEventListener("dragover", (event) => event.preventDefault()); // or the browser opens it
document.addEventListener("drop", (event) => {
  event.preventDefault();
  if (event.dataTransfer.types.includes("Files")) say("Drop photographs on a class, or to name.");
});
refresh();
