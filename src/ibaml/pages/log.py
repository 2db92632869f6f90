"""What did a run log? Curves, notes and times out of log.jsonl, which anybody may have written."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_DRAWN = 400  # points of a curve; more are averaged


@dataclass(frozen=True)
class Curve:
    """Values at meta-iterations."""

    at: tuple[float, ...]
    values: tuple[float, ...]

    def thinned(self, most: int = _DRAWN) -> Curve:
        """At most so many points, each the mean of its neighbors."""
        if len(self.at) <= most:
            return self
        size = math.ceil(len(self.at) / most)
        groups = [slice(i, i + size) for i in range(0, len(self.at), size)]
        means = [
            tuple(sum(column[g]) / len(column[g]) for g in groups)
            for column in (self.at, self.values)
        ]
        return Curve(means[0], means[1])


@dataclass(frozen=True)
class Log:
    """What a log tells.

    Attributes:
        training: the meta-loss.
        validation: val_nll, val_accuracy, … by name without ``val_``.
        best: the iteration of the lowest validation nll.
        last: the last training line.
        left_out: tasks left out, of the tasks in the lines of the log.
        seconds: of all processes that trained.
        notes: what the run told.
    """

    training: Curve
    validation: Mapping[str, Curve]
    best: int | None
    last: Mapping[str, Any]
    left_out: tuple[int, int]
    seconds: float
    notes: Sequence[str]

    @classmethod
    def of(cls, lines: Sequence[Mapping[str, Any]]) -> Log:
        """From the lines that `ibaml.training.watch.read_log` found."""
        steps = [line for line in lines if "loss" in line and _number(line.get("step"))]
        checks = [line for line in lines if "val_nll" in line and _number(line.get("step"))]
        names = sorted({n for line in checks for n in line if n.startswith("val_")})
        scored = [line for line in checks if _number(line["val_nll"])]
        best = min(scored, key=lambda line: float(line["val_nll"]), default=None)
        return cls(
            _curve(steps, "loss"),
            {name.removeprefix("val_"): _curve(checks, name) for name in names},
            None if best is None else int(best["step"]),
            steps[-1] if steps else {},
            (_sum(steps, "left_out"), _sum(steps, "tasks")),
            _seconds(lines),
            [str(line["note"]) for line in lines if "note" in line],
        )


def _number(value: Any) -> bool:
    return (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and abs(value) < 1e300  # also no NaN, and no whole number too large to be a float
    )


def _curve(lines: Sequence[Mapping[str, Any]], name: str) -> Curve:
    found = [(line["step"], line[name]) for line in lines if _number(line.get(name))]
    return Curve(tuple(float(x) for x, _ in found), tuple(float(y) for _, y in found))


def _sum(lines: Sequence[Mapping[str, Any]], name: str) -> int:
    return sum(int(line[name]) for line in lines if _number(line.get(name)))


def _seconds(lines: Sequence[Mapping[str, Any]]) -> float:
    """The clock of a log starts anew with every process."""
    total = latest = 0.0
    for line in lines:
        if _number(line.get("seconds")):
            now = float(line["seconds"])
            if now < latest:
                total += latest
            latest = now
    return total + latest
