"""What does Figure 3 look like? ECE and MCE of every method, with their intervals."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from ibaml.report.figure import BLUE, INK, ORANGE, blank, hide_frame

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ibaml.evaluation import ClassScores


def draw(scores: Mapping[str, ClassScores], headline: str) -> Figure:
    """Two bars a method, as in the paper, with 95 % intervals over tasks."""
    summaries = [one.summary() for one in scores.values()]
    figure = blank(1.3 * len(scores) + 2.2, 4.4)
    axis = figure.subplots()
    places = np.arange(len(scores))
    for shift, metric, color in ((-0.19, "ece", BLUE), (0.19, "mce", ORANGE)):
        intervals = [summary[metric] for summary in summaries]
        values = np.array([100 * f.value for f in intervals])
        ends = 100 * np.array([[f.low, f.high] for f in intervals])
        ends = np.where(np.isfinite(ends), ends, values[:, None])
        reach = np.abs(ends.T - values)
        axis.bar(places + shift, values, 0.36, color=color, label=metric.upper())
        axis.errorbar(places + shift, values, yerr=reach, fmt="none", color=INK, lw=1.2, capsize=3)
    axis.set_xticks(places, [name.replace(", ", "\n") for name in scores], fontsize=9)
    axis.set_ylabel("calibration error, %  (lower is better)")
    axis.set_ylim(0, None)
    axis.grid(axis="y", alpha=0.25)
    axis.set_axisbelow(True)
    hide_frame(axis)
    axis.legend(frameon=False, ncols=2)
    axis.set_title(headline, fontsize=12, parse_math=False)
    return figure
