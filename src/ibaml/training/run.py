"""The run folder: what a run leaves behind, and how it is found again.

config.json      settings, data, versions, git revision, command
config.toml      the settings, to start the same run again
log.jsonl        what happened, one JSON object a line
tensorboard/     the same for TensorBoard
checkpoints/     step-N.safetensors (the last few) and best.safetensors
"""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ibaml._version import __version__
from ibaml.files import write_whole
from ibaml.training.checkpoint import CheckpointError, pack, unpack
from ibaml.training.settings import FIELDS, Settings, SettingsError, resolve, write_toml

FORMAT = 1
_STEP = re.compile(r"step-(\d+)\.safetensors")


class RunError(ValueError):
    """A run folder is missing, foreign, in use, or cannot be written."""


@dataclass(frozen=True)
class Run:
    """An existing run folder."""

    path: Path
    settings: Settings
    data: dict[str, Any]

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def best(self) -> Path:
        return self.checkpoints / "best.safetensors"

    def prolonged(self, iterations: int) -> Run:
        """The run with another end, which must lie ahead."""
        settings = resolve({**dataclasses.asdict(self.settings), "iterations": iterations})
        done = max((_step(path) for path in self.saved()), default=0)
        if iterations < done:
            raise RunError(f"{self.path} is at iteration {done} already: --iterations must be more")
        return dataclasses.replace(self, settings=settings)

    def saved(self) -> list[Path]:
        """The checkpoints, newest first."""
        found = [p for p in self.checkpoints.glob("step-*.safetensors") if _STEP.fullmatch(p.name)]
        return sorted(found, key=_step, reverse=True)

    def save(self, step: int, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> Path:
        """Write the checkpoint of a step, then let the oldest go."""
        path = self.checkpoints / f"step-{step:08d}.safetensors"
        self._write(path, pack(tensors, {**facts, "step": step}))
        for old in self.saved()[self.settings.keep :]:
            old.unlink(missing_ok=True)
        return path

    def save_best(self, step: int, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
        self._write(self.best, pack(tensors, {**facts, "step": step}))

    def _write(self, path: Path, content: bytes) -> None:
        try:
            write_whole(path, content)
        except OSError as error:
            good = self.saved()
            kept = f"the last good checkpoint is {good[0]}" if good else "there is none before it"
            raise RunError(
                f"{path} could not be written ({error.strerror or error}; it needs "
                f"{len(content) / 1e6:.1f} MB): {kept}. Make room (or give the folder back its "
                f"permissions), then: ibaml train --resume {self.path}"
            ) from error

    def newest(self) -> tuple[bytes | None, list[str]]:
        """The newest sound checkpoint, None where there is none, and what to tell of the others."""
        told: list[str] = []
        for path in self.saved():
            try:
                content = path.read_bytes()
                unpack(content)
                return content, told
            except (CheckpointError, OSError) as error:
                told.append(f"{path.name} is left aside: {error}")
        return None, told

    def weights(self, which: str) -> tuple[dict[str, Tensor], dict[str, Any], Path]:
        """The tensors of ``"best"`` or ``"last"``; best falls back to last where nothing was
        validated."""
        if which == "best" and self.best.exists():
            try:
                return *unpack(self.best.read_bytes()), self.best
            except (CheckpointError, OSError) as error:
                raise RunError(f"{self.best}: {error}; use the last one (which='last')") from error
        found, told = self.newest()
        if found is None:
            reason = f" ({'; '.join(told)})" if told else ""
            raise RunError(f"{self.path} has no checkpoint yet{reason}")
        tensors, facts = unpack(found)
        return tensors, facts, self.checkpoints / f"step-{facts['step']:08d}.safetensors"

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold the folder: no two processes train in it."""
        try:
            file = (self.path / ".lock").open("w")
        except OSError as error:
            raise _unwritable(self.path, error) from error
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise RunError(f"{self.path} is being trained by another process") from error
            yield


def _step(path: Path) -> int:
    found = _STEP.fullmatch(path.name)
    assert found is not None
    return int(found[1])


def create_run(path: Path, settings: Settings, data: Mapping[str, Any]) -> Run:
    """Make a new run folder, or say why it cannot be."""
    if any(path.glob("checkpoints/*.safetensors")):
        remedy = "choose another --out"
        if (path / "config.json").exists():
            remedy = f"go on with it (ibaml train --resume {shlex.quote(str(path))}), or {remedy}"
        raise RunError(f"{path} is a run already: {remedy}")
    if (path / ".lock").exists():
        with Run(path, settings, dict(data)).held():  # refused while a process trains in it
            pass
    config = {
        "format": FORMAT,
        "ibaml": __version__,
        "settings": dataclasses.asdict(settings),
        "data": dict(data),
        "versions": {
            "python": platform.python_version(),
            "torch": str(torch.__version__),
            "platform": platform.platform(),
        },
        "git": _revision(),
        "command": shlex.join(sys.argv),
    }
    try:
        (path / "checkpoints").mkdir(parents=True, exist_ok=True)
        write_whole(path / "config.toml", write_toml(settings))
        write_whole(path / "config.json", json.dumps(config, indent=2) + "\n")
    except OSError as error:
        raise _unwritable(path, error) from error
    return Run(path, settings, dict(data))


def write_config(run: Run) -> None:
    """Write the settings of an existing run over those in its folder."""
    file = run.path / "config.json"
    content = json.loads(file.read_text())
    given = dataclasses.asdict(run.settings)
    if content["settings"] == given:
        return
    write_whole(run.path / "config.toml", write_toml(run.settings))
    write_whole(file, json.dumps({**content, "settings": given}, indent=2) + "\n")


def open_run(path: str | Path) -> Run:
    """An existing run folder; nothing in it is executed."""
    path = Path(path)
    config = path / "config.json"
    if not config.exists():
        what = "does not exist" if not path.exists() else "is no run folder: it has no config.json"
        raise RunError(f"{path} {what}")
    try:
        content = json.loads(config.read_text())
        version, given, data = content["format"], content["settings"], content["data"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunError(f"{config} cannot be read: {error}") from error
    if version != FORMAT:
        raise RunError(
            f"{path} was made by ibaml {content.get('ibaml', '?')} in format {version}, and this "
            f"is ibaml {__version__}, which reads format {FORMAT}: use that version, or train anew "
            f"with --config {path / 'config.toml'}"
        )
    unknown = [name for name in given if name not in FIELDS]
    if unknown:
        raise RunError(
            f"{path} was made by ibaml {content.get('ibaml', '?')} with settings this version does "
            f"not know: {', '.join(unknown)}"
        )
    try:
        settings = resolve(given)
    except SettingsError as error:
        raise RunError(f"{config}: {error}") from error
    return Run(path, settings, data)


def prepare_folder(run: Run) -> None:
    """Find out before the first step that checkpoints can be written; sweep away what a killed
    process left half written."""
    try:
        run.checkpoints.mkdir(exist_ok=True)
        for left in run.checkpoints.glob(".*-*"):
            left.unlink(missing_ok=True)
        write_whole(run.checkpoints / ".probe", b"")
        os.unlink(run.checkpoints / ".probe")
    except OSError as error:
        raise _unwritable(run.path, error) from error


def _unwritable(path: Path, error: OSError) -> RunError:
    return RunError(
        f"the run folder {path} cannot be written ({error.strerror or error}): give it back its "
        "permissions, or choose another place"
    )


def _revision() -> str | None:
    """The git revision of this code, with a + where it was changed since."""

    def git(*words: str) -> str:
        here = Path(__file__).parent
        return subprocess.run(
            ["git", "-C", str(here), *words],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        ).stdout.strip()

    try:
        return git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain") else "")
    except (OSError, subprocess.SubprocessError):
        return None
