"""The cache of decoded datasets: what is removed from a disk, and what is never touched."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from ibaml.cli import app
from ibaml.tasks import DataError
from ibaml.tasks.cache import cached
from runs import environment

DAYS = 3 * 86400


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    folder = tmp_path / "cache"
    folder.mkdir()
    monkeypatch.setenv("IBAML_CACHE", str(folder))
    return folder


def keep(letter: str = "a", name: str = "mine") -> None:
    """One entry."""
    cached(name, letter * 64, lambda: (np.arange(5000, dtype=np.uint8), {"from": letter}))


def folder_with(path: Path, file: str = "id_rsa") -> Path:
    path.mkdir(parents=True)
    (path / file).write_text("precious")
    return path


def aged(path: Path) -> Path:
    old = time.time() - DAYS
    os.utime(path, (old, old), follow_symlinks=False)
    return path


def killed_while_writing(name: str) -> None:
    """A process that dies while it writes an entry."""
    code = (
        "import os, numpy as np; from ibaml.tasks.cache import cached; "
        "np.save = lambda *_: os._exit(9); "
        f"cached({name!r}, 'b' * 64, lambda: (np.zeros(3), {{}}))"
    )
    done = subprocess.run([sys.executable, "-c", code], env=environment())
    assert done.returncode == 9


def data(*words: str, code: int = 0) -> str:
    done = CliRunner().invoke(app, ["data", *words], env={"COLUMNS": "200"})
    assert done.exit_code == code, done.output
    return done.output


def test_other_peoples_folders_are_left_alone_however_old(cache):
    """IBAML_CACHE may be a home folder."""
    backup = folder_with(cache / ".ssh-backup")
    aged(backup)
    keep()
    assert (backup / "id_rsa").exists()
    data("cache", "--clear")
    assert (backup / "id_rsa").read_text() == "precious"


def test_all_lies_in_one_folder_that_says_whose_it_is(cache):
    keep()
    (own,) = cache.iterdir()
    tag = (own / "CACHEDIR.TAG").read_text()
    assert tag.startswith("Signature: 8a477f597d28d172789f06886806bc55\n")
    assert "ibaml" in tag


@pytest.mark.parametrize("as_a_link", [False, True])
def test_a_folder_of_that_name_that_somebody_else_made_is_refused(cache, as_a_link):
    theirs = folder_with(cache / ("elsewhere" if as_a_link else "ibaml-datasets"))
    if as_a_link:
        (cache / "ibaml-datasets").symlink_to(theirs)
    with pytest.raises(DataError, match=r"ibaml-datasets was not made by ibaml.*set IBAML_CACHE"):
        keep()
    assert "was not made by ibaml" in data("cache", "--clear", code=1)
    assert [path.name for path in theirs.iterdir()] == ["id_rsa"]


def test_what_a_killed_process_left_is_swept_after_a_day_and_nothing_beside_it(cache):
    killed_while_writing("yesterday")
    (left,) = (path for path in cache.rglob(".*") if path.is_dir())
    own = left.parent
    theirs = aged(folder_with(own / left.name.replace("yesterday", "theirs")))
    target = aged(folder_with(cache / "target"))
    link = own / left.name.replace("yesterday", "link")
    link.symlink_to(target)
    aged(link)
    keep("a")
    assert left.exists(), "it may still be written"
    aged(left)
    keep("c")
    assert not left.exists()
    assert (theirs / "id_rsa").exists()
    assert (target / "id_rsa").exists()
    assert link.is_symlink()


def test_a_damaged_entry_that_holds_what_we_did_not_put_there_is_refused(cache):
    keep()
    (array,) = cache.rglob("images.npy")
    array.write_bytes(b"short")
    (array.parent / "notes.txt").write_text("precious")
    with pytest.raises(DataError, match=r"is damaged .* move it away"):
        keep()
    assert (array.parent / "notes.txt").exists()


def test_the_command_lists_what_is_kept_with_its_size(cache):
    assert "0 datasets" in data("cache")
    keep("a", "photos")
    keep("b", "letters")
    shown = data("cache")
    assert "photos" in shown
    assert "letters" in shown
    assert time.strftime("%Y-%m-%d") in shown
    assert "2 datasets, 10.3 kB" in shown
    assert str(cache) in shown


def test_clearing_removes_what_we_made_and_tells_what_was_left(cache):
    keep("a", "photos")
    keep("b", "letters")
    own = next(cache.rglob("images.npy")).parent.parent
    killed_while_writing("now")  # perhaps another process is at it
    theirs = folder_with(own / "photos-1-theirs")
    shown = data("cache", "--clear")
    assert "removed 2 datasets: 10.3 kB freed" in shown
    assert f"left alone: {theirs}" in shown
    assert "half-made-now" in shown
    assert (theirs / "id_rsa").exists()
    assert not list(own.glob("*/images.npy"))
    keep("a", "photos")
    assert "1 dataset," in data("cache")
