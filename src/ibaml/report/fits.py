"""What does a regression fit look like as the number of examples grows?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from ibaml.report.figure import BLUE, GRAY, RED, blank, save


@dataclass(frozen=True)
class Fit:
    """One panel: a regression fit over a grid x, after some examples were seen.

    ``deviation`` is the standard deviation of the prediction, None for a point fit.
    """

    title: str
    x: Tensor
    truth: Tensor
    mean: Tensor
    deviation: Tensor | None
    examples_x: Tensor
    examples_y: Tensor


def draw_fits(rows: Sequence[tuple[str, Sequence[Fit]]], path: Path, headline: str) -> Path:
    """A grid of fits, one row per learner, saved as a picture."""
    columns = len(rows[0][1])
    figure = blank(3.1 * columns, 2.7 * len(rows) + 0.8)
    axes = figure.subplots(len(rows), columns, sharex=True, sharey=True, squeeze=False)
    for (label, fits), line in zip(rows, axes, strict=True):
        line[0].set_ylabel(label, fontsize=11)
        for fit, axis in zip(fits, line, strict=True):
            x, mean = fit.x.flatten().numpy(), fit.mean.flatten().numpy()
            if fit.deviation is not None:
                width = fit.deviation.flatten().numpy()
                axis.fill_between(
                    x, mean - 2 * width, mean + 2 * width, color=BLUE, alpha=0.18, lw=0,
                    label="mean ± 2 standard deviations",
                )  # fmt: skip
            axis.plot(x, fit.truth.flatten().numpy(), "--", color=GRAY, lw=1.4, label="truth")
            axis.plot(x, mean, color=BLUE, lw=1.8, label="prediction")
            axis.plot(
                fit.examples_x.flatten().numpy(),
                fit.examples_y.flatten().numpy(),
                "o",
                color=RED,
                ms=5,
                label="examples",
            )
            axis.set_title(fit.title, fontsize=10)
            axis.grid(alpha=0.2)
    handles, labels = axes[0][-1].get_legend_handles_labels()
    figure.suptitle(headline, fontsize=12, parse_math=False)
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    low = min(float(f.truth.min()) for _, fits in rows for f in fits)
    high = max(float(f.truth.max()) for _, fits in rows for f in fits)
    margin = 0.8 * (high - low)
    axes[0][0].set_ylim(low - margin, high + margin)
    return save(figure, path)
