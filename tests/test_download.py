"""Files arrive whole, verified and once, whatever the server does."""

import contextlib
import hashlib
import random
import socket
import struct
import threading
import time
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BytesIO
from urllib.error import HTTPError
from urllib.request import Request

import pytest

from ibaml.tasks import download
from ibaml.tasks.download import DownloadError, Remote, fetch

DATA = random.Random(0).randbytes(300_000)
CORRUPT = bytes([DATA[0] ^ 1]) + DATA[1:]
FLOOD = 64 * 2**20


def digest(data):
    return hashlib.sha256(data).hexdigest()


class Handler(BaseHTTPRequestHandler):
    """Serves `server.data` with Range; each request takes the next entry of `server.plan`."""

    def log_message(self, *args):
        pass

    def do_GET(self):
        s = self.server
        wanted = self.headers.get("Range")
        s.ranges.append(wanted)
        s.if_ranges.append(self.headers.get("If-Range"))
        step, *args = s.plan.pop(0) if s.plan else s.always
        data = CORRUPT if step == "corrupt" else s.data
        if step == "status":
            self.send_error(args[0])
            return
        if step == "hang up":
            return
        if step == "redirect":
            self.send_response(302)
            self.send_header("Location", args[0])
            self.end_headers()
            return
        if step == "flood":
            self.send_response(200)
            self.end_headers()
            with contextlib.suppress(OSError):
                while s.sent < FLOOD:
                    s.sent += self.wfile.write(bytes(2**16))
            s.flooded.set()
            return
        start = 0
        same = self.headers.get("If-Range") in (None, s.tag)
        if wanted and same and step != "ignore range":
            start = int(wanted.removeprefix("bytes=").removesuffix("-"))
            if start >= len(data):
                self.send_error(416)
                return
            shown = start + 7 if step == "wrong range" else start
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {shown}-{len(data) - 1}/{len(data)}")
        else:
            self.send_response(200)
        if s.tag:
            self.send_header("ETag", s.tag)
        body = data[start:]
        if step != "no length":
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if step in ("drop", "reset", "stall"):
            body = body[: args[0]]
        with contextlib.suppress(OSError):
            self.wfile.write(body)
            if step == "stall":
                s.stop.wait(5)
            if step == "reset":
                time.sleep(0.05)
                linger = struct.pack("ii", 1, 0)
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
                self.connection.close()


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setattr(download, "BACKOFF", 0.01)
    s = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    s.daemon_threads = True
    s.data, s.plan, s.always, s.tag, s.sent = DATA, [], ("serve",), None, 0
    s.ranges, s.if_ranges = [], []
    s.stop, s.flooded = threading.Event(), threading.Event()
    s.url = f"http://127.0.0.1:{s.server_port}/sets/data.bin"
    thread = threading.Thread(target=s.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield s
    s.stop.set()
    s.shutdown()
    s.server_close()
    thread.join()


@pytest.fixture
def remote(server):
    return Remote(server.url, digest(DATA), len(DATA))


@pytest.fixture
def sleeps(monkeypatch):
    calls = []
    monkeypatch.setattr(download.time, "sleep", calls.append)
    return calls


def names(folder):
    return sorted(p.name for p in folder.iterdir())


# --- the plain case


def test_a_file_is_downloaded_and_reported(server, remote, tmp_path, capfd):
    folder, seen = tmp_path / "new" / "folder", []
    path = fetch(remote, folder, lambda got, total: seen.append((got, total)))
    assert path == folder / "data.bin"
    assert path.read_bytes() == DATA
    assert names(folder) == ["data.bin"]
    assert server.ranges == [None]
    assert seen[0] == (0, len(DATA))
    assert seen[-1] == (len(DATA), len(DATA))
    assert seen == sorted(seen)
    assert len(seen) > 2
    assert capfd.readouterr() == ("", "")


def test_the_total_is_unknown_where_nobody_says(server, tmp_path):
    server.plan = [("no length",)]
    seen = []
    fetch(Remote(server.url, digest(DATA)), tmp_path, lambda *a: seen.append(a))
    assert seen[-1] == (len(DATA), None)


def test_the_name_appears_only_when_the_file_is_whole(remote, tmp_path):
    seen = []
    fetch(remote, tmp_path, lambda *_: seen.append(names(tmp_path)))
    assert seen
    assert all(n == ["data.bin.part"] for n in seen)
    assert names(tmp_path) == ["data.bin"]


def test_a_file_already_there_is_not_downloaded_again(server, remote, tmp_path):
    (tmp_path / "data.bin").write_bytes(DATA)
    assert fetch(remote, tmp_path) == tmp_path / "data.bin"
    assert server.ranges == []


def test_a_wrong_file_already_there_is_replaced(server, remote, tmp_path):
    (tmp_path / "data.bin").write_bytes(CORRUPT)
    assert fetch(remote, tmp_path).read_bytes() == DATA
    assert server.ranges == [None]


def test_an_empty_file(server, tmp_path):
    server.data = b""
    assert fetch(Remote(server.url, digest(b""), 0), tmp_path).read_bytes() == b""


# --- continuing


def test_an_interrupted_run_is_continued(server, remote, tmp_path):
    def stop(got, _total):
        if got:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch(remote, tmp_path, stop)
    assert names(tmp_path) == ["data.bin.part"]
    got = (tmp_path / "data.bin.part").stat().st_size
    assert 0 < got < len(DATA)
    seen = []
    assert fetch(remote, tmp_path, lambda *a: seen.append(a)).read_bytes() == DATA
    assert server.ranges == [None, f"bytes={got}-"]
    assert seen[0] == (got, len(DATA))
    assert names(tmp_path) == ["data.bin"]


def test_a_whole_part_needs_no_request(server, remote, tmp_path):
    (tmp_path / "data.bin.part").write_bytes(DATA)
    assert fetch(remote, tmp_path).read_bytes() == DATA
    assert server.ranges == []
    assert names(tmp_path) == ["data.bin"]


@pytest.mark.parametrize("step", [("ignore range",), ("wrong range",), ("status", 416)])
def test_a_server_that_does_not_continue_starts_over(server, remote, tmp_path, step):
    server.plan = [step]
    (tmp_path / "data.bin.part").write_bytes(DATA[:1000])
    assert fetch(remote, tmp_path, attempts=1).read_bytes() == DATA
    again = [] if step == ("ignore range",) else [None]
    assert server.ranges == ["bytes=1000-", *again]


def test_a_416_to_a_whole_request_is_an_error(server, remote, tmp_path):
    server.always = ("status", 416)
    with pytest.raises(DownloadError, match="HTTP 416"):
        fetch(remote, tmp_path)
    assert server.ranges == [None]


@pytest.mark.parametrize("size", [None, len(DATA)])
def test_a_part_longer_than_the_file_starts_over(server, tmp_path, size):
    (tmp_path / "data.bin.part").write_bytes(DATA + b"more")
    path = fetch(Remote(server.url, digest(DATA), size), tmp_path)
    assert path.read_bytes() == DATA
    assert server.ranges == ([None] if size else ["bytes=300004-", None])


def test_a_part_of_another_file_is_thrown_away_once(server, remote, tmp_path):
    (tmp_path / "data.bin.part").write_bytes(CORRUPT[:1000])
    assert fetch(remote, tmp_path).read_bytes() == DATA
    assert server.ranges == ["bytes=1000-", None]


def test_the_full_retry_is_the_last(server, remote, tmp_path):
    (tmp_path / "data.bin.part").write_bytes(CORRUPT[:1000])
    server.always = ("corrupt",)
    with pytest.raises(DownloadError, match="expected sha256"):
        fetch(remote, tmp_path)
    assert server.ranges == ["bytes=1000-", None]
    assert names(tmp_path) == []


def test_the_full_retry_is_the_last_even_when_it_was_dropped(server, remote, tmp_path):
    (tmp_path / "data.bin.part").write_bytes(CORRUPT[:1000])
    server.data, server.plan = CORRUPT, [("serve",), ("drop", 500)]
    with pytest.raises(DownloadError, match="expected sha256"):
        fetch(remote, tmp_path)
    assert server.ranges == ["bytes=1000-", None, "bytes=500-"]


# --- trying again


def test_a_dropped_connection_is_continued(server, remote, tmp_path):
    server.plan = [("drop", 1000), ("drop", 500)]
    assert fetch(remote, tmp_path).read_bytes() == DATA
    assert server.ranges == [None, "bytes=1000-", "bytes=1500-"]


@pytest.mark.parametrize("step", [("reset", 1000), ("hang up",), ("stall", 1000)])
def test_resets_silence_and_stalls_are_tried_again(server, remote, tmp_path, step):
    server.plan = [step]
    assert fetch(remote, tmp_path, timeout=0.5).read_bytes() == DATA
    assert len(server.ranges) == 2
    if step[0] == "stall":
        assert server.ranges[1] == "bytes=1000-"


def test_a_drop_without_a_length_is_seen_by_the_size(server, remote, tmp_path):
    server.plan = [("no length",)]
    server.data = DATA[:1000]

    def grow(got, _total):
        if got == 1000:
            server.data = DATA

    assert fetch(remote, tmp_path, grow).read_bytes() == DATA
    assert server.ranges == [None, "bytes=1000-"]


@pytest.mark.parametrize("code", [500, 503, 429])
def test_a_passing_server_error_is_tried_again(server, remote, tmp_path, code):
    server.plan = [("status", code)]
    (tmp_path / "data.bin.part").write_bytes(DATA[:1000])
    assert fetch(remote, tmp_path).read_bytes() == DATA
    assert server.ranges == ["bytes=1000-"] * 2


def test_attempts_end_with_growing_pauses(server, remote, tmp_path, sleeps):
    server.always = ("status", 503)
    with pytest.raises(DownloadError, match=r"HTTP 503.*4 attempts.*by hand") as error:
        fetch(remote, tmp_path)
    assert server.url in str(error.value)
    assert len(server.ranges) == 4
    assert sleeps == pytest.approx([0.01, 0.02, 0.04])


def test_what_arrived_before_giving_up_is_kept(server, remote, tmp_path):
    server.always = ("drop", 100)
    with pytest.raises(DownloadError, match="dropped after 200 of 300000 bytes"):
        fetch(remote, tmp_path, attempts=2)
    assert (tmp_path / "data.bin.part").read_bytes() == DATA[:200]
    server.always = ("serve",)
    assert fetch(remote, tmp_path).read_bytes() == DATA
    assert server.ranges[-1] == "bytes=200-"


def test_trouble_with_the_disk_is_not_taken_for_the_network(server, remote, tmp_path, sleeps):
    (tmp_path / "data.bin.part").mkdir()
    with pytest.raises(IsADirectoryError):
        fetch(remote, tmp_path)
    assert len(server.ranges) == 1
    assert sleeps == []


# --- refusals


def test_a_wrong_checksum_names_both_digests(server, remote, tmp_path):
    server.always = ("corrupt",)
    (tmp_path / "data.bin").write_bytes(b"old")
    with pytest.raises(DownloadError) as error:
        fetch(remote, tmp_path)
    for text in (server.url, f"expected sha256 {digest(DATA)}", f"found {digest(CORRUPT)}"):
        assert text in str(error.value)
    assert server.ranges == [None]
    assert names(tmp_path) == ["data.bin"]
    assert (tmp_path / "data.bin").read_bytes() == b"old"


def test_404_says_how_to_do_it_by_hand(server, remote, tmp_path, sleeps):
    server.always = ("status", 404)
    with pytest.raises(DownloadError, match=r"HTTP 404.*by hand") as error:
        fetch(remote, tmp_path)
    for text in (server.url, str(tmp_path / "data.bin"), digest(DATA)):
        assert text in str(error.value)
    assert len(server.ranges) == 1
    assert sleeps == []


def test_a_refused_connection_says_how_to_do_it_by_hand(tmp_path, sleeps, monkeypatch):
    monkeypatch.setenv("no_proxy", "*")
    with socket.socket() as s:  # bound, never listening
        s.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{s.getsockname()[1]}/data.bin"
        (tmp_path / "data.bin").write_bytes(b"not it")
        with pytest.raises(DownloadError, match=r"refused.*by hand.*is not the expected") as error:
            fetch(Remote(url, digest(DATA)), tmp_path)
    assert url in str(error.value)
    assert str(tmp_path / "data.bin") in str(error.value)
    assert sleeps == []


@pytest.mark.parametrize("address", [":1x/f", ":99999/f", "/a b", "/é"])
def test_a_malformed_url_is_one_clear_error(server, tmp_path, sleeps, address):
    url = "http://127.0.0.1" + address
    if address.startswith("/"):
        url = server.url.removesuffix("/sets/data.bin") + address
    with pytest.raises(DownloadError, match="by hand"):
        fetch(Remote(url, digest(DATA)), tmp_path)
    assert server.ranges == []
    assert sleeps == []


@pytest.mark.parametrize(
    "url", ["file://{}", "FILE://{}", "ftp://a/f", "data:,x", "{}", "http://[a/f"]
)
def test_other_schemes_are_refused(url, tmp_path):
    (tmp_path / "source").write_bytes(DATA)
    with pytest.raises(DownloadError, match="not an http or https url"):
        fetch(Remote(url.format(tmp_path / "source"), digest(DATA)), tmp_path / "to")
    assert not (tmp_path / "to").exists()


@pytest.mark.parametrize("url", ["file://{}", "ftp://127.0.0.1{}", "data:,{}"])
def test_a_redirect_to_another_scheme_is_refused(server, remote, tmp_path, url):
    (tmp_path / "source").write_bytes(DATA)
    server.always = ("redirect", url.format(tmp_path / "source"))
    with pytest.raises(DownloadError, match="not allowed"):
        fetch(remote, tmp_path / "to")
    assert len(server.ranges) == 1
    assert names(tmp_path / "to") == []


def test_a_redirect_from_https_to_http_is_refused():
    handler, args = download._Redirects(), (BytesIO(), 302, "Found", Message())
    with pytest.raises(HTTPError, match="not allowed"):
        handler.redirect_request(Request("https://a/f"), *args, "http://a/f")
    assert handler.redirect_request(Request("http://a/f"), *args, "https://a/f") is not None


def test_a_redirect_is_followed_and_continues(server, remote, tmp_path):
    server.plan = [("redirect", server.url + "?mirror")]
    (tmp_path / "data.bin.part").write_bytes(DATA[:1000])
    assert fetch(remote, tmp_path).read_bytes() == DATA
    assert server.ranges == ["bytes=1000-"] * 2


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("step", ["serve", "no length"])
def test_too_many_bytes_are_refused(server, tmp_path, monkeypatch, known, step):
    monkeypatch.setattr(download, "MAX_BYTES", 1000)
    server.always = (step,)
    seen = []
    with pytest.raises(DownloadError, match="more than the 1000 bytes"):
        fetch(
            Remote(server.url, digest(DATA), 1000 if known else None),
            tmp_path,
            lambda got, _: seen.append((got, (tmp_path / "data.bin.part").stat().st_size)),
        )
    assert all(got <= 1000 and stored <= 1000 for got, stored in seen)
    assert bool(seen) == (step == "no length")
    assert names(tmp_path) == []
    assert len(server.ranges) == 1


def test_exactly_the_limit_is_allowed(server, tmp_path, monkeypatch):
    monkeypatch.setattr(download, "MAX_BYTES", len(DATA))
    server.always = ("no length",)
    assert fetch(Remote(server.url, digest(DATA)), tmp_path).read_bytes() == DATA


def test_the_limit_where_the_size_is_unknown():
    assert download.MAX_BYTES == 10 * 1024**3


def test_a_flood_is_cut_off(server, remote, tmp_path):
    server.always = ("flood",)
    with pytest.raises(DownloadError, match="more than"):
        fetch(remote, tmp_path)
    assert server.flooded.wait(5)
    assert server.sent < FLOOD


# --- names and digests


@pytest.mark.parametrize(
    ("path", "name", "stored"),
    [
        ("/a/b.tar.gz", None, "b.tar.gz"),
        ("/a/b.zip?download=1#x", None, "b.zip"),
        ("/a/b.zip", "c.zip", "c.zip"),
        ("/a/my%20set.zip", None, "my_set.zip"),
        ("/a/%2e%2e%2f%2e%2e%2fevil", None, "evil"),
        ("/a", "../../evil", "evil"),
        ("/a", "..\\..\\evil", "evil"),
        ("/a", "/etc/passwd", "passwd"),
        ("/a", "C:evil\0", "C_evil_"),
        ("/a", "a..b", "a.b"),
        ("/a", "..hidden", "hidden"),
    ],
)
def test_names_stay_in_the_folder(server, tmp_path, path, name, stored):
    folder = tmp_path / "in"
    url = server.url.removesuffix("/sets/data.bin") + path
    assert fetch(Remote(url, digest(DATA), name=name), folder) == folder / stored
    assert names(folder) == [stored]
    assert names(tmp_path) == ["in"]


@pytest.mark.parametrize("name", ["..", ".", "", "a/..", "a/"])
def test_a_name_of_nothing_is_refused(remote, tmp_path, name):
    with pytest.raises(DownloadError, match="no file name"):
        fetch(Remote(remote.url, remote.checksum, name=name), tmp_path)


def test_digests_are_checked_before_anything_is_downloaded(server, tmp_path):
    with pytest.raises(ValueError, match="MD5 or SHA-256"):
        Remote(server.url, "abc")
    upper = Remote(server.url, digest(DATA).upper())
    assert fetch(upper, tmp_path).read_bytes() == DATA


def test_attempts_must_be_positive(remote, tmp_path):
    with pytest.raises(ValueError, match="attempts"):
        fetch(remote, tmp_path, attempts=0)


# --- without a checksum


def unverified(server, folder, size=None):
    with pytest.warns(UserWarning, match=r"data\.bin has no known"):
        return fetch(Remote(server.url, None, size), folder)


def test_without_a_checksum_it_says_so_and_goes_by_the_size(server, tmp_path):
    assert unverified(server, tmp_path).read_bytes() == DATA
    unverified(server, tmp_path, len(DATA))
    assert len(server.ranges) == 1
    with pytest.raises(DownloadError, match="expected 400000 bytes, found 300000"):
        unverified(server, tmp_path, 400_000)


def test_without_a_checksum_an_old_part_is_not_trusted(server, tmp_path):
    (tmp_path / "data.bin.part").write_bytes(CORRUPT[:1000])
    assert unverified(server, tmp_path).read_bytes() == DATA
    assert server.ranges == [None]


def test_without_a_checksum_only_the_same_version_is_continued(server, tmp_path):
    server.plan, server.tag = [("drop", 1000)], '"one"'
    assert unverified(server, tmp_path / "same").read_bytes() == DATA
    assert server.ranges == [None, "bytes=1000-"]
    assert server.if_ranges == [None, '"one"']

    server.plan, server.tag, server.ranges = [("drop", 1000)], None, []
    assert unverified(server, tmp_path / "untold").read_bytes() == DATA
    assert server.ranges == [None, None]


def test_without_a_checksum_a_changed_version_starts_over(server, tmp_path, monkeypatch):
    server.plan, server.tag, server.data = [("drop", 1000)], '"one"', CORRUPT

    def publish(_seconds):
        server.data, server.tag = DATA, '"two"'

    monkeypatch.setattr(download.time, "sleep", publish)
    assert unverified(server, tmp_path).read_bytes() == DATA
    assert server.ranges == [None, "bytes=1000-"]


def test_an_md5_is_a_checksum_too(server, tmp_path):
    known = hashlib.md5(DATA).hexdigest()
    assert fetch(Remote(server.url, known), tmp_path).read_bytes() == DATA
    with pytest.raises(DownloadError, match="expected md5"):
        fetch(Remote(server.url, hashlib.md5(b"other").hexdigest(), name="b"), tmp_path)
