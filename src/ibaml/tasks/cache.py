"""Decode once: a content-addressed store of arrays, memory-mapped, safe with many processes."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

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
    entry = cache_folder() / f"{name}-{FORMAT}-{digest[:24]}"
    if not (entry / "facts.json").exists():
        array, facts = build()
        entry.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f".{entry.name}-", dir=entry.parent))
        try:
            np.save(partial / "images.npy", array)
            (partial / "facts.json").write_text(json.dumps(facts))
            try:
                partial.rename(entry)
            except OSError:
                if not (entry / "facts.json").exists():
                    raise
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    array = np.load(entry / "images.npy", mmap_mode="r", allow_pickle=False)
    return array, json.loads((entry / "facts.json").read_text())
