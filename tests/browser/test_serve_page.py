"""Does the page of `ibaml serve` do what a person does with it, in a real browser?"""

from __future__ import annotations

import base64
import json
import os
import threading
import time
import zipfile
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from ibaml import untrusted
from pictures import hostile, jpeg, odd
from served import served

KINDS = ("disc", "dots", "stripes")
LITE = ("--port", 0, "--backbone", "efficientnet_lite0")


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def server(cache):
    with served(*LITE, cache=cache) as one:
        yield one


def files(kind: str, seeds) -> list[dict]:
    return [
        {"name": f"{kind}-{seed}.jpg", "mimeType": "image/jpeg", "buffer": jpeg(kind, seed)}
        for seed in seeds
    ]


def drop(page: Page, where: str, given: list[dict]) -> None:
    """Drop files as from the desktop."""
    packed = [{**one, "buffer": base64.b64encode(one["buffer"]).decode()} for one in given]
    data = page.evaluate_handle(
        """(given) => {
            const data = new DataTransfer();
            for (const one of given) {
                const bytes = Uint8Array.from(atob(one.buffer), (c) => c.charCodeAt(0));
                data.items.add(new File([bytes], one.name, { type: one.mimeType }));
            }
            return data;
        }""",
        packed,
    )
    for event in ("dragenter", "dragover", "drop"):
        page.dispatch_event(where, event, {"dataTransfer": data})


def read(page: Page) -> None:
    """Wait until everything is read."""
    expect(page.locator("#said")).to_contain_text("photographs read", timeout=60_000)
    expect(page.locator("#work")).to_be_hidden(timeout=60_000)


def card(page: Page, name: str):
    return page.get_by_role("article", name=f"class {name}", exact=True)


def query(page: Page, name: str):
    return page.locator("#queries > li", has_text=name)


def add_class(page: Page, name: str, given: list[dict]) -> None:
    page.get_by_label("New class").fill(name)
    page.get_by_role("button", name="Add class").click()
    expect(card(page, name)).to_be_visible()
    card(page, name).locator("input[type=file]").set_input_files(given)
    expect(card(page, name).locator(".tile")).to_have_count(len(given), timeout=60_000)


def fill(page: Page) -> None:
    for kind in KINDS:
        add_class(page, kind, files(kind, range(5)))
    new = [one for kind in (*KINDS, "noise") for one in files(kind, (20, 21))]
    page.locator("#files").set_input_files(new)
    expect(page.locator(".query")).to_have_count(8, timeout=60_000)
    read(page)


# --- how it looks ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def full(cache):
    with served(*LITE, cache=cache) as one:
        yield one


def test_the_empty_page_teaches(visit, full, look):
    seen = visit(full.address, **look)
    if card(seen.page, "disc").count() == 0:
        expect(seen.page.get_by_text("Begin with your own photographs")).to_be_visible()
        expect(seen.page.get_by_role("button", name="Save")).to_be_disabled()
    assert "token" not in seen.page.url
    seen.check_accessible()
    seen.check_fits()
    seen.shoot("serve-empty")


def test_the_full_page_looks_right(visit, full, look):
    seen = visit(full.address, **look)
    page = seen.page
    if look == {"size": "desktop", "scheme": "light"}:
        fill(page)
    expect(page.locator(".query")).to_have_count(8)
    page.locator("#files").set_input_files(
        [{"name": "<i>no</i> picture.jpg", "mimeType": "image/jpeg", "buffer": b"no"}]
    )
    expect(page.locator("#ask-problems p")).to_have_count(1)
    seen.check_accessible()
    seen.check_fits()
    seen.shoot("serve-full")
    card(page, "disc").locator(".open").first.click()
    expect(page.get_by_role("dialog")).to_be_visible()
    seen.check_accessible()
    seen.shoot("serve-dialog", whole=False)
    page.keyboard.press("Escape")
    card(page, "disc").get_by_role("button", name="Rename the class disc").click()
    seen.check_accessible()
    page.keyboard.press("Escape")
    expect(card(page, "disc").locator(".renaming")).to_be_hidden()


# --- what it does ---------------------------------------------------------------------------------


def test_drop_predict_add_remove_save_and_reload(server, visit, cache, tmp_path):
    seen = visit(server.address)
    page = seen.page
    for kind in KINDS:
        page.get_by_label("New class").fill(kind)
        page.keyboard.press("Enter")
        expect(card(page, kind)).to_be_visible()
        drop(page, f"[aria-label='class {kind}']", files(kind, range(3)))
        expect(card(page, kind).locator(".tile")).to_have_count(3, timeout=60_000)
    drop(page, "#ask", [one for kind in KINDS for one in files(kind, (30,))])
    for kind in KINDS:
        expect(query(page, f"{kind}-30.jpg").locator(".label")).to_have_text(kind, timeout=60_000)
        expect(query(page, f"{kind}-30.jpg").locator(".percent")).to_contain_text("%")
        expect(query(page, f"{kind}-30.jpg").locator(".nearest li")).to_have_count(3)
    read(page)

    # dropped without a class: one is made, and its name is asked for
    drop(page, "#new-class", files("noise", range(3)))
    name = page.get_by_label("New name of the class class 4")
    expect(name).to_be_focused()
    name.fill("noise")
    page.keyboard.press("Enter")
    expect(card(page, "noise").locator(".tile")).to_have_count(3, timeout=60_000)

    # the answer changes at once when examples go, and again when they are back
    label = query(page, "disc-30.jpg").locator(".label")
    card(page, "disc").get_by_role("button", name="Remove the class disc").click()
    expect(label).not_to_have_text("disc")
    page.get_by_role("button", name="Bring back the class disc").click()
    expect(label).to_have_text("disc")
    card(page, "disc").get_by_role("button", name="Remove disc-0.jpg from disc").click()
    expect(card(page, "disc").locator(".tile")).to_have_count(2)
    crosses = card(page, "disc").locator(".cross")
    assert any(crosses.nth(i).evaluate("(one) => one === document.activeElement") for i in (0, 1))
    page.get_by_role("button", name="Bring back disc-0.jpg").click()
    expect(card(page, "disc").locator(".tile")).to_have_count(3)

    # moved by the mouse, by the dialog, and by the menu
    page.set_viewport_size({"width": 1280, "height": 1800})  # the mouse does not scroll
    card(page, "disc").locator(".tile").first.drag_to(card(page, "dots"))
    expect(card(page, "dots").locator(".tile")).to_have_count(4)
    card(page, "dots").get_by_role("button", name="disc-0.jpg, example of dots").click()
    page.get_by_label("Class", exact=True).select_option("disc")
    page.get_by_role("button", name="Move", exact=True).click()
    expect(card(page, "disc").locator(".tile")).to_have_count(3)
    query(page, "dots-30.jpg").get_by_label("Class of dots-30.jpg").select_option("stripes")
    query(page, "dots-30.jpg").get_by_role("button", name="Add dots-30.jpg to the class").click()
    expect(card(page, "stripes").locator(".tile")).to_have_count(4)
    expect(page.locator(".query")).to_have_count(2)
    card(page, "stripes").locator(".tile").last.drag_to(page.locator("#ask"))
    expect(query(page, "dots-30.jpg").locator(".label")).to_have_text("dots")

    # the state is the server's
    page.reload()
    expect(page.locator(".query")).to_have_count(3)
    expect(page.locator(".tile")).to_have_count(12)

    # saved, and loaded by another server, it answers the same
    expect(page.get_by_text("Not saved yet")).to_be_visible()
    with page.expect_download() as download:
        page.get_by_role("button", name="Save").click()
    assert download.value.suggested_filename == "shop.ibaml"
    download.value.save_as(tmp_path / "shop.ibaml")
    expect(page.get_by_text("Saved", exact=True)).to_be_visible()
    before = query(page, "disc-30.jpg").locator(".percent").text_content()
    assert server.end().splitlines()[-1] == "Stopped."
    with served(tmp_path / "shop.ibaml", "--port", 0, cache=cache) as again:
        second = visit(again.address).page
        expect(second.locator(".tile")).to_have_count(12)
        expect(card(second, "disc").locator(".tile .plain").first).to_have_text("disc-0.jpg")
        second.locator("#files").set_input_files(files("disc", (30,)))
        expect(query(second, "disc-30.jpg").locator(".percent")).to_have_text(before)
        second.locator("#files").set_input_files(files("dots", (31,)))
        expect(query(second, "dots-31.jpg").locator(".label")).to_have_text("dots")
        seen = visit(again.address, size="phone")
        expect(seen.page.locator(".query")).to_have_count(2)
        seen.check_accessible()
        seen.shoot("serve-loaded")
        query(second, "dots-31.jpg").get_by_role("button", name="Add dots-31.jpg").click()
        expect(card(second, "dots").locator(".tile")).to_have_count(4)
        assert "the last changes were not saved" in again.end()


def test_folders_from_the_desktop_become_classes(server, visit, tmp_path):
    for kind in KINDS:
        folder = tmp_path / "shop" / kind
        folder.mkdir(parents=True)
        (folder / ".hidden.jpg").write_bytes(b"")
        for one in files(kind, range(2)):
            (folder / one["name"]).write_bytes(one["buffer"])
    (tmp_path / "new.jpg").write_bytes(jpeg("disc", 40))
    page = visit(server.address).page
    expect(page.locator("#start")).to_be_visible()

    def drag(path: Path, where: str) -> None:
        """A real drag, of what lies on the disk."""
        box = page.locator(where).bounding_box()
        place = {"x": box["x"] + box["width"] / 2, "y": box["y"] + box["height"] / 2}
        data = {"items": [], "files": [str(path)], "dragOperationsMask": 1}
        hand = page.context.new_cdp_session(page)
        for event in ("dragEnter", "dragOver", "drop"):
            hand.send("Input.dispatchDragEvent", {"type": event, **place, "data": data})

    drag(tmp_path / "shop", "#start")
    for kind in KINDS:
        expect(card(page, kind).locator(".tile")).to_have_count(2, timeout=60_000)
    drag(tmp_path / "new.jpg", "#ask")
    expect(query(page, "new.jpg").locator(".label")).to_have_text("disc", timeout=60_000)
    assert page.url == f"http://127.0.0.1:{server.port}/"
    drag(tmp_path / "new.jpg", "h1")  # beside: the browser does not open it
    expect(page.locator("#said")).to_have_text("Drop photographs on a class, or to name.")
    assert page.url == f"http://127.0.0.1:{server.port}/"


def test_everything_works_from_the_keyboard(server, visit):
    page = visit(server.address).page
    page.on("filechooser", lambda chooser: None)  # from now on none is opened for real

    def tab_to(role: str, name: str) -> None:
        wanted = page.get_by_role(role, name=name, exact=True)
        for _ in range(60):
            page.keyboard.press("Tab")
            if wanted.evaluate("(node) => node === document.activeElement"):
                return
        raise AssertionError(f"the key Tab does not reach {name}")

    for kind in ("disc", "dots"):
        tab_to("textbox", "New class")
        page.keyboard.type(kind)
        page.keyboard.press("Enter")
        expect(page.get_by_role("button", name=f"Add photographs of {kind}")).to_be_focused()
        with page.expect_file_chooser() as chooser:
            page.keyboard.press("Enter")
        chooser.value.set_files(files(kind, range(2)))
        expect(card(page, kind).locator(".tile")).to_have_count(2, timeout=60_000)
    tab_to("button", "Choose photographs")
    with page.expect_file_chooser() as chooser:
        page.keyboard.press("Enter")
    chooser.value.set_files(files("noise", (1, 2)))
    expect(page.locator(".query")).to_have_count(2, timeout=60_000)
    read(page)
    tab_to("combobox", "Class of noise-1.jpg")
    page.keyboard.press("End")  # a new class
    tab_to("button", "Add noise-1.jpg to the class")
    page.keyboard.press("Enter")
    expect(page.get_by_label("New name of the class class 3")).to_be_focused()
    page.keyboard.type("noise")
    page.keyboard.press("Enter")
    expect(page.get_by_role("button", name="Rename the class noise")).to_be_focused()
    expect(query(page, "noise-2.jpg").locator(".label")).to_have_text("noise")
    tab_to("button", "noise-1.jpg, example of noise: show or move")
    page.keyboard.press("Enter")
    tab_to("button", "Remove")
    page.keyboard.press("Enter")
    expect(card(page, "noise").locator(".tile")).to_have_count(0)
    expect(page.locator("#said")).to_have_text("noise-1.jpg is removed.")
    tab_to("button", "Bring back noise-1.jpg")
    page.keyboard.press("Enter")
    expect(card(page, "noise").locator(".tile")).to_have_count(1)


# --- what it withstands ---------------------------------------------------------------------------


def test_hostile_uploads_are_refused_each_with_a_sentence_while_good_ones_are_served(
    server, visit, tmp_path
):
    seen = visit(server.address)
    page = seen.page
    opened: list[str] = []
    page.on("dialog", lambda dialog: (opened.append(dialog.message), dialog.dismiss()))
    add_class(page, "disc", files("disc", range(2)))
    add_class(page, "dots", files("dots", range(2)))
    bad = hostile()
    assert len(bad) >= 20
    mixed = []
    for seed, (name, content) in enumerate(bad.items()):
        mixed.append({"name": name, "mimeType": "image/jpeg", "buffer": content})
        mixed += files(KINDS[seed % 2], (100 + seed,))
    page.locator("#files").set_input_files(mixed)
    expect(page.locator("#said")).to_contain_text(f"{len(bad)} refused", timeout=90_000)
    expect(page.locator(".query")).to_have_count(len(bad))
    sentences = page.locator("#ask-problems span").all_text_contents()
    assert len(sentences) == len(bad)
    assert all("readable image" in one or "is empty" in one for one in sentences), sentences
    labels = page.locator(".query .label").all_text_contents()
    assert set(labels) <= {"disc", "dots", "unknown"}
    page.get_by_role("button", name="Dismiss").first.click()
    expect(page.locator("#ask-problems p")).to_have_count(len(bad) - 1)
    seen.check_accessible()
    page.reload()

    kept = odd()
    page.locator("#files").set_input_files(
        [{"name": n, "mimeType": "image/jpeg", "buffer": c} for n, c in kept.items()]
    )
    expect(page.locator(".query")).to_have_count(len(bad) + len(kept), timeout=60_000)
    (tmp_path / "big.jpg").write_bytes(bytes(untrusted.UPLOAD + 1))
    page.locator("#files").set_input_files(tmp_path / "big.jpg")
    expect(page.locator("#ask-problems span")).to_have_text(
        "big.jpg: the file has more than 32 MB."
    )
    add_class(page, "<img src=x onerror=alert(1)>", files("stripes", (1,)))
    expect(page.get_by_role("heading", name="<img src=x onerror=alert(1)>")).to_be_visible()
    assert page.title() == "ibaml: a few photographs of each class"
    assert not opened
    assert page.locator("main img:not([src^='/thumbnail/'])").count() == 0
    assert page.locator("main b, main script").count() == 0
    seen.check_accessible()


def test_other_sites_in_the_same_browser_reach_nothing(server, visit):
    seen = visit(server.address)
    page = seen.page
    add_class(page, "disc", files("disc", range(2)))
    there = f"http://127.0.0.1:{server.port}"
    text = f"""<!doctype html><title>other</title><script>
      const say = (words) => document.title += " " + words;
      const tried = [
        fetch("{there}/class", {{method: "POST", mode: "no-cors", credentials: "include",
          body: '{{"name": "evil"}}'}}).then((r) => say(r.type), () => say("failed")),
        fetch("{there}/state", {{credentials: "include"}})
          .then(() => say("READ"), () => say("unread")),
        new Promise((done) => {{
          const image = new Image();
          image.onload = () => done(say("SHOWN"));
          image.onerror = () => done(say("hidden"));
          image.src = "{there}/thumbnail/1";
        }}),
        new Promise((done) => {{
          const script = document.createElement("script");
          script.onload = () => done(say("RUN"));
          script.onerror = () => done(say("unrun"));
          script.src = "{there}/page.js";
          document.head.append(script);
        }}),
      ];
      Promise.all(tried).then(() => say("end"));
    </script>"""

    class Other(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *args):
            pass

    site = HTTPServer(("127.0.0.1", 0), Other)
    threading.Thread(target=site.serve_forever, daemon=True).start()
    other = seen.context.new_page()  # with the cookie: another port is the same "site"
    other.goto(f"http://127.0.0.1:{site.server_port}/")
    other.wait_for_function("document.title.endsWith('end')")
    said = other.title()
    site.shutdown()
    for word in ("unread", "hidden", "unrun"):
        assert word in said, said
    page.reload()
    expect(page.locator(".tile")).to_have_count(2)
    assert card(page, "evil").count() == 0


def test_when_the_server_is_gone_the_page_says_so(server, visit):
    seen = visit(server.address)
    seen.expected.append("ERR_CONNECTION_REFUSED|Failed to load resource")
    add_class(seen.page, "disc", files("disc", range(1)))
    server.end()
    seen.page.locator("#files").set_input_files(files("disc", (7,)))
    gone = "The server does not answer: is ibaml serve still running?"
    expect(seen.page.locator("#ask-problems span")).to_have_text(gone)
    seen.page.get_by_label("New class").fill("dots")
    seen.page.keyboard.press("Enter")
    expect(seen.page.locator("#classes-problems span")).to_have_text(gone)


# --- how long it takes ----------------------------------------------------------------------------


@pytest.mark.skipif("IBAML_DATA" not in os.environ, reason="IBAML_DATA names no real photographs")
def test_25_and_10_photographs_of_classes_never_seen(visit, cache):
    """Prints what it takes; nothing here depends on it."""
    folder = Path(os.environ["IBAML_DATA"]) / "caltech101"
    classes = json.loads((folder / "splits.json").read_text())["test"][:6]
    with zipfile.ZipFile(folder / "caltech101-84.zip") as archive:
        listed = sorted(n for n in archive.namelist() if n.endswith(".jpg"))
        of = {c: [n for n in listed if f"/{c}/" in n] for c in classes}

        def photos(names):
            return [
                {"name": "-".join(n.split("/")[-2:]), "mimeType": "image/jpeg",
                 "buffer": archive.read(n)} for n in names
            ]  # fmt: skip

        known = {c: photos(of[c][:5]) for c in classes[:5]}
        new = photos([n for c in classes[:5] for n in of[c][20:22]])
        strangers = photos(of[classes[5]][:3])
    with served("--port", 0, cache=cache) as server:
        seen = visit(server.address)
        page = seen.page
        began = time.monotonic()
        for name, given in known.items():
            page.get_by_label("New class").fill(name)
            page.keyboard.press("Enter")
            expect(card(page, name)).to_be_visible()
            drop(page, f"[aria-label='class {name}']", given)
        drop(page, "#ask", new)
        expect(page.locator(".query .percent", has_text="%")).to_have_count(10, timeout=60_000)
        read(page)
        print(f"\n25 + 10 photographs: {time.monotonic() - began:.2f} s from drop to answers")
        right = [
            query(page, one["name"]).locator(".label").text_content() == one["name"].split("-")[0]
            for one in new
        ]
        print(f"{sum(right)} of 10 right")
        label = query(page, new[0]["name"]).locator(".label")
        for words in ("Remove", "Bring back"):
            now = label.text_content()
            began = time.monotonic()
            page.get_by_role("button", name=f"{words} the class {classes[0]}").click()
            expect(label).not_to_have_text(now)
            print(f"{words} a class: {1000 * (time.monotonic() - began):.0f} ms until answered")
        began = time.monotonic()
        drop(page, "#ask", strangers)
        expect(page.locator(".query .label", has_text="unknown").nth(1)).to_be_visible()
        print(f"3 of another class: {time.monotonic() - began:.2f} s")
        read(page)
        for look in ("desktop-light", "desktop-dark", "phone-light", "phone-dark"):
            size, scheme = look.split("-")
            again = visit(server.address, size=size, scheme=scheme)
            expect(again.page.locator(".query")).to_have_count(13)
            again.check_accessible()
            again.check_fits()
            again.shoot("serve-photographs")
