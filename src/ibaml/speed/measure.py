"""What is measured, one row after the other, and how is it written down?"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ibaml.files import write_whole
from ibaml.kinds import FEATURES, kind_of_data
from ibaml.machine import in_a_line, machine, pick_device, threads
from ibaml.speed.generated import photographs, vectors
from ibaml.speed.options import RUNS, SpeedOptions
from ibaml.speed.runs import Row, measured_run
from ibaml.speed.start import Start, starts

Count = Callable[[int, int, str], None]


@dataclass(frozen=True)
class Measured:
    """What was measured here."""

    options: SpeedOptions
    machine: dict[str, str]
    starts: tuple[Start, ...]
    rows: tuple[Row, ...]

    def write(self, path: Path) -> list[Path]:
        """A JSON file, and the same as text beside it."""
        facts = {
            "machine": self.machine,
            "options": asdict(self.options),
            "starts": [asdict(one) for one in self.starts],
            "rows": [{**asdict(row), "share": row.share} for row in self.rows],
        }
        text = path.with_suffix(".txt")
        write_whole(path, json.dumps(facts, indent=1) + "\n")
        write_whole(text, "\n".join(written(self)) + "\n")
        return [path, text]


def measure(options: SpeedOptions, count: Count = lambda done, total, what: None) -> Measured:
    """Measure every run that the options ask for; ``count`` hears of the progress."""
    device = pick_device(options.device)
    cuda = device.type == "cuda"
    usual = (200, 200, 60) if cuda else (5, 10, 6)
    asked = (options.skip, options.iterations, options.alone)
    skip, iterations, alone = (
        given if given is not None else value for given, value in zip(asked, usual, strict=True)
    )
    plan = [
        (name, shots, tasks)
        for tasks in (options.tasks or (None,))
        for name in options.methods
        for shots in options.shots
    ]
    rows: list[Row] = []
    found: list[Start] = []
    with threads(options.threads), tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        with _data(options, folder) as data:
            facts = machine(device)
            if options.start:
                count(0, len(plan), "the start")
                found = starts(data, folder, options.device, options.threads)
            for i, (name, shots, tasks) in enumerate(plan):
                count(i, len(plan), f"{name}, {shots} shots")
                given: dict[str, Any] = {
                    "data": data, "shots": shots, "device": options.device,
                    "threads": options.threads, "tasks": tasks,
                    "train_ways": options.train_ways, **RUNS[name],
                }  # fmt: skip
                if kind_of_data(data, table=False) is FEATURES:
                    given["model"] = "mlp"  # `discriminant`, the default, trains nothing
                given = {key: value for key, value in given.items() if value is not None}
                timed = {"skip": skip, "iterations": iterations, "alone": alone}
                timed["evaluate"] = options.evaluate
                rows.append(measured_run(name, given, folder / f"run-{i}", **timed))
            count(len(plan), len(plan), "done")
    return Measured(options, facts, tuple(found), tuple(rows))


@contextmanager
def _data(options: SpeedOptions, folder: Path) -> Iterator[str]:
    """The data's name or path. What is generated is decoded into a cache of its own."""
    if options.data not in ("photographs", "vectors"):
        yield options.data
        return
    before = os.environ.get("IBAML_CACHE")
    os.environ["IBAML_CACHE"] = str(folder / "cache")
    try:
        if options.data == "photographs":
            yield str(photographs(folder / "photographs", options.images))
        else:
            yield str(vectors(folder / "vectors.npz"))
    finally:
        if before is None:
            del os.environ["IBAML_CACHE"]
        else:
            os.environ["IBAML_CACHE"] = before


def written(measured: Measured) -> list[str]:
    """The figures as lines of text."""
    lines = [in_a_line(measured.machine), f"data: {measured.options.data}"]
    for one in measured.starts:
        used = "" if one.processor is None else f", processor {one.processor:.1f} s"
        lines.append(f"start to first step, {one.what}: {one.seconds:.1f} s{used}")
    titles = (
        "run", "shots", "tasks", "tasks/s", "alone", "share", "floor", "ms/step", "device", "host",
        "wait", "data", "val", "ckpt", "log", "processor",
    )  # fmt: skip
    lines += ["", *_table([titles, *(_cells(row) for row in measured.rows)]), ""]
    lines += [
        "tasks/s: of the whole run, with its share of validation and checkpoints. alone: the same "
        "learner's meta-step on one batch",
        "that stays in memory. share: the first over the second. floor: tasks/s if only the "
        "features' convolutions and products cost time.",
        "Milliseconds of one iteration: ms/step without data, validation, checkpoint and log; of "
        "it the device works, the host works and",
        "the host waits. processor: of all threads.",
    ]
    if any(row.clock == "processor" for row in measured.rows):
        lines.append("All of it is processor time, on one thread of a CPU.")
    for row in measured.rows:
        of = "" if row.memory is None else f", {row.memory:.1f} GB"
        ways = "" if row.train_ways is None else f", trained {row.train_ways}-way"
        floor = row.floor
        needs = (
            ""
            if floor is None
            else f"; a task's features need {floor.flops / 1e9:.2f} GFLOP and "
            f"{floor.bytes / 1e6:.0f} MB"
        )
        lines.append(
            f"{row.name} {row.shots}-shot, {row.tasks} tasks: {row.strategy}{ways}, {row.at_once} "
            f"at once{of}; first step {row.start:.1f} s after the run's begin; loss {row.loss:.3f}"
            f"{needs}"
        )
        if row.evaluation is not None:
            tasks = measured.options.evaluate
            lines.append(f"  an evaluation of {tasks:,} tasks: {row.evaluation:.1f} s")
    return lines


def _cells(row: Row) -> tuple[str, ...]:
    def some(number: float | None, digits: int) -> str:
        return "–" if number is None else f"{number:,.{digits}f}"

    share = "–" if row.share is None else f"{100 * row.share:.0f} %"
    times = (row.step, row.device, row.host, row.wait, row.data, row.validation, row.checkpoint,
             row.log, row.processor)  # fmt: skip
    floor = None if row.floor is None else row.floor.tasks_per_second
    rates = (row.tasks_per_second, row.alone)
    return (
        row.name, str(row.shots), str(row.tasks), *(some(r, 1 if r and r < 100 else 0) for r in
        rates), share, some(floor, 1 if floor and floor < 100 else 0),
        *(some(t, 2) for t in times),
    )  # fmt: skip


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
