"""A file arrives whole and verified, whatever the server does."""

import contextlib
import hashlib
import random
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from ibaml.tasks import download
from ibaml.tasks.catalog import CATALOG
from ibaml.tasks.download import DownloadError, Remote, fetch

DATA = random.Random(0).randbytes(300_000)
CORRUPT = bytes([DATA[0] ^ 1]) + DATA[1:]
SHA = hashlib.sha256(DATA).hexdigest()


class Handler(BaseHTTPRequestHandler):
    """Serves DATA with Range; each request takes the next entry of `server.plan`."""

    def log_message(self, *args):
        pass

    def do_GET(self):
        wanted = self.headers.get("Range")
        self.server.ranges.append(wanted)
        step, *args = self.server.plan.pop(0) if self.server.plan else self.server.always
        if step == "status":
            self.send_error(args[0])
            return
        if step == "hang up":
            return
        if step == "redirect":
            self.send_response(302)
            self.send_header("Location", self.server.url + "?mirror")
            self.end_headers()
            return
        start = 0
        if wanted and step != "ignore range":
            start = int(wanted.removeprefix("bytes=").removesuffix("-"))
            if start >= len(DATA):
                self.send_error(416)
                return
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {start}-{len(DATA) - 1}/{len(DATA)}")
        else:
            self.send_response(200)
        body = (CORRUPT if step == "corrupt" else DATA)[start:]
        if step != "no length":
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        with contextlib.suppress(OSError):
            self.wfile.write(body[: args[0]] if args else body)
            if step == "stall":
                self.server.stop.wait(5)


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setattr(download, "BACKOFF", 0.01)
    s = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    s.daemon_threads = True
    s.plan, s.always, s.ranges, s.stop = [], ("serve",), [], threading.Event()
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
    return Remote(server.url, SHA)


def names(folder):
    return sorted(p.name for p in folder.iterdir())


@pytest.mark.parametrize(("step", "total"), [("serve", len(DATA)), ("no length", None)])
def test_a_file_is_downloaded_once_and_reported(server, remote, tmp_path, step, total):
    server.plan = [(step,)]
    folder, seen = tmp_path / "new" / "folder", []
    path = fetch(remote, folder, lambda *counts: seen.append(counts))
    assert path == folder / "data.bin"
    assert path.read_bytes() == DATA
    assert names(folder) == ["data.bin"]
    assert seen == sorted(seen)
    assert seen[-1] == (len(DATA), total)
    assert fetch(remote, folder) == path
    assert server.ranges == [None]


def test_a_wrong_file_that_is_there_is_replaced(remote, tmp_path):
    (tmp_path / "data.bin").write_bytes(CORRUPT)
    assert fetch(remote, tmp_path).read_bytes() == DATA


def test_an_md5_is_a_checksum_too(server, tmp_path):
    assert fetch(Remote(server.url, hashlib.md5(DATA).hexdigest()), tmp_path).exists()
    with pytest.raises(
        DownloadError, match=f"expected md5 {32 * '0'}, found {hashlib.md5(DATA).hexdigest()}"
    ):
        fetch(Remote(server.url, 32 * "0"), tmp_path)


@pytest.mark.parametrize("size", [1, 1000, len(DATA) - 1, len(DATA)])
def test_what_an_earlier_run_left_is_continued(server, remote, tmp_path, size):
    (tmp_path / "data.bin.part").write_bytes(DATA[:size])
    assert fetch(remote, tmp_path).read_bytes() == DATA
    assert server.ranges == [f"bytes={size}-"]
    assert names(tmp_path) == ["data.bin"]


@pytest.mark.parametrize("left", [CORRUPT[:1000], CORRUPT, DATA + b"more"])
def test_what_is_left_of_another_file_is_thrown_away(server, remote, tmp_path, left):
    (tmp_path / "data.bin.part").write_bytes(left)
    assert fetch(remote, tmp_path).read_bytes() == DATA
    assert server.ranges == [f"bytes={len(left)}-", None]


def test_a_server_that_does_not_continue_starts_over(server, remote, tmp_path):
    server.plan = [("ignore range",)]
    (tmp_path / "data.bin.part").write_bytes(DATA[:1000])
    assert fetch(remote, tmp_path).read_bytes() == DATA


@pytest.mark.parametrize("step", [("serve", 1000), ("stall", 1000)])
def test_a_dropped_connection_is_continued(server, remote, tmp_path, step):
    server.plan = [step]
    assert fetch(remote, tmp_path, timeout=0.3).read_bytes() == DATA
    assert server.ranges == [None, "bytes=1000-"]


@pytest.mark.parametrize("step", [("status", 500), ("status", 429), ("hang up",), ("redirect",)])
def test_a_passing_trouble_loses_nothing(server, remote, tmp_path, step):
    server.plan = [step]
    (tmp_path / "data.bin.part").write_bytes(DATA[:1000])
    assert fetch(remote, tmp_path).read_bytes() == DATA
    assert server.ranges == ["bytes=1000-"] * 2


def test_attempts_end_and_keep_what_arrived(server, remote, tmp_path):
    server.always = ("serve", 100)
    with pytest.raises(DownloadError, match="dropped after 200 of 300000 bytes"):
        fetch(remote, tmp_path, attempts=2)
    assert (tmp_path / "data.bin.part").read_bytes() == DATA[:200]


def test_a_wrong_checksum_names_both_digests_and_keeps_nothing(server, remote, tmp_path):
    server.always = ("corrupt",)
    (tmp_path / "data.bin").write_bytes(b"old")
    with pytest.raises(DownloadError, match=r"could not download .*: expected sha256") as error:
        fetch(remote, tmp_path)
    assert f"expected sha256 {SHA}" in str(error.value)
    assert f"found {hashlib.sha256(CORRUPT).hexdigest()}" in str(error.value)
    assert server.ranges == [None]
    assert (tmp_path / "data.bin").read_bytes() == b"old"
    assert names(tmp_path) == ["data.bin"]


def test_a_missing_file_is_said_at_once_and_how_to_do_it_by_hand(server, remote, tmp_path):
    server.always = ("status", 404)
    with pytest.raises(DownloadError, match=r"HTTP 404.*Download it by hand and save it") as error:
        fetch(remote, tmp_path)
    assert all(word in str(error.value) for word in (server.url, str(tmp_path / "data.bin"), SHA))
    assert len(server.ranges) == 1


def test_a_refused_connection_is_a_sentence(server, tmp_path):
    with socket.socket() as s:  # bound, never listening
        s.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{s.getsockname()[1]}/data.bin"
        with pytest.raises(
            DownloadError, match=r"could not download .*refused.*Download it by hand and save it"
        ):
            fetch(Remote(url, SHA), tmp_path)


def test_trouble_with_the_disk_is_named(remote, tmp_path):
    (tmp_path / "data.bin.part").mkdir()
    with pytest.raises(
        DownloadError, match=r"could not download .*Is a directory.*Download it by hand and save it"
    ):
        fetch(remote, tmp_path)


def test_the_catalog_has_plain_names_and_whole_checksums():
    for remote in (r for known in CATALOG.values() for r in known.remotes):
        assert remote.url.startswith("https://")
        assert remote.name.endswith(".zip")
        assert len(remote.checksum) in (32, 64)
        assert set(remote.checksum) <= set("0123456789abcdef")
