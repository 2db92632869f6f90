"""Which learner is better in which figure?"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

from ibaml.evaluation import Interval
from ibaml.report.figure import BLUE, GRAY, blank, save

_COLUMNS = 3
_TITLES = {
    "accuracy": ("accuracy", "higher is better"),
    "nll": ("NLL", "lower is better"),
    "brier": ("Brier score", "lower is better"),
    "ece": ("ECE", "lower is better"),
    "mce": ("MCE", "lower is better"),
    "rmse": ("RMSE", "lower is better"),
    "coverage": ("coverage of 95 % intervals", "0.95 is right"),
}


def draw_comparison(
    summaries: Mapping[str, Mapping[str, Interval]],
    path: Path,
    headline: str,
    target: str | None = None,
) -> Path:
    """One panel per figure, with a dot and its interval for every learner.

    If ``target`` is given, the RMSE is that of the target in its own units.
    A hollow dot has no interval (one task says nothing about the spread).
    """
    if not summaries:
        raise ValueError("summaries: nothing to draw, give at least one learner's")
    names, metrics = list(summaries), list(next(iter(summaries.values())))
    for name, summary in summaries.items():
        if set(summary) != set(metrics):
            odd = sorted(set(summary) ^ set(metrics))[0]
            raise ValueError(
                f"summaries of {names[0]!r} and {name!r} differ in {odd!r}: a comparison needs the "
                "same figures of every learner"
            )
    columns = min(_COLUMNS, len(metrics))
    rows = -(-len(metrics) // columns)
    figure = blank(3.2 * columns + 1.2, rows * (0.34 * len(names) + 1.3) + 0.5)
    axes = figure.subplots(rows, columns, squeeze=False, sharey=True)
    for place, axis in enumerate(axes.flat):
        if place >= len(metrics):
            axis.set_axis_off()
            continue
        metric = metrics[place]
        for height, name in enumerate(names):
            interval = summaries[name][metric]
            bounded = math.isfinite(interval.high - interval.low)
            if bounded:
                reach = [[interval.value - interval.low], [interval.high - interval.value]]
                axis.errorbar(interval.value, height, xerr=reach, color=BLUE, lw=2, capsize=4)
            axis.plot(
                interval.value, height, "o", ms=7, color=BLUE, mfc=BLUE if bounded else "white"
            )
        if metric == "coverage":
            axis.axvline(0.95, color=GRAY, ls="--", lw=1.2)
        title, better = _TITLES.get(metric, (metric, ""))
        if metric == "rmse" and target is not None:
            title = f"RMSE of {target}"
        axis.set_title(title, fontsize=11, parse_math=False)
        axis.set_xlabel(better, fontsize=9)
        axis.margins(x=0.1)
        axis.locator_params(axis="x", nbins=5)
        axis.grid(axis="x", alpha=0.25)
    first = axes[0][0]
    first.set_yticks(range(len(names)), names, parse_math=False)
    first.set_ylim(len(names) - 0.5, -0.5)
    figure.suptitle(headline, fontsize=12, parse_math=False)
    return save(figure, path)
