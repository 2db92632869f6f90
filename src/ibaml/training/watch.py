"""Who is told how a run goes? Log files here, the screen in `cli`."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from ibaml.files import write_whole
from ibaml.untrusted import LOG, Refused, content, parsed_json


@dataclass(frozen=True)
class Step:
    """What one meta-iteration did.

    Attributes:
        loss: mean meta-loss of the tasks that took part.
        tasks, left_out: tasks of the iteration, and those of them that took no part.
        gradient_norm: of the meta-gradient, before it was clipped.
        moved: whether the optimizer took a step.
        cg_residual: mean relative residual of the linear solves (implicit methods).
        unsolved: the share of the tasks whose linear system counts as unsolved.
        inner_gradient: mean ‖∇E‖ at the solutions, for each block.
        rate: the optimizer's step size.
    """

    step: int
    loss: float
    tasks: int
    left_out: int
    gradient_norm: float
    moved: bool
    rate: float
    cg_residual: float | None = None
    unsolved: float | None = None
    inner_gradient: dict[str, float] | None = None


class Watcher(Protocol):
    """Receives what happens in a run."""

    def started(self, first: int, total: int) -> None:
        """Called before step ``first``; the last one is ``total``."""

    def stepped(self, step: Step) -> None:
        """Called after every step."""

    def validated(self, step: int, scores: dict[str, float], best: bool) -> None: ...

    def message(self, text: str) -> None:
        """A sentence for a person."""

    def ended(self) -> None: ...


def read_log(path: Path) -> list[dict[str, Any]]:
    """The lines of a ``log.jsonl``. What is none is left out: one that was cut short when the
    process was killed, or that somebody else wrote."""
    if not os.path.lexists(path):
        return []
    try:
        text = content(path, LOG).decode(errors="replace")
    except Refused as error:
        raise Refused(f"{path} {error}: move it away") from error
    lines = []
    for line in text.split("\n"):
        with suppress(Refused):
            found = parsed_json(line)
            if isinstance(found, dict) and isinstance(found.get("step", 0), int | float):
                lines.append(found)
    return lines


class JsonLines:
    """``log.jsonl``: one JSON object per line, every ``every`` steps. A resumed run keeps the lines
    up to the step it continues from."""

    def __init__(self, path: Path, every: int) -> None:
        self._path = path
        self._every = every
        self._began = time.monotonic()
        self._total = 0

    def started(self, first: int, total: int) -> None:
        self._total = total
        kept = [line for line in read_log(self._path) if line.get("step", 0) <= first]
        with _named(self._path):
            write_whole(self._path, "".join(f"{json.dumps(line)}\n" for line in kept))

    def _write(self, line: dict[str, Any]) -> None:
        line["seconds"] = round(time.monotonic() - self._began, 3)
        with _named(self._path), self._path.open("a") as file:
            file.write(json.dumps(_plain(line)) + "\n")

    def stepped(self, step: Step) -> None:
        if step.step % self._every == 0 or step.step == self._total or not step.moved:
            self._write({k: v for k, v in asdict(step).items() if v is not None})

    def validated(self, step: int, scores: dict[str, float], best: bool) -> None:
        self._write({"step": step, **{f"val_{k}": v for k, v in scores.items()}, "best": best})

    def message(self, text: str) -> None:
        self._write({"note": text})

    def ended(self) -> None:
        pass


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Put the name of the file into an error of writing it."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def _plain(value: Any) -> Any:
    """The value for JSON, with null for NaN and infinity, which JSON lacks."""
    if isinstance(value, dict):
        return {name: _plain(one) for name, one in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


class TensorBoard:
    """The same figures as TensorBoard files."""

    def __init__(self, path: Path, every: int) -> None:
        self._path = path
        self._every = every
        self._writer: Any = None

    def started(self, first: int, total: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(self._path), purge_step=first + 1)

    def stepped(self, step: Step) -> None:
        if step.step % self._every:
            return
        for name in ("loss", "gradient_norm", "rate", "cg_residual", "unsolved"):
            value = getattr(step, name)
            if value is not None:
                self._writer.add_scalar(f"train/{name}", value, step.step)
        self._writer.add_scalar("train/diverged", step.left_out / step.tasks, step.step)
        for block, value in (step.inner_gradient or {}).items():
            self._writer.add_scalar(f"inner_gradient/{block}", value, step.step)

    def validated(self, step: int, scores: dict[str, float], best: bool) -> None:
        for name, value in scores.items():
            self._writer.add_scalar(f"val/{name}", value, step)

    def message(self, text: str) -> None:
        pass

    def ended(self) -> None:
        if self._writer is not None:
            self._writer.close()
