"""What does Table 1 look like? Figures with intervals, and differences from the first row."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ibaml.assessment import differences
from ibaml.evaluation import Interval
from ibaml.report.figure import BLUE, GRAY, RED, blank

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from ibaml.paper.trained.results import Result

Printed = Mapping[str, Mapping[str, tuple[float, float]]]


def draw(results: Sequence[Result], printed: Printed, headline: str) -> Figure:
    """Three panels, a line per arm: nll, accuracy, and the nll minus the first arm's."""
    arms = [r for r in results if r.scores is not None]
    names = [r.name for r in arms]
    summaries = {r.name: r.scores.summary() for r in arms if r.scores is not None}
    figure = blank(12.6, 0.42 * len(results) + 2.0)
    axes = figure.subplots(1, 3, sharey=True)
    same = arms[0].training["data"]["name"] == "miniimagenet" if arms else False
    for axis, metric, scale in ((axes[0], "nll", 1), (axes[1], "accuracy", 100)):
        _dots(axis, [summaries[n][metric] for n in names], scale, BLUE)
        if same:
            _hollow(axis, [printed.get(n, {}).get(metric) for n in names])
    axes[0].set_title("nll", fontsize=11)
    axes[0].set_xlabel("lower is better", fontsize=9)
    axes[1].set_title("accuracy, %", fontsize=11)
    axes[1].set_xlabel("higher is better", fontsize=9)
    if len(names) > 1:
        _differences(axes[2], arms, printed)
    axes[0].set_yticks(range(len(arms)), [r.title for r in arms], parse_math=False)
    axes[0].set_ylim(len(arms) - 0.5, -0.5)
    figure.suptitle(headline, fontsize=12, parse_math=False)
    return figure


def _differences(axis: Axes, arms: Sequence[Result], printed: Printed) -> None:
    pairs = differences({r.name: r.scores for r in arms if r.scores is not None})
    first = arms[0].name
    lines = [Interval(0.0, 0.0, 0.0), *(pairs[r.name]["nll"] for r in arms[1:])]
    _dots(axis, lines, 1, RED)
    base = printed.get(first)
    if base is not None:
        gaps = [
            (printed[r.name]["nll"][0] - base["nll"][0], 0.0) if r.name in printed else None
            for r in arms
        ]
        _hollow(axis, gaps)
    axis.axvline(0, color=GRAY, lw=1, zorder=0)
    axis.set_title(f"nll minus that of {arms[0].title}, paired", fontsize=11)
    axis.set_xlabel("hollow: the paper, miniImageNet" if base else "", fontsize=9)


def _dots(axis: Axes, values: Sequence[Interval], scale: float, color: str) -> None:
    for height, interval in enumerate(values):
        if math.isfinite(interval.high - interval.low):
            reach = [
                [scale * (interval.value - interval.low)],
                [scale * (interval.high - interval.value)],
            ]
            axis.errorbar(scale * interval.value, height, xerr=reach, color=color, lw=2, capsize=4)
        axis.plot(scale * interval.value, height, "o", ms=7, color=color)
    axis.margins(x=0.1)
    axis.locator_params(axis="x", nbins=6)
    axis.grid(axis="x", alpha=0.25)


def _hollow(axis: Axes, values: Sequence[tuple[float, float] | None]) -> None:
    """The paper's figures, a little below ours."""
    for height, interval in enumerate(values):
        if interval is not None:
            value, half = interval
            axis.errorbar(value, height + 0.22, xerr=half or None, color=GRAY, lw=1.2)
            axis.plot(value, height + 0.22, "D", ms=5, mfc="white", color=GRAY)
