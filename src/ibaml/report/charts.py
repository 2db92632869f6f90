"""Which drawings does a page show? Small figures without names: those are in the page's legend.

All are drawn for the width of a phone. What comes from a file is a number here, never a text.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np

from ibaml.evaluation import ClassScores, Interval, reliability
from ibaml.report.figure import BLUE, GRAY, INK, RED, blank, hide_frame, line_styles

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Points = tuple[Sequence[float], Sequence[float]]
XY = tuple[np.ndarray, np.ndarray]
_WIDTH, _HEIGHT = 4.4, 3.0
_SMALL = 8.5


def _empty(width: float = _WIDTH, height: float = _HEIGHT) -> tuple[Figure, Axes]:
    figure = blank(width, height)
    axis = figure.subplots()
    _plain(axis)
    return figure, axis


def _plain(axis: Axes) -> None:
    hide_frame(axis)
    axis.tick_params(labelsize=_SMALL, color=GRAY)
    for spine in axis.spines.values():
        spine.set_color(GRAY)
    axis.grid(alpha=0.25, color=GRAY, lw=0.6)
    axis.set_axisbelow(True)


def curves(
    ys: str,
    validation: Sequence[Points],
    training: Sequence[Points] = (),
    best: Sequence[int | None] = (),
    share: bool = False,
) -> Figure:
    """What a run logged, a color for each run: the training loss is a pale line with its running
    median, validation a line with dots, the best weights a ring."""
    figure, axis = _empty()
    for at, (color, dash) in zip(range(len(validation)), line_styles(), strict=False):
        if at < len(training) and training[at][0]:
            x, y = training[at]
            axis.plot(x, y, color=color, lw=0.8, alpha=0.35)
            axis.plot(x, running_median(y), color=color, lw=1.4, alpha=0.8, ls=":")
        x, y = validation[at]
        axis.plot(x, y, dash, marker="o", ms=3, color=color, lw=1.8)
        ring = best[at] if at < len(best) else None
        if ring is not None and ring in x:
            place = list(x).index(ring)
            axis.plot([x[place]], [y[place]], "o", ms=9, mfc="none", mec=INK, mew=1.3)
    axis.set_xlabel("meta-iteration", fontsize=_SMALL)
    axis.set_ylabel(ys, fontsize=_SMALL)
    if share:
        _at_most_one(axis)
        axis.yaxis.set_major_formatter(_percent)
    return figure


def running_median(values: Sequence[float], width: int = 9) -> list[float]:
    """The median of the values around each; towards the ends of fewer, as many on both sides."""
    last = len(values) - 1
    halves = [min(width // 2, i, last - i) for i in range(len(values))]
    return [float(np.median(values[i - h : i + h + 1])) for i, h in enumerate(halves)]


def reliability_chart(scores: ClassScores) -> Figure:
    """Accuracy in each bin of confidence, against the line on which both are equal; below it, how
    many answers there are in each."""
    diagram = reliability(scores.bins().sum(0))
    bins = len(diagram.count) - 1
    left = np.arange(bins + 1) / bins
    width = np.append(np.full(bins, 1 / bins), 0.5 / bins)
    accuracy, confidence = np.nan_to_num(diagram.accuracy), np.nan_to_num(diagram.confidence)
    figure = blank(_WIDTH, 3.9)
    upper, lower = figure.subplots(2, 1, sharex=True, gridspec_kw={"height_ratios": [4, 1]})
    upper.bar(left, accuracy, width, align="edge", color=BLUE, alpha=0.35, lw=0)
    gap = confidence - accuracy
    for color, over in ((BLUE, gap < 0), (RED, gap > 0)):
        upper.bar(
            left, np.where(over, gap, np.nan), width, accuracy, align="edge", color=color,
            alpha=0.75, lw=0,
        )  # fmt: skip
    upper.plot([0, 1], [0, 1], "--", color=INK, lw=1)
    upper.set_xlim(0, left[-1] + width[-1])
    upper.set_ylim(0, 1)
    lower.bar(left, diagram.count / diagram.count.sum(), width, align="edge", color=GRAY, lw=0)
    lower.set_xlabel("confidence", fontsize=_SMALL)
    upper.set_ylabel("accuracy", fontsize=_SMALL)
    lower.set_ylabel("share", fontsize=_SMALL)
    for axis in (upper, lower):
        _plain(axis)
        axis.yaxis.set_major_formatter(_percent)
    lower.xaxis.set_major_formatter(_percent)
    return figure


def coverage_chart(scores: Sequence[ClassScores], points: int = 50) -> Figure:
    """Accuracy of the answers if only the surest are given, a line for each learner."""
    figure, axis = _empty()
    for one, (color, dash) in zip(scores, line_styles(), strict=False):
        coverage, accuracy = one.selective(points)
        axis.plot(coverage, accuracy, dash, color=color, lw=1.8)
    axis.set_xlim(0, 1)
    _at_most_one(axis)
    axis.xaxis.set_major_formatter(_percent)
    axis.yaxis.set_major_formatter(_percent)
    axis.set_xlabel("share of queries answered, the surest first", fontsize=_SMALL)
    axis.set_ylabel("accuracy of the answers", fontsize=_SMALL)
    return figure


def spread_chart(values: Sequence[np.ndarray], xs: str, share: bool = False) -> Figure:
    """How a figure varies over tasks: a histogram for each learner."""
    figure, axis = _empty()
    every = np.concatenate(list(values))
    low, high = float(every.min()), float(every.max())
    low = low if high > low else high - max(0.1 * abs(high), 1e-3)  # all the same
    edges = np.linspace(low, high, 17)
    for one, (color, dash) in zip(values, line_styles(), strict=False):
        counts, _ = np.histogram(one, edges)
        axis.stairs(counts / len(one), edges, color=color, lw=1.6, ls=dash)
        if len(values) == 1:
            axis.stairs(counts / len(one), edges, color=color, alpha=0.3, fill=True, lw=0)
    axis.set_xlabel(xs, fontsize=_SMALL)
    axis.set_ylabel("share of tasks", fontsize=_SMALL)
    axis.yaxis.set_major_formatter(_percent)
    if share:
        axis.xaxis.set_major_formatter(_percent)
    return figure


def intervals_chart(intervals: Sequence[Interval], xs: str, share: bool = False) -> Figure:
    """A dot with its interval for each learner but the first, numbered from 2; 0 is a line."""
    figure, axis = _empty(height=0.9 + 0.34 * len(intervals))
    colors = islice(line_styles(), 1, None)
    for at, (one, (color, _)) in enumerate(zip(intervals, colors, strict=False)):
        if math.isfinite(one.high - one.low):
            axis.plot([one.low, one.high], [at, at], color=color, lw=2, solid_capstyle="butt")
        axis.plot([one.value], [at], "o", ms=6, color=color)
    axis.axvline(0, color=INK, lw=1)
    axis.set_yticks(range(len(intervals)), [str(i + 2) for i in range(len(intervals))])
    axis.set_ylim(len(intervals) - 0.5, -0.5)
    axis.set_xlabel(xs, fontsize=_SMALL)
    if share:
        axis.xaxis.set_major_formatter(_percent)
    return figure


def ranges_chart(
    ranges: Sequence[tuple[float, float, float]], xs: str, start: float | None = None
) -> Figure:
    """Lowest, middle and highest value of something in each layer, numbered from the top."""
    figure, axis = _empty(height=0.9 + 0.3 * max(2, len(ranges)))
    for at, (low, middle, high) in enumerate(ranges):
        axis.plot([low, high], [at, at], color=BLUE, lw=5, alpha=0.35, solid_capstyle="butt")
        axis.plot([middle], [at], "o", ms=6, color=BLUE)
    if start is not None:
        axis.axvline(start, color=INK, ls="--", lw=1)
    axis.set_yticks(range(len(ranges)), [str(i + 1) for i in range(len(ranges))])
    axis.set_ylim(len(ranges) - 0.5, -0.5)
    axis.set_xlabel(xs, fontsize=_SMALL)
    axis.set_ylabel("layer", fontsize=_SMALL)
    return figure


def spectrum_chart(values: np.ndarray) -> Figure:
    """How far class means spread along each direction, the widest first."""
    figure, axis = _empty()
    axis.plot(np.arange(1, len(values) + 1), np.sort(values)[::-1], color=BLUE, lw=1.8)
    if len(values) > 30:
        axis.set_xscale("log")
    axis.set_ylim(bottom=0)
    axis.set_xlabel("direction, the most telling first", fontsize=_SMALL)
    axis.set_ylabel("variance of class means", fontsize=_SMALL)
    return figure


def fit_chart(
    x: np.ndarray, mean: np.ndarray, deviation: np.ndarray, examples: XY, queries: XY
) -> Figure:
    """A regression task: the prediction with two standard deviations, examples, the truth."""
    figure, axis = _empty()
    axis.fill_between(
        x, mean - 2 * deviation, mean + 2 * deviation, color=BLUE, alpha=0.2, lw=0
    )  # fmt: skip
    axis.plot(x, mean, color=BLUE, lw=1.8)
    axis.plot(*queries, "o", ms=3, color=GRAY)
    axis.plot(*examples, "o", ms=5, color=RED)
    axis.set_xlabel("input", fontsize=_SMALL)
    axis.set_ylabel("target", fontsize=_SMALL)
    return figure


def _at_most_one(axis: Axes) -> None:
    """End the axis of a share a little above 100 %."""
    low, high = axis.get_ylim()
    axis.set_ylim(low, min(high, 1.004))


def _percent(value: float, _: object = None) -> str:
    text = f"{100 * value:.1f}".rstrip("0").rstrip(".")
    return f"{text} %"
