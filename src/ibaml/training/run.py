"""What is in a run folder, and how is it written and read?

config.json      settings, data, versions, git revision, command
config.toml      the settings, to start the same run again
log.jsonl        what happened, one JSON object a line
tensorboard/     the same for TensorBoard
checkpoints/     step-N.safetensors (the last few) and best.safetensors, each a full state
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ibaml import untrusted
from ibaml._version import __version__
from ibaml.extras import need
from ibaml.fields import SettingsError, write_toml
from ibaml.files import write_whole
from ibaml.training.checkpoint import CheckpointError, pack, unpack
from ibaml.training.processes import launch, same_launch
from ibaml.training.rules import resolve
from ibaml.training.settings import FIELDS, Settings

FORMAT = 2
_WRITTEN = ("checkpoints", "tensorboard", "log.jsonl", ".lock")
_STEP = re.compile(r"step-(\d+)\.safetensors")
_HALF_WRITTEN = re.compile(r"\.((step-\d+|best)\.safetensors|\.probe)-\w+")  # by `write_whole`


class RunError(ValueError):
    """A run folder is missing, in use, not ours, or cannot be written."""


@dataclass(frozen=True)
class Run:
    """An existing run folder."""

    path: Path
    settings: Settings
    data: dict[str, Any]
    _readable: dict[Path, tuple[tuple[int, ...], bool]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )  # for each file read or written here: its signature then, and whether it was readable

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def best(self) -> Path:
        return self.checkpoints / "best.safetensors"

    def own(self, name: str) -> Path:
        """A file or folder of the run to write into. A link is refused: whoever made the folder
        would choose what is written to, or removed."""
        return _own(self.path, name)

    def changed(self, **choices: Any) -> Run:
        """The run with other settings; ``iterations`` may not lie behind it. `settle` writes."""
        settings = resolve({**dataclasses.asdict(self.settings), **choices})
        done = self.newest()[0]
        if done is not None and settings.iterations < done.step:
            raise RunError(
                f"{self.path} is at iteration {done.step} already: --iterations must be more"
            )
        return dataclasses.replace(self, settings=settings)

    def saved(self) -> list[Path]:
        """The files named like checkpoints of a step, newest first; some may be damaged."""
        paths = [p for p in self.checkpoints.glob("step-*.safetensors") if _STEP.fullmatch(p.name)]
        return sorted(paths, key=_step, reverse=True)

    def save(self, step: int, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> Path:
        """Write the checkpoint of a step, then delete the oldest so that ``keep`` readable ones
        remain."""
        path = self.checkpoints / f"step-{step:08d}.safetensors"
        self._write(path, pack(tensors, {**facts, "step": step}))
        readable = 0
        for old in self.saved():
            if readable >= self.settings.keep and old.is_file():
                old.unlink(missing_ok=True)
            else:
                readable += self._is_readable(old)
        return path

    def save_best(self, step: int, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
        self._write(self.best, pack(tensors, {**facts, "step": step}))

    def _write(self, path: Path, content: bytes) -> None:
        try:
            write_whole(path, content)
        except OSError as error:
            last_good = next((old for old in self.saved() if self._is_readable(old)), None)
            fallback = (
                "there is none before it"
                if last_good is None
                else f"the last good checkpoint is {last_good}"
            )
            remedy = "Free disk space (or restore the permissions of the folder)"
            if path.is_dir():
                remedy = "Move the folder of that name away"
            raise RunError(
                f"{path} could not be written ({error.strerror or error}; it needs "
                f"{len(content) / 1e6:.1f} MB): {fallback}. {remedy}, then: ibaml train --resume "
                f"{self.path}"
            ) from error
        self._readable[path] = _signature(path), True

    def _is_readable(self, path: Path) -> bool:
        """Whether a checkpoint can be read; a file that has not changed is not read again."""
        try:
            signature = _signature(path)
            if self._readable.get(path, ((), False))[0] != signature:
                self._readable[path] = signature, False
                read_saved(path)
                self._readable[path] = signature, True
            return self._readable[path][1]
        except (CheckpointError, OSError):
            return False

    def newest(self) -> tuple[Saved | None, list[str]]:
        """The newest state that can be read (the best one counts too), or None; and a note for each
        file that cannot be read."""
        notes: list[str] = []
        saved: Saved | None = None
        for path in (*self.saved(), self.best):
            if path == self.best and not path.exists():
                continue
            if saved is not None and path != self.best:
                continue  # an older one
            try:
                one = read_saved(path)
                if saved is None or one.step > saved.step:
                    saved = one
            except (CheckpointError, OSError) as error:
                notes.append(f"{path.name} is ignored: {error}")
        return saved, notes

    def resumable(self) -> tuple[Saved | None, list[str]]:
        """As `newest`, but raises if there are files and none can be read: no run starts over
        on top of them."""
        saved, notes = self.newest()
        if saved is None and notes:
            raise RunError(
                f"no checkpoint of {self.path} can be read ({'; '.join(notes)}): restore one, "
                "or train in a new folder (ibaml train --config "
                f"{shlex.quote(str(self.path / 'config.toml'))} --out …)"
            )
        return saved, notes

    def best_score(self) -> tuple[float, int] | None:
        """The validation nll of the best state and its iteration. None if the file is missing or
        cannot be read; the next validated state then replaces it."""
        try:
            saved = read_saved(self.best)
            return float(saved.facts["validation"]["nll"]), saved.step
        except (ValueError, OSError, KeyError, TypeError):
            return None

    def weights(self, which: str) -> Saved:
        """The state ``"best"`` or ``"last"``; without validation, best is the last one."""
        if which == "best" and self.best.exists():
            try:
                return read_saved(self.best)
            except (CheckpointError, OSError) as error:
                raise RunError(f"{self.best}: {error}; use the last one (which='last')") from error
        saved, notes = self.newest()
        if saved is None:
            reason = f" ({'; '.join(notes)})" if notes else ""
            raise RunError(f"{self.path} has no checkpoint yet{reason}")
        return saved

    @contextmanager
    def held(self) -> Iterator[None]:
        """Lock the folder, so that no two processes train in it."""
        need("filelock")
        need("safetensors")  # for the checkpoints to come
        from filelock import FileLock, Timeout

        lock = FileLock(self.own(".lock"), timeout=0)
        try:
            lock.acquire()
        except Timeout as error:
            raise RunError(f"{self.path} is being trained by another process") from error
        except OSError as error:
            raise _unwritable(self.path, error) from error
        try:
            yield
        finally:
            lock.release()


@dataclass(frozen=True)
class Saved:
    """A checkpoint that was read and whose digest is right."""

    path: Path
    content: bytes
    facts: Mapping[str, Any]

    @property
    def step(self) -> int:
        return int(self.facts["step"])


def read_saved(path: Path) -> Saved:
    """The state in a file; `CheckpointError` if it holds none, or another than its name says."""
    try:
        content = untrusted.content(path, untrusted.ARTIFACT)
    except untrusted.Refused as error:
        raise CheckpointError(f"it {error}") from error
    tensors, facts = unpack(content)
    step = facts.get("step")
    if type(step) is not int or step < 0 or not any(n.startswith("learner/") for n in tensors):
        raise CheckpointError("it holds no state of a run")
    if (named := _STEP.fullmatch(path.name)) is not None and int(named[1]) != step:
        raise CheckpointError(f"it holds iteration {step}, which is not what its name says")
    return Saved(path, content, facts)


def _signature(path: Path) -> tuple[int, ...]:
    """Numbers that change with a file's content, so that an unchanged file is not read again."""
    status = path.stat()
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino


def _step(path: Path) -> int:
    match = _STEP.fullmatch(path.name)
    assert match is not None
    return int(match[1])


def _own(path: Path, name: str) -> Path:
    if (path / name).is_symlink():
        raise RunError(
            f"{path / name} is a link, and a run writes into its own folder only: put the file or "
            "folder itself there"
        )
    return path / name


def create_run(path: Path, settings: Settings, data: Mapping[str, Any]) -> Run:
    """Make a new run folder; `RunError` says why it cannot be made."""
    for name in _WRITTEN:
        _own(path, name)
    if any(path.glob("checkpoints/*.safetensors")):
        remedy = "choose another --out"
        if (path / "config.json").exists():
            remedy = f"resume it (ibaml train --resume {shlex.quote(str(path))}), or {remedy}"
        raise RunError(f"{path} is a run already: {remedy}")
    if (path / ".lock").exists():
        with Run(path, settings, dict(data)).held():  # raises while a process trains in it
            pass
    facts = {
        "format": FORMAT,
        "ibaml": __version__,
        "settings": {},
        "data": dict(data),
        "versions": {
            "python": platform.python_version(),
            "torch": str(torch.__version__),
            "platform": platform.platform(),
        },
        "git": _revision(),
        "command": shlex.join(sys.argv),
        "launch": launch(),
    }
    try:
        (path / "checkpoints").mkdir(parents=True, exist_ok=True)
        _write_config(path, settings, facts)
    except OSError as error:
        raise _unwritable(path, error) from error
    return Run(path, settings, dict(data))


def settle(run: Run) -> list[str]:
    """Write a run's settings into its folder; no other code changes them there. Returns a sentence
    for each setting that changed."""
    content = _config(run.path)
    before, now = content["settings"], dataclasses.asdict(run.settings)
    if before == now:
        return []
    _write_config(run.path, run.settings, content)
    return [
        f"{name} is {value} from here on (it was {before[name]})"
        for name, value in now.items()
        if before.get(name) not in (None, value)
    ]


def _write_config(path: Path, settings: Settings, facts: Mapping[str, Any]) -> None:
    content = {**facts, "settings": dataclasses.asdict(settings)}
    write_whole(path / "config.toml", write_toml(settings))
    write_whole(path / "config.json", json.dumps(content, indent=2) + "\n")


def open_run(path: str | Path) -> Run:
    """An existing run folder; nothing in it is executed."""
    path = Path(path)
    config = path / "config.json"
    if not config.exists():
        what = (
            "does not exist" if not path.exists() else "is not a run folder: it has no config.json"
        )
        raise RunError(f"{path} {what}")
    content = _config(path)
    version, given, data = content["format"], content["settings"], content["data"]
    if version != FORMAT:
        raise RunError(
            f"{path} was made by ibaml {content.get('ibaml', '?')} in format {version}, and this "
            f"is ibaml {__version__}, which reads format {FORMAT}: use that version, or train "
            f"again with --config {path / 'config.toml'}"
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
    if problem := _problem(data):
        raise RunError(f"{config}: data {problem}: it is damaged, or not a run's")
    return Run(path, settings, data)


def origin(run: Run) -> dict[str, Any]:
    """Where a run comes from, as config.json tells it: versions, git revision, command."""
    content = _config(run.path)
    return {name: content.get(name) for name in ("ibaml", "versions", "git", "command")}


def begun_here(path: Path) -> bool:
    """Whether a run was begun by the torchrun that started this process, which may have restarted
    it."""
    return same_launch(_config(path).get("launch"), launch())


def _config(path: Path) -> dict[str, Any]:
    """What config.json holds; its settings and data are dictionaries, their values unchecked."""
    config = path / "config.json"
    try:
        content = untrusted.parsed_json(untrusted.content(config, untrusted.DOCUMENT))
    except untrusted.Refused as error:
        raise RunError(f"{config} cannot be read: it {error}") from error
    except OSError as error:
        raise RunError(f"{config} cannot be read: {error.strerror or error}") from error
    if not isinstance(content, dict):
        raise RunError(f"{config} cannot be read: it holds no settings")
    for name in ("format", "settings", "data"):
        if name not in content:
            raise RunError(f"{config} cannot be read: there is no {name!r} in it")
        if name != "format" and not isinstance(content[name], dict):
            raise RunError(f"{config} cannot be read: its {name!r} has no names and values")
    return content


def _problem(data: Mapping[str, Any]) -> str | None:
    """What is wrong with the description of a run's data."""
    for name in ("name", "digest"):
        if not isinstance(data.get(name), str):
            return f"has no {name}"
    shape = data.get("example_shape")
    if not isinstance(shape, list) or not all(type(n) is int and n > 0 for n in shape):
        return "has no example_shape"
    if math.prod(shape) > untrusted.PIXELS:
        return f"has examples of {shape}, which are too large"
    if not isinstance(data.get("inputs"), dict | None):
        return "describes no inputs"
    return None


def prepare_folder(run: Run) -> None:
    """Check before the first step that checkpoints can be written, and delete what a killed process
    left half written."""
    for name in _WRITTEN:
        run.own(name)
    try:
        run.checkpoints.mkdir(exist_ok=True)
        for leftover in run.checkpoints.iterdir():
            if _HALF_WRITTEN.fullmatch(leftover.name):
                leftover.unlink(missing_ok=True)
        write_whole(run.checkpoints / ".probe", b"")
        os.unlink(run.checkpoints / ".probe")
    except OSError as error:
        raise _unwritable(run.path, error) from error


def _unwritable(path: Path, error: OSError) -> RunError:
    return RunError(
        f"the run folder {path} cannot be written ({error.strerror or error}): restore its "
        "permissions, or choose another folder"
    )


def _revision() -> str | None:
    """The git revision of this code, with a + if there are uncommitted changes; None if it is not
    under version control, though it may lie in somebody else's repository."""

    def git(*words: str) -> str:
        return subprocess.run(
            ["git", "-C", str(Path(__file__).parent), *words],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        ).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", Path(__file__).name)  # fails if it is not in there
        return git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain") else "")
    except (OSError, subprocess.SubprocessError):
        return None
