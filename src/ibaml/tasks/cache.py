"""Decode once: a content-addressed store of arrays, memory-mapped, safe with many processes.

All of it lies in a folder of our own, whose marker says so. Only what was made here is ever
removed: a real folder in there, under a name of ours, holding nothing but our files.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ibaml.tasks.errors import DataError

FORMAT = 1  # part of every address: a change of layout never meets an old entry
STORE = "ibaml-datasets"
_TAG = "CACHEDIR.TAG"  # backups leave out a folder that has it
_MARK = (
    "Signature: 8a477f597d28d172789f06886806bc55\n"
    "# Made by ibaml, for the datasets it has decoded. `ibaml data cache` lists and clears them.\n"
)
_FILES = {"images.npy", "facts.json"}
_ENTRY = re.compile(r"([A-Za-z0-9_-]+)-\d+-[0-9a-f]{24}")
_HALF_MADE = re.compile(rf"\.half-made-{_ENTRY.pattern}-\w+")
_DAY = 86400


@dataclass(frozen=True)
class Entry:
    """One dataset that is kept: its size in bytes, and when it was made."""

    name: str
    path: Path
    size: int
    made: float


@dataclass(frozen=True)
class Cleared:
    """What `clear` removed (``freed`` bytes), and what it left alone."""

    removed: int
    freed: int
    left: list[Path]


def cache_folder() -> Path:
    """``IBAML_CACHE``, or ``ibaml`` in the user's cache directory."""
    if given := os.environ.get("IBAML_CACHE"):
        return Path(given).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "ibaml"


def store_folder() -> Path:
    """Our own folder in the cache; what lies under its name and is not ours is refused."""
    store = cache_folder() / STORE
    if os.path.lexists(store) and not _marked(store):
        raise DataError(
            f"{store} was not made by ibaml (it has no {_TAG} that says so), and is left alone: "
            "set IBAML_CACHE to another folder"
        )
    return store


def cached(
    name: str, digest: str, build: Callable[[], tuple[np.ndarray, dict[str, Any]]]
) -> tuple[np.ndarray, dict[str, Any]]:
    """The array and facts of an entry, built where it is not there yet.

    The entry appears by one rename, so it is whole or not there; of two processes that build it
    at once, one wins and both read the winner's.
    """
    store = store_folder()
    entry = store / f"{re.sub(r'[^A-Za-z0-9_-]+', '_', name)}-{FORMAT}-{digest[:24]}"
    if entry.exists():
        try:
            return _read(entry)
        except (OSError, ValueError, EOFError) as error:  # damaged: make it anew
            if not _ours(entry, _ENTRY):
                raise DataError(
                    f"{entry} is damaged ({error}) and holds what ibaml did not put there: move it "
                    "away"
                ) from error
            shutil.rmtree(entry, ignore_errors=True)
    _prepare(store)
    array, facts = build()
    partial = Path(tempfile.mkdtemp(prefix=f".half-made-{entry.name}-", dir=store))
    try:
        np.save(partial / "images.npy", array)
        (partial / "facts.json").write_text(json.dumps(facts))
        partial.chmod(0o755)
        try:
            partial.rename(entry)
        except OSError:
            if not (entry / "facts.json").exists():  # else another process was first
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return _read(entry)


def entries() -> list[Entry]:
    """The datasets that are kept, by name."""
    entries_here = []
    for path in _inside(store_folder()):
        named = _ENTRY.fullmatch(path.name)
        with suppress(OSError):  # another process has just removed it
            if named is not None and _ours(path, _ENTRY):
                entries_here.append(Entry(named[1], path, _size(path), path.stat().st_mtime))
    return entries_here


def clear() -> Cleared:
    """Remove the datasets that are kept, and nothing else."""
    store = store_folder()
    sizes = {entry.path: entry.size for entry in entries()}
    sizes |= {path: _size(path) for path in _abandoned(store)}
    for path in sizes:
        shutil.rmtree(path, ignore_errors=True)
    gone = [size for path, size in sizes.items() if not path.exists()]
    return Cleared(len(gone), sum(gone), [p for p in _inside(store) if p.name != _TAG])


def _read(entry: Path) -> tuple[np.ndarray, dict[str, Any]]:
    facts = json.loads((entry / "facts.json").read_text())
    return np.load(entry / "images.npy", mmap_mode="r", allow_pickle=False), facts


def _prepare(store: Path) -> None:
    """Find out that the cache can be written before anything is decoded; sweep what killed
    processes left behind a day ago."""
    try:
        if not store.exists():
            _make(store)
        tempfile.TemporaryFile(dir=store).close()
    except OSError as error:
        raise DataError(
            f"the cache {store} cannot be written ({error}): set IBAML_CACHE to a folder that can"
        ) from error
    for leftover in _abandoned(store):
        shutil.rmtree(leftover, ignore_errors=True)


def _make(store: Path) -> None:
    """Make our folder with its marker in it, by one rename; as open as the one it lies in."""
    store.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=f".{STORE}-", dir=store.parent))
    try:
        (made / _TAG).write_text(_MARK)
        made.chmod(stat.S_IMODE(store.parent.stat().st_mode))
        made.rename(store)
    except OSError:
        if not _marked(store):  # else another process was first
            raise
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _marked(store: Path) -> bool:
    try:
        return (store / _TAG).read_text("utf-8").startswith(_MARK)
    except (OSError, ValueError, EOFError):
        return False


def _inside(store: Path) -> list[Path]:
    return sorted(store.iterdir()) if store.exists() else []


def _abandoned(store: Path) -> list[Path]:
    """Half-made entries that nobody can be working on any more."""
    abandoned = []
    for path in _inside(store):
        with suppress(OSError):  # another process has just finished it, or it is another person's
            if _ours(path, _HALF_MADE) and time.time() - path.stat().st_mtime > _DAY:
                abandoned.append(path)
    return abandoned


def _ours(path: Path, named: re.Pattern[str]) -> bool:
    """Whether something in our folder was made here."""
    if named.fullmatch(path.name) is None or path.is_symlink() or not path.is_dir():
        return False
    return {inside.name for inside in path.iterdir()} <= _FILES


def _size(entry: Path) -> int:
    return sum(file.stat().st_size for file in entry.iterdir())
