"""Decode once: a content-addressed store of arrays, memory-mapped, safe with many processes."""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from ibaml.tasks.errors import DataError

FORMAT = 1  # part of every address: a change of layout never meets an old entry


def cache_folder() -> Path:
    """``IBAML_CACHE``, or ``ibaml`` in the user's cache directory."""
    if given := os.environ.get("IBAML_CACHE"):
        return Path(given).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "ibaml"


def cached(
    name: str, digest: str, build: Callable[[], tuple[np.ndarray, dict[str, Any]]]
) -> tuple[np.ndarray, dict[str, Any]]:
    """The array and facts of an entry, built where it is not there yet.

    The entry appears by one rename, so it is whole or not there; of two processes that build it
    at once, one wins and both read the winner's.
    """
    folder = cache_folder()
    entry = folder / f"{re.sub(r'[^A-Za-z0-9_-]+', '_', name)}-{FORMAT}-{digest[:24]}"
    if entry.exists():
        try:
            return _read(entry)
        except (OSError, ValueError):  # damaged: make it anew
            shutil.rmtree(entry, ignore_errors=True)
    _prepare(folder)
    array, facts = build()
    partial = Path(tempfile.mkdtemp(prefix=f".{entry.name}-", dir=folder))
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


def _read(entry: Path) -> tuple[np.ndarray, dict[str, Any]]:
    facts = json.loads((entry / "facts.json").read_text())
    return np.load(entry / "images.npy", mmap_mode="r", allow_pickle=False), facts


def _prepare(folder: Path) -> None:
    """Find out that the cache can be written before anything is decoded; sweep what killed
    processes left behind a day ago."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise DataError(
            f"the cache {folder} cannot be written ({error}): set IBAML_CACHE to a folder that can"
        ) from error
    for left in folder.glob(".*-*"):
        if time.time() - left.stat().st_mtime > 86400:
            shutil.rmtree(left, ignore_errors=True)
