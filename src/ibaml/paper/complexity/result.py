"""What did a measurement find? Costs by point, saved as JSON and as CSV."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from ibaml.files import write_whole
from ibaml.paper.complexity.sweep import IMPLICIT_OF, NAMES, POINT_OF, Arm, Sweep, label
from ibaml.paper.folder import as_csv

_FORMAT = "ibaml complexity 1"
PHASES = ("forward", "backward", "together")


@dataclass(frozen=True)
class Cost:
    """Cost per task of the batch: median milliseconds, and peak megabytes (10⁶ bytes)."""

    ms: float
    mb: float


@dataclass(frozen=True)
class Point:
    """What one arm costs.

    Attributes:
        forward: adaptation and the query loss.
        backward: the meta-gradient; its peak includes what the forward pass kept for it.
        together: both, as in a training loop.
        kept_mb: the memory in use between forward and backward.
        strategy: how the tasks ran through the network.
        problem: why there are no costs; empty if there are.
    """

    arm: Arm
    forward: Cost | None = None
    backward: Cost | None = None
    together: Cost | None = None
    kept_mb: float | None = None
    strategy: str = ""
    problem: str = ""

    @property
    def backward_cost(self) -> Cost:
        """The backward cost of a point that was measured, as all points of a curve are."""
        assert self.backward is not None
        return self.backward

    def row(self) -> dict[str, Any]:
        """The point as one flat row."""
        row: dict[str, Any] = {**asdict(self.arm), "strategy": self.strategy}
        for unit in ("ms", "mb"):
            for phase in PHASES:
                cost = getattr(self, phase)
                row[f"{phase}_{unit}"] = None if cost is None else getattr(cost, unit)
        return {**row, "kept_mb": self.kept_mb, "problem": self.problem}


@dataclass(frozen=True)
class Measured:
    """A sweep, the machine it ran on, and its points."""

    sweep: Sweep
    machine: dict[str, str]
    points: tuple[Point, ...]

    @property
    def headline(self) -> str:
        sweep = self.sweep
        tasks = "1 task" if sweep.tasks == 1 else f"{sweep.tasks} tasks"
        return (
            f"Conv4-{sweep.channels}, {sweep.image_size}×{sweep.image_size}, 5-way 1-shot, 15 "
            f"queries a class; {tasks} at once on {self.machine.get('device', sweep.device)}"
        )

    def curves(self) -> Iterator[tuple[str, int]]:
        """Method and S of every curve, in order."""
        yield from dict.fromkeys((p.arm.method, p.arm.samples) for p in self.points)

    def along_steps(self, method: str, samples: int) -> list[Point]:
        """The measured points of a curve over K, at the fixed L."""
        at = None if method in IMPLICIT_OF else self.sweep.fixed_cg_steps
        return self._along(method, samples, lambda a: a.cg_steps == at, lambda a: a.steps)

    def along_cg_steps(self, method: str, samples: int) -> list[Point]:
        """The measured points of an implicit curve over L, at the fixed K."""
        at = self.sweep.fixed_steps
        return self._along(
            method,
            samples,
            lambda a: a.steps == at and a.cg_steps is not None,
            lambda a: a.cg_steps or 0,
        )

    def parity(self) -> Iterator[tuple[str, str, dict[int, float]]]:
        """The time of an implicit backward with L = n over that of an explicit one through K = n,
        by n; with the names of both curves, implicit first."""
        for explicit, samples in self.curves():
            implicit = IMPLICIT_OF.get(explicit, "")
            ks = {p.arm.steps: p for p in self.along_steps(explicit, samples)}
            ls = {p.arm.cg_steps: p for p in self.along_cg_steps(implicit, samples)}
            if both := [n for n in ks if n in ls]:
                times = {n: ls[n].backward_cost.ms / ks[n].backward_cost.ms for n in both}
                yield NAMES[implicit], label(explicit, samples), times

    def beside_deterministic(self, method: str, samples: int) -> list[tuple[Point, Point]]:
        """Points of a Bayesian curve over K, each with its deterministic method's at that K."""
        plain = {p.arm.steps: p for p in self.along_steps(POINT_OF.get(method, ""), 1)}
        points = self.along_steps(method, samples)
        return [(p, plain[p.arm.steps]) for p in points if p.arm.steps in plain]

    def _along(
        self, method: str, samples: int, wanted: Callable[[Arm], bool], key: Callable[[Arm], int]
    ) -> list[Point]:
        points = [
            p
            for p in self.points
            if (p.arm.method, p.arm.samples) == (method, samples)
            and wanted(p.arm)
            and p.backward is not None
        ]
        return sorted(points, key=lambda p: key(p.arm))

    def content(self) -> dict[str, Any]:
        """The measurement for JSON; `of_content` reads it."""
        return {
            "format": _FORMAT,
            "machine": self.machine,
            "sweep": asdict(self.sweep),
            "points": [asdict(p) for p in self.points],
        }

    def write_json(self, path: Path) -> Path:
        return _write(path, json.dumps(self.content(), indent=1, allow_nan=False) + "\n")

    def write_csv(self, path: Path) -> Path:
        return _write(path, as_csv([p.row() for p in self.points]))


def _write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, text)
    return path


def read(path: Path) -> Measured:
    """Read a file that `Measured.write_json` wrote, on this or another machine."""
    try:
        return of_content(json.loads(path.read_text()))
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        said = f"{error} is missing" if isinstance(error, KeyError) else error
        raise ValueError(
            f"{path} is no measurement of `ibaml bench complexity` ({said}): give the file that "
            "--json wrote"
        ) from error


def of_content(content: Any) -> Measured:
    """The measurement from `Measured.content`."""
    if not isinstance(content, dict) or content.get("format") != _FORMAT:
        raise ValueError(f"its format is not {_FORMAT!r}")
    sweep = Sweep(**{**content["sweep"], **_tuples(content["sweep"])})
    points = tuple(_point(p) for p in content["points"])
    machine = {str(k): str(v) for k, v in content["machine"].items()}
    if not points:
        raise ValueError("it has no points")
    return Measured(sweep, machine, points)


def _tuples(sweep: dict[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) for name, value in sweep.items() if isinstance(value, list)}


def _point(content: dict[str, Any]) -> Point:
    arm = Arm(**content["arm"])
    if arm.method not in NAMES:
        raise ValueError(f"unknown method {arm.method!r}")
    costs: dict[str, Any] = {p: content[p] and Cost(**content[p]) for p in PHASES}
    _numbers(v for c in costs.values() if c is not None for v in (c.ms, c.mb))
    rest = {f.name: content[f.name] for f in fields(Point) if f.name not in ("arm", *PHASES)}
    return Point(arm, **costs, **rest)


def _numbers(values: Iterable[Any]) -> None:
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"{value!r} is no number")
