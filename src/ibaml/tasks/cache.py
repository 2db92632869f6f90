"""How is a dataset decoded only once? Into a content-addressed store of memory-mapped arrays.

Embeddings of pictures lie there too, in entries that grow (`vectors` reads and writes them). Many
processes may use it at once. It is one folder with a marker file. Only entries made here are ever
removed: real folders inside it with a name and with files of ours.
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

from ibaml.files import at_home
from ibaml.tasks.errors import DataError
from ibaml.untrusted import DOCUMENT, content, first_line, opened, parsed_json

FORMAT = 1  # part of every entry's name, so that a new layout never reads an old entry
STORE = "ibaml-datasets"
_TAG = "CACHEDIR.TAG"  # backup programs skip a folder that has this file
_MARK = (
    "Signature: 8a477f597d28d172789f06886806bc55\n"
    "# Made by ibaml, for the datasets it has decoded. `ibaml data cache` lists and clears them.\n"
)
VECTORS = "vectors.sqlite"
_FILES = {"images.npy", "facts.json", *(VECTORS + end for end in ("", "-journal", "-wal", "-shm"))}
_ENTRY = re.compile(r"([A-Za-z0-9_-]+)-\d+-[0-9a-f]{24}")
_HALF_MADE = re.compile(rf"\.half-made-{_ENTRY.pattern}-\w+")
_DAY = 86400


@dataclass(frozen=True)
class Entry:
    """One dataset in the cache: its size in bytes, and when it was made."""

    name: str
    path: Path
    size: int
    made: float


@dataclass(frozen=True)
class Cleared:
    """What `clear` removed (``freed`` bytes), and what it did not remove."""

    removed: int
    freed: int
    left: list[Path]


def cache_folder() -> Path:
    """``IBAML_CACHE``, or ``ibaml`` in the user's cache directory."""
    if given := os.environ.get("IBAML_CACHE"):
        return at_home(given)
    base = os.environ.get("XDG_CACHE_HOME")
    folder = Path(base) if base else at_home("~/.cache")
    if not folder.is_absolute():
        raise DataError("there is no home folder for the cache: set IBAML_CACHE to a folder")
    return folder / "ibaml"


def store_folder() -> Path:
    """ibaml's folder in the cache; a folder of that name that ibaml did not make is refused."""
    store = cache_folder() / STORE
    if os.path.lexists(store) and not _marked(store):
        raise DataError(
            f"{store} was not made by ibaml (it has no {_TAG} that says so), and is not used: "
            "set IBAML_CACHE to another folder"
        )
    return store


def cached(
    name: str, digest: str, build: Callable[[], tuple[np.ndarray, dict[str, Any]]]
) -> tuple[np.ndarray, dict[str, Any]]:
    """The array and facts of an entry, which is built if it does not exist.

    The entry appears by one rename, so it is complete or absent. If two processes build it at once,
    both read the one that was first.
    """
    store = store_folder()
    entry = store / _named(name, digest)
    if entry.exists():
        try:
            return _read(entry)
        except (OSError, ValueError, EOFError) as error:  # damaged: build it again
            if not _ours(entry, _ENTRY):
                raise DataError(
                    f"{entry} is damaged ({error}) and holds files that are not ibaml's: "
                    "move it away"
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
    try:
        return _read(entry)
    except (OSError, ValueError):  # removed by another process, which had found it damaged
        return array, facts


def growing(name: str, digest: str) -> Path:
    """The folder of an entry that is written to again and again; made if it is not there."""
    store = store_folder()
    entry = store / _named(name, digest)
    if not entry.is_dir():
        _prepare(store)
        entry.mkdir(exist_ok=True)
    return entry


def entries() -> list[Entry]:
    """The datasets in the cache, sorted by name."""
    entries_here = []
    for path in _inside(store_folder()):
        named = _ENTRY.fullmatch(path.name)
        with suppress(OSError):  # another process has just removed it
            if named is not None and _ours(path, _ENTRY):
                entries_here.append(Entry(named[1], path, _size(path), path.stat().st_mtime))
    return entries_here


def clear() -> Cleared:
    """Remove the datasets in the cache, and nothing else."""
    store = store_folder()
    sizes = {entry.path: entry.size for entry in entries()}
    sizes |= {path: _size(path) for path in _abandoned(store)}
    for path in sizes:
        shutil.rmtree(path, ignore_errors=True)
    gone = [size for path, size in sizes.items() if not path.exists()]
    return Cleared(len(gone), sum(gone), [p for p in _inside(store) if p.name != _TAG])


def _named(name: str, digest: str) -> str:
    return f"{re.sub(r'[^A-Za-z0-9_-]+', '_', name)}-{FORMAT}-{digest[:24]}"


def _read(entry: Path) -> tuple[np.ndarray, dict[str, Any]]:
    facts = parsed_json(content(entry / "facts.json", DOCUMENT))
    if not isinstance(facts, dict):
        raise ValueError("its facts are none")
    try:
        with opened(entry / "images.npy"):  # a pipe would be waited for
            return np.load(entry / "images.npy", mmap_mode="r", allow_pickle=False), facts
    except Exception as error:  # the parser may raise anything on a broken header
        raise ValueError(first_line(error)) from error


def _prepare(store: Path) -> None:
    """Check before decoding that the cache can be written, and delete what killed processes left
    behind more than a day ago."""
    try:
        if not store.exists():
            _make(store)
        tempfile.TemporaryFile(dir=store).close()
    except OSError as error:
        raise DataError(
            f"the cache {store} cannot be written ({error}): set IBAML_CACHE to one that can"
        ) from error
    for leftover in _abandoned(store):
        shutil.rmtree(leftover, ignore_errors=True)


def _make(store: Path) -> None:
    """Make the folder with its marker by one rename, with the permissions of its parent."""
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
    """Half-made entries that are too old to be still in the making."""
    abandoned = []
    for path in _inside(store):
        with suppress(OSError):  # another process just finished it, or another user owns it
            if _ours(path, _HALF_MADE) and time.time() - path.stat().st_mtime > _DAY:
                abandoned.append(path)
    return abandoned


def _ours(path: Path, named: re.Pattern[str]) -> bool:
    """Whether ibaml made a folder in the cache."""
    if named.fullmatch(path.name) is None or path.is_symlink() or not path.is_dir():
        return False
    return {inside.name for inside in path.iterdir()} <= _FILES


def _size(entry: Path) -> int:
    return sum(file.stat().st_size for file in entry.iterdir())
