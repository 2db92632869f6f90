"""What does a comparison look like? A table for people, JSON for programs, and learning curves."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ibaml.assessment import plain
from ibaml.evaluation import Interval, paired
from ibaml.extras import missing
from ibaml.files import write_whole
from ibaml.quality.jobs import Comparison, Row, merged

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COLUMNS = ("", "accuracy %", "nll", "ECE %", "nll − first", "accuracy − first", "t", "seconds",
            "batch norm")  # fmt: skip


def written(comparison: Comparison) -> Iterator[str]:
    """The comparison as lines of text."""
    options = comparison.options
    yield f"{comparison.data}; {comparison.machine}"
    yield (
        f"{options.ways} ways, {options.train_tasks:,} training tasks of every method, "
        f"{options.test_tasks:,} test tasks, {options.test_queries} queries a class; intervals "
        "are 95 %, differences paired by task"
    )
    for shots in options.shots:
        rows = [row for row in comparison.rows if row.shots == shots]
        if not rows:
            continue
        yield ""
        yield f"{shots} shot{'s' * (shots > 1)}"
        yield from _aligned([_COLUMNS, *(_cells(row, rows[0]) for row in rows)])
        if at := _at_equal_time(rows):
            yield at
        for row in rows:
            yield from _choice(row)
    if comparison.missing:
        yield ""
        yield f"{comparison.missing} rows are missing: the same command continues"


def _cells(row: Row, first: Row) -> tuple[str, ...]:
    if not row.scores:
        return (row.title, "training failed", *[""] * (len(_COLUMNS) - 2))
    summary = merged(list(row.scores.values())).summary()
    runs = list(row.runs.values())
    gaps = _gaps(row, first)
    name = row.title + (f" ({len(row.scores)} seeds)" if len(row.scores) > 1 else "")
    temperatures = sum(run["temperature"] for run in runs if not run["failed"]) / len(row.scores)
    return (
        name,
        _figure(summary["accuracy"], 100, 1),
        _figure(summary["nll"], 1, 3),
        f"{100 * summary['ece'].value:.1f}",
        _figure(gaps["nll"], 1, 3, "+") if gaps else "",
        _figure(gaps["accuracy"], 100, 1, "+") if gaps else "",
        f"{temperatures:.2f}",
        f"{runs[0]['seconds']:.0f}",
        runs[0]["norm"] or "none",
    )


def _gaps(row: Row, first: Row) -> dict[str, Interval] | None:
    """The row's figures minus those of the first, on the seeds that both have."""
    common = sorted(row.scores.keys() & first.scores.keys())
    if row is first or not common:
        return None
    ours, theirs = (merged([one.scores[seed] for seed in common]) for one in (first, row))
    return paired(ours, theirs)


def _figure(interval: Interval, scale: float, digits: int, sign: str = "") -> str:
    half = scale * (interval.high - interval.low) / 2
    return f"{scale * interval.value:{sign}.{digits}f} ± {half:.{digits}f}"


def _at_equal_time(rows: Sequence[Row]) -> str:
    """The best validation nll that each method had when the fastest had finished."""
    curves = {row.title: row.runs[0]["curve"] for row in rows if row.runs[0]["curve"]}
    if len(curves) < 2:
        return ""
    end = min(curve[-1][1] for curve in curves.values())
    found = []
    for title, curve in curves.items():
        reached = [nll for _, seconds, nll, _ in curve if seconds <= end]
        found.append(f"{title} {min(reached):.3f}" if reached else f"{title} –")
    return f"validation nll after {end:.0f} s: {', '.join(found)}"


def _choice(row: Row) -> Iterator[str]:
    """The settings that a method chose, and among which."""
    if len(row.tried) < 2:
        return
    named = []
    for one in row.tried:
        nll = "failed" if one["failed"] else f"{one['nll']:.3f}"
        mark = " (chosen)" if one["settings"] == row.settings else ""
        settings = ", ".join(f"{n} {v}" for n, v in one["settings"].items()) or "defaults"
        named.append(f"{settings} {nll}{mark}")
    yield f"  {row.title}, validation nll: {'; '.join(named)}"


def _aligned(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        first, *others = (
            cell.ljust(width) if place in (0, len(row) - 1) else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        yield "  ".join([first, *others]).rstrip()


def write(comparison: Comparison, folder: Path) -> list[Path]:
    """Write result.json and the table, and the learning curves if matplotlib is installed."""
    folder.mkdir(parents=True, exist_ok=True)
    files = [folder / "result.txt", folder / "result.json"]
    write_whole(files[0], "\n".join(written(comparison)) + "\n")
    firsts: dict[int, Row] = {}
    rows = [_plain(row, firsts.setdefault(row.shots, row)) for row in comparison.rows]
    content = {
        "data": comparison.data,
        "machine": comparison.machine,
        "options": dataclasses.asdict(comparison.options),
        "rows": rows,
        "missing": comparison.missing,
    }
    write_whole(files[1], json.dumps(content, indent=1) + "\n")
    if missing("matplotlib") is None and any(row.runs[0]["curve"] for row in comparison.rows):
        from ibaml.report.figure import save

        files.append(save(_drawn(comparison), folder / "curves.png"))
    return files


def _plain(row: Row, first: Row) -> dict[str, Any]:
    summary = merged(list(row.scores.values())).summary() if row.scores else {}
    gaps = _gaps(row, first) or {}
    return {
        "arm": row.arm,
        "shots": row.shots,
        "settings": row.settings,
        "tried": row.tried,
        "test": {name: plain(interval) for name, interval in summary.items()},
        "minus first": {name: plain(interval) for name, interval in gaps.items()},
        "runs": {str(seed): run for seed, run in row.runs.items()},
    }


def _drawn(comparison: Comparison) -> Figure:
    """Validation nll by tasks and by time, a row for each number of shots."""
    from ibaml.report.figure import blank, hide_frame, line_styles

    shots = list(dict.fromkeys(row.shots for row in comparison.rows))
    figure = blank(11, 3.4 * len(shots) + 0.4)
    panels = figure.subplots(len(shots), 2, squeeze=False, sharey="row")
    for count, axes in zip(shots, panels, strict=True):
        rows = [row for row in comparison.rows if row.shots == count]
        for row, (color, dash) in zip(rows, line_styles(), strict=False):
            curve = row.runs[0]["curve"]
            for axis, column in zip(axes, (0, 1), strict=True):
                axis.plot(
                    [point[column] for point in curve], [point[2] for point in curve],
                    color=color, linestyle=dash, label=row.title,
                )  # fmt: skip
        for axis, name in zip(axes, ("training tasks", "seconds"), strict=True):
            axis.set_xlabel(name)
            axis.set_ylabel(f"validation nll, {count} shot{'s' * (count > 1)}")
            hide_frame(axis)
        axes[0].legend(fontsize=8)
    return figure
