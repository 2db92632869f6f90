"""`ibaml data` as a person types it."""

from __future__ import annotations

import http.server
import json
import threading
from functools import partial

import pytest
from typer.testing import CliRunner

from ibaml.cli import app
from ibaml.tasks import catalog
from ibaml.tasks.catalog import CATALOG, glyphs
from ibaml.tasks.download import Remote
from test_sources import encoded, make_folder, picture

runner = CliRunner()


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("IBAML_CACHE", str(tmp_path_factory.mktemp("cache")))


def run(*words: object, code: int = 0) -> str:
    done = runner.invoke(app, ["data", *map(str, words)], env={"COLUMNS": "200"})
    assert done.exit_code == code, done.output
    return done.output


def test_list_names_every_dataset():
    shown = run("list")
    assert all(name in shown for name in CATALOG)


def test_info(tmp_path):
    shown = run("info", make_folder(tmp_path / "mine"), "--image-size", 12)
    assert "3 × 12 × 12" in shown
    assert "4 to 4" in shown


def test_preview_is_a_picture(tmp_path):
    folder = make_folder(tmp_path / "mine", [f"class {i}" for i in range(40)], 4)
    out = tmp_path / "p.png"
    run("preview", folder, "--image-size", 12, "--split", "train", "--queries", 2, "--out", out)
    assert out.read_bytes().startswith(b"\x89PNG")
    shown = run("preview", folder, "--image-size", 12, "--ways", 39, code=1)
    assert "lower ways" in shown


def test_check_tells_leaks_and_fails(tmp_path):
    folder = make_folder(tmp_path / "mine")
    same = encoded(picture(0))
    (folder / "b" / "leak.png").write_bytes(same)
    (tmp_path / "s.json").write_text(json.dumps({"train": ["a"], "test": ["b"]}))
    shown = run("check", folder, "--splits", tmp_path / "s.json", "--image-size", 12, code=1)
    assert "a/0.png = b/leak.png" in shown
    assert "fewer than 16 images: 3" in shown
    (folder / "b" / "leak.png").unlink()
    assert "two splits: 0" in run(
        "check", folder, "--splits", tmp_path / "s.json", "--image-size", 12
    )


def test_errors_are_sentences(tmp_path):
    assert "neither a path nor one of" in run("info", "nothing", code=1)
    folder = make_folder(tmp_path / "mine")
    (folder / "a" / "bad.png").write_bytes(b"x")
    shown = run("check", folder)
    assert "1 of 13 images cannot be read: they are left out" in shown
    assert "a/bad.png: not a readable image" in shown
    assert "DataWarning" not in shown
    for file in folder.rglob("*.png"):
        file.write_bytes(b"x")
    shown = run("check", folder, code=1)
    assert "13 of 13 images cannot be read: repair or remove them" in shown
    assert "Traceback" not in shown


def test_any_text_can_be_printed(tmp_path):
    assert "[/x]" in run("info", "[/x]", code=1)
    names = [f"cl$\\foo${i} [b]" for i in range(20)]
    folder = make_folder(tmp_path / "mine", names, 3)
    shown = run(
        "preview", folder, "--image-size", 12, "--split", "train", "--queries", 2,
        "--out", tmp_path / "sheet",
    )  # fmt: skip
    assert (tmp_path / "sheet.png").exists()
    assert "sheet.png" in shown


def test_get_says_what_to_bring(tmp_path):
    shown = run("get", "miniimagenet", "--root", tmp_path / "mini")
    assert "image-net.org" in shown
    assert "non-commercial" in shown
    assert str(tmp_path / "mini") in shown
    assert "is none of" in run("get", "nothing", code=1)


def test_get_downloads_verifies_and_keeps(tmp_path, monkeypatch):
    """From a server on loopback, as Omniglot from its own."""
    import hashlib

    (tmp_path / "www").mkdir()
    content = b"archive" * 1000
    for name in ("a.zip", "b.zip"):
        (tmp_path / "www" / name).write_bytes(content)
    handler = partial(http.server.SimpleHTTPRequestHandler, directory=tmp_path / "www")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        site = f"http://127.0.0.1:{server.server_port}"
        good = Remote(f"{site}/a.zip", hashlib.md5(content).hexdigest())
        bad = Remote(f"{site}/b.zip", hashlib.md5(b"other").hexdigest())
        for remotes, code in (((good,), 0), ((bad,), 1)):
            from dataclasses import replace

            known = replace(CATALOG["omniglot"], remotes=remotes)
            monkeypatch.setitem(catalog.CATALOG, "omniglot", known)
            shown = run("get", "omniglot", "--root", tmp_path / "here", code=code)
        server.shutdown()
    assert "expected md5" in shown
    assert (tmp_path / "here" / "a.zip").read_bytes() == content
    assert not (tmp_path / "here" / "b.zip").exists()


def test_glyphs_are_a_dataset(recwarn):
    data = glyphs(per_class=2)
    assert data.examples.shape[1:] == (1, 28, 28)
    assert len(data.members("test")) >= 200
    again = glyphs(per_class=2)
    assert again.digest == data.digest
    assert (again.examples == data.examples).all()
