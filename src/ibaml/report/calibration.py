"""Can a learner's confidence be trusted? Reliability diagrams and selective accuracy."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ibaml.evaluation import ClassScores, Interval, reliability
from ibaml.report.figure import BLUE, GRAY, RED, blank, line_styles, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLUMNS = 3
_PALE = "#a9c8e8"


def draw_reliability(scores: Mapping[str, ClassScores], path: Path, headline: str) -> Path:
    """Draw and save `reliability_figure`."""
    return save(reliability_figure(scores, headline), path)


def reliability_figure(scores: Mapping[str, ClassScores], headline: str) -> Figure:
    """One panel per learner: accuracy against confidence in bins, and how often each occurs.

    The solid bar is the accuracy. The gap to the bin's mean confidence is hatched: inside the bar
    where the learner was right more often than it said, above the bar where less often.
    The narrow bar right of 1 holds the predictions whose confidence is exactly 1.
    """
    _check(scores)
    rows = -(-len(scores) // _COLUMNS)
    columns = -(-len(scores) // rows)
    figure = blank(3.6 * columns + 0.6, 5.0 * rows + 1.0)
    axes = figure.subplots(
        2 * rows, columns, squeeze=False, sharex=True, gridspec_kw={"height_ratios": [3, 1] * rows}
    )
    for place in range(rows * columns):
        row, column = divmod(place, columns)
        upper, lower = axes[2 * row][column], axes[2 * row + 1][column]
        if place >= len(scores):
            upper.set_axis_off()
            lower.set_axis_off()
            continue
        name, one = list(scores.items())[place]
        _panel(upper, lower, name, one)
        if column == 0:
            upper.set_ylabel("accuracy")
            lower.set_ylabel("share of\npredictions")
    figure.suptitle(headline, fontsize=12, parse_math=False)
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="outside lower center", ncols=min(2 * columns, 4), frameon=False,
        fontsize=9,
    )  # fmt: skip
    return figure


def _panel(upper: Axes, lower: Axes, name: str, scores: ClassScores) -> None:
    diagram = reliability(scores.bins().sum(0))
    bins = len(diagram.count) - 1
    left = np.arange(bins + 1) / bins
    width = np.append(np.full(bins, 1 / bins), 0.5 / bins)
    accuracy, confidence = np.nan_to_num(diagram.accuracy), np.nan_to_num(diagram.confidence)
    upper.bar(
        left, accuracy, width, align="edge", color=_PALE, edgecolor="white", lw=0.6,
        label="accuracy",
    )  # fmt: skip
    gap = confidence - accuracy
    for color, hatch, bottom, height, label in (
        (BLUE, "////", confidence, -gap, "gap: underconfident"),
        (RED, r"\\\\", accuracy, gap, "gap: overconfident"),
    ):
        upper.bar(
            left, np.where(height > 0, height, np.nan), width, bottom, align="edge",
            facecolor="none", edgecolor=color, lw=0.8, hatch=hatch, label=label,
        )  # fmt: skip
    upper.plot([0, 1], [0, 1], "--", color=GRAY, lw=1.2, label="calibrated")
    summary = scores.summary()
    text = "\n".join(f"{key.upper()} {_written(summary[key])}" for key in ("ece", "mce"))
    upper.text(0.5, 1.02, text, transform=upper.transAxes, ha="center", va="bottom", fontsize=8.5)
    upper.set_title(name, fontsize=11, pad=28, parse_math=False)
    upper.set_xlim(0, left[-1] + width[-1])
    upper.set_ylim(0, 1)
    share = diagram.count / diagram.count.sum()
    lower.bar(left, share, width, align="edge", color=GRAY, edgecolor="white", lw=0.6)
    lower.set_xlabel("confidence" if not diagram.count[-1] else "confidence (beyond 1: exactly 1)")
    lower.tick_params(labelbottom=True)
    for axis in (upper, lower):
        axis.grid(alpha=0.2)
        axis.set_axisbelow(True)


def draw_selective(
    scores: Mapping[str, ClassScores], path: Path, headline: str, points: int = 100
) -> Path:
    """Accuracy against the share of queries answered, the surest first; one line per learner."""
    _check(scores)
    figure = blank(6.0, 4.4)
    axis = figure.subplots()
    for (name, one), (color, dash) in zip(scores.items(), line_styles(), strict=False):
        coverage, accuracy = one.selective(points)
        axis.plot(coverage, accuracy, dash, color=color, lw=1.8, label=name)
    axis.set_xlabel("share of the queries answered, the surest first")
    axis.set_ylabel("accuracy of the answers")
    axis.set_xlim(0, 1)
    axis.set_title(headline, fontsize=12, parse_math=False)
    axis.grid(alpha=0.2)
    for text in axis.legend(frameon=False, fontsize=9).get_texts():
        text.set_parse_math(False)
    return save(figure, path)


def _check(scores: Mapping[str, ClassScores]) -> None:
    if not scores:
        raise ValueError("scores: nothing to draw, give at least one learner's")
    for name, one in scores.items():
        if not isinstance(one, ClassScores):
            raise ValueError(
                f"scores of {name!r} are {type(one).__name__}: confidence is of classification"
            )


def _written(interval: Interval) -> str:
    return f"{interval.value:.3f} [{interval.low:.3f}, {interval.high:.3f}]"
