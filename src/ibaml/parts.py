"""Which parts of a long computation are there already? Each is a file, computed once."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ibaml import __version__
from ibaml.files import write_whole

Numbers = dict[str, Any]


class Parts:
    """Computes parts of a study once, and reads them from files after that.

    A part is identified by the study, this version of ibaml and the settings in its key.

    Attributes:
        computed, reused: how many parts this run computed and read so far.
        seconds: the time that all of them took when they were computed.
    """

    def __init__(self, folder: Path, study: str) -> None:
        self._folder = folder
        self._study = study
        self.computed = self.reused = 0
        self.seconds = 0.0

    def run_folder(self, name: str, key: Mapping[str, Any]) -> Path:
        """The folder of the training run with this key, beside the parts."""
        return self._folder.parent / "runs" / f"{name}-{self._address(key)[1][:8]}"

    def _address(self, key: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
        whole = {"study": self._study, "version": __version__, **key}
        text = json.dumps(whole, sort_keys=True)
        return whole, hashlib.sha256(text.encode()).hexdigest()

    def __call__(self, key: Mapping[str, Any], compute: Callable[[], Numbers]) -> Numbers:
        """The numbers of the part with this key."""
        whole, digest = self._address(key)
        text = json.dumps(whole, sort_keys=True)
        file = self._folder / f"{digest[:16]}.json"
        stored = _read(file)
        if stored is not None and json.dumps(stored.get("key"), sort_keys=True) == text:
            self.reused += 1
        else:
            began = time.perf_counter()
            numbers = compute()
            stored = {"key": whole, "seconds": time.perf_counter() - began, "numbers": numbers}
            self._folder.mkdir(parents=True, exist_ok=True)
            write_whole(file, json.dumps(stored, allow_nan=False))
            self.computed += 1
        self.seconds += stored["seconds"]
        stored_numbers: Numbers = stored["numbers"]
        return stored_numbers


def _read(file: Path) -> dict[str, Any] | None:
    try:
        content = json.loads(file.read_text())
    except (OSError, ValueError):  # missing or unreadable: compute it
        return None
    return content if isinstance(content, dict) else None
