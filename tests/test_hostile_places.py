"""Odd places: links in circles, links out of a run folder, files without end or beginning, caches
that others may write to, and settings that ask for more than a machine has."""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import ibaml
from fuzzing import OURS, picture
from ibaml.answers import Classifier, Prior
from ibaml.cli import app
from ibaml.fields import SettingsError, read_toml
from ibaml.files import real
from ibaml.tasks import DataError, Table, image_folder, image_list
from ibaml.tasks import vectors as vectors_module
from ibaml.tasks.cache import cache_folder, cached
from ibaml.tasks.catalog import open_data
from ibaml.tasks.images import read_file
from ibaml.tasks.vectors import Vectors
from ibaml.training import RunError, Settings, create_run, open_run, resolve, resume, train
from ibaml.untrusted import MB, Refused, content
from runs import waves
from test_hostile import within

posix = pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs links and pipes")
linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
COLUMNS = {"task": "a", "features": ["b"], "target": "c"}
READERS = {
    "learner": ibaml.load,
    "posterior": ibaml.load_posterior,
    "classifier": Classifier.load,
    "prior": Prior.open,
    "table": lambda path: Table.read(path, **COLUMNS),
    "list": image_list,
    "vectors": lambda path: open_data(f"{path}.npz"),
    "zip": image_folder,
    "settings": lambda path: read_toml(path, Settings),
    "run": open_run,
    "picture": read_file,
}


@posix
@pytest.mark.parametrize("name", READERS)
def test_links_in_a_circle_links_to_nowhere_and_folders_are_refused(name, tmp_path):
    for kind in ("circle", "nowhere", "folder"):
        path = tmp_path / kind
        for place in (path, Path(f"{path}.npz")):
            if kind == "folder":
                place.mkdir()
            else:
                place.symlink_to(place if kind == "circle" else "/nowhere/at/all")
        with within(60), pytest.raises((*OURS, OSError, ValueError)):
            READERS[name](path)


def test_somebody_without_a_home_is_a_sentence(tmp_path, monkeypatch):
    with pytest.raises(DataError, match="neither a path nor"):
        open_data("~nobody-of-this-name/photos")
    with pytest.raises(DataError):
        image_folder("~nobody-of-this-name/photos")
    assert real(tmp_path / "a" / ".." / "b") == real(tmp_path) / "b"
    monkeypatch.delenv("IBAML_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # as for a user without an entry
    with pytest.raises(DataError, match=r"no home folder.*IBAML_CACHE"):
        cache_folder()


def test_a_small_file_takes_little_memory_whatever_its_limit(tmp_path):
    """Reading n bytes takes n bytes at once, though the file may have three."""
    (tmp_path / "small").write_bytes(b"abc")
    tracemalloc.start()
    try:
        assert content(tmp_path / "small", 64 * MB) == b"abc"
        assert tracemalloc.get_traced_memory()[1] < 4 * MB
    finally:
        tracemalloc.stop()


@linux
def test_a_file_that_hides_its_size_is_read_up_to_the_limit():
    assert b"MemTotal" in content(Path("/proc/meminfo"), MB)
    with pytest.raises(Refused, match="more than 10 bytes"):
        content(Path("/proc/meminfo"), 10)


@linux
@pytest.mark.skipif(not os.access("/proc/kmsg", os.R_OK), reason="needs the right to read it")
def test_a_file_that_would_be_waited_for_is_refused(tmp_path):
    (tmp_path / "c.toml").symlink_to("/proc/kmsg")
    with within(60), pytest.raises((*OURS, OSError)):  # (what is there first may be read)
        read_toml(tmp_path / "c.toml", Settings)


# --- run folders ---------------------------------------------------------------------------------


@posix
@pytest.mark.parametrize("name", ["checkpoints", "tensorboard", "log.jsonl", ".lock"])
def test_a_run_writes_and_removes_nothing_through_a_link(name, tmp_path):
    run, _ = train(waves(iterations=2, val_every=0, checkpoint_every=1), tmp_path / "run")
    mine = tmp_path / "mine"
    if name in ("checkpoints", "tensorboard"):
        mine.mkdir()
        if name == "checkpoints":
            shutil.copytree(run.checkpoints, mine, dirs_exist_ok=True)
            (mine / ".step-00000001.safetensors-abc").write_text("mine")
        shutil.rmtree(run.path / name, ignore_errors=True)
    else:
        mine.write_text("precious")
        (run.path / name).unlink(missing_ok=True)
    (run.path / name).symlink_to(mine)

    def before() -> dict[str, bytes]:
        files = [mine] if mine.is_file() else sorted(mine.iterdir())
        return {str(p): p.read_bytes() for p in files}

    kept = before()
    with pytest.raises(RunError, match="is a link, and a run writes into its own folder only"):
        resume(run.path, iterations=4)
    with pytest.raises(RunError, match="is a link"):
        create_run(run.path, run.settings, run.data)
    assert before() == kept


@posix
def test_an_evaluation_is_not_written_through_a_link(tmp_path):
    run, _ = train(waves(iterations=1, val_every=0), tmp_path / "run")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "summary.json").write_text("precious")
    (run.path / "evaluation").symlink_to(tmp_path / "mine")
    done = CliRunner().invoke(app, ["evaluate", str(run.path), "--tasks", "2"])
    assert done.exit_code == 1
    assert "is a link" in " ".join(done.output.split())
    assert (tmp_path / "mine" / "summary.json").read_text() == "precious"


# --- caches that others may write to -------------------------------------------------------------


@posix
def test_a_pipe_in_the_cache_is_not_waited_for(tmp_path, monkeypatch):
    monkeypatch.setenv("IBAML_CACHE", str(tmp_path))

    def build():
        return np.arange(9), {"a": 1}

    cached("x", "a" * 30, build)
    (entry,) = (tmp_path / "ibaml-datasets").glob("x-*")
    for name in ("images.npy", "facts.json"):
        (entry / name).unlink()
        os.mkfifo(entry / name)
        with within(60):
            array, _ = cached("x", "a" * 30, build)
        assert array.tolist() == list(range(9))


HOSTILE = {
    "a view without end": (
        "CREATE VIEW vectors AS WITH RECURSIVE n(key) AS (SELECT x'61' UNION ALL SELECT key FROM n)"
        " SELECT key, zeroblob(16) AS vector, 0 AS used FROM n"
    ),
    "another table": "CREATE TABLE vectors (key, vector, used, more)",
    "a trigger": (
        "CREATE TABLE vectors (key BLOB PRIMARY KEY, vector BLOB NOT NULL, used INTEGER NOT NULL);"
        "CREATE TRIGGER t BEFORE INSERT ON vectors BEGIN SELECT RAISE(IGNORE); END"
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_vectors_are_read_from_our_own_table_only(name, tmp_path, monkeypatch):
    monkeypatch.setenv("IBAML_CACHE", str(tmp_path))
    store = Vectors("x", "d" * 30, 4)
    store.put({b"a": np.ones(4, "f")})
    (file,) = tmp_path.glob("ibaml-datasets/embeddings-x-*/vectors.sqlite")
    file.unlink()
    base = sqlite3.connect(file)
    base.executescript(HOSTILE[name])
    base.close()
    with within(60):
        assert store.get([b"a"]) == {}
        store.put({b"b": np.full(4, 2, "f")})
        assert store.get([b"b"])[b"b"].tolist() == [2, 2, 2, 2]
    assert store.usable


def test_a_vector_of_another_kind_is_not_taken(tmp_path, monkeypatch):
    monkeypatch.setenv("IBAML_CACHE", str(tmp_path))
    store = Vectors("x", "d" * 30, 4)
    store.put({b"a": np.ones(4, "f")})
    (file,) = tmp_path.glob("ibaml-datasets/embeddings-x-*/vectors.sqlite")
    with sqlite3.connect(file) as base:
        for key, value in ((b"t", "sixteen letters!"), (b"s", b"short"), (b"n", 7)):
            base.execute("INSERT INTO vectors VALUES (?, ?, 'odd')", (key, value))
    assert set(store.get([b"a", b"t", b"s", b"n"])) == {b"a"}
    assert vectors_module.MOST > 0


# --- settings ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "given", [{"hidden": "8," + "9" * 40_001}, {"hidden": "0"}, {"threads": 10**6}]
)
def test_settings_out_of_all_proportion_are_refused(given):
    with pytest.raises(SettingsError, match=next(iter(given))):
        resolve({"data": "sinusoids", **given})


@linux
def test_a_network_that_no_memory_holds_is_a_sentence(tmp_path):
    words = ["--hidden", "99999999,99999999", "--out", str(tmp_path / "run")]
    done = CliRunner().invoke(app, ["train", "--data", "sinusoids", *words])
    assert done.exit_code == 1
    assert "Error: there is not enough memory" in " ".join(done.output.split())


def test_a_picture_named_in_another_alphabet_is_read(tmp_path):
    place = os.fsencode(tmp_path) + b"/caf\xe9.png"
    with open(place, "wb") as file:
        file.write(picture("PNG"))
    assert read_file(Path(os.fsdecode(place))) == picture("PNG")


@posix
def test_names_tell_the_terminal_nothing(tmp_path):
    """An escape sequence may rename the window or hide text; U+202E turns what follows around."""
    odd = "\x1b]0;mine\x07\x1b[31m\u202e"
    for name in (f"a{odd}", "b", "c"):
        (tmp_path / "d" / name).mkdir(parents=True)
        (tmp_path / "d" / name / "1.png").write_bytes(picture("PNG"))
    (tmp_path / "d" / "b" / f"{odd}.png").write_bytes(b"no picture")
    for words in (["info"], ["check"]):
        done = CliRunner().invoke(app, ["data", *words, str(tmp_path / "d"), "--image-size", "8"])
        assert not set("\x1b\x07\u202e") & set(done.output)
    assert r"\x1b]0;mine" in done.output


def test_a_librarys_thread_that_cannot_write_says_so_in_a_sentence():
    """TensorBoard writes in a thread of its own, and a disk may be full."""
    script = """
import sys, threading
import ibaml.cli
def app():
    def write():
        raise OSError(28, "No space left on device")
    thread = threading.Thread(target=write)
    thread.start()
    thread.join()
ibaml.cli.app = app
from ibaml.__main__ import main
main()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "Error: [Errno 28] No space left on device\n")
