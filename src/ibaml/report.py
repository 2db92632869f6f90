"""What a person looks at: pictures. Plots import matplotlib when they are drawn, not before."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_BLUE, _GREY, _RED = "#1f5fa8", "#8a8a8a", "#c0392b"


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
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    columns = len(rows[0][1])
    figure, axes = plt.subplots(
        len(rows),
        columns,
        figsize=(3.1 * columns, 2.7 * len(rows) + 0.8),
        sharex=True,
        sharey=True,
        squeeze=False,
        layout="constrained",
    )
    for (label, fits), line in zip(rows, axes, strict=True):
        line[0].set_ylabel(label, fontsize=11)
        for fit, axis in zip(fits, line, strict=True):
            x, mean = fit.x.flatten().numpy(), fit.mean.flatten().numpy()
            if fit.deviation is not None:
                width = fit.deviation.flatten().numpy()
                axis.fill_between(
                    x, mean - 2 * width, mean + 2 * width, color=_BLUE, alpha=0.18, lw=0,
                    label="mean ± 2 standard deviations",
                )  # fmt: skip
            axis.plot(x, fit.truth.flatten().numpy(), "--", color=_GREY, lw=1.4, label="truth")
            axis.plot(x, mean, color=_BLUE, lw=1.8, label="prediction")
            axis.plot(
                fit.examples_x.flatten().numpy(),
                fit.examples_y.flatten().numpy(),
                "o",
                color=_RED,
                ms=5,
                label="examples",
            )
            axis.set_title(fit.title, fontsize=10)
            axis.grid(alpha=0.2)
    handles, labels = axes[0][-1].get_legend_handles_labels()
    figure.suptitle(headline, fontsize=12)
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    low = min(float(f.truth.min()) for _, fits in rows for f in fits)
    high = max(float(f.truth.max()) for _, fits in rows for f in fits)
    margin = 0.8 * (high - low)
    axes[0][0].set_ylim(low - margin, high + margin)
    return _save(figure, path)


def draw_episode(
    support: Tensor, query: Tensor, names: Sequence[str], path: Path, headline: str
) -> Path:
    """A contact sheet of one episode: a column per class, support above, query below.

    Args:
        support, query: pixels in [0, 1], (ways, n, C, H, W).
        names: of the classes.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    ways, shots = support.shape[:2]
    rows = shots + query.shape[1]
    figure, axes = plt.subplots(
        rows,
        ways,
        figsize=(1.5 * ways + 0.6, 1.25 * rows + 0.8),
        squeeze=False,
        layout="constrained",
    )
    for w in range(ways):
        title = names[w] if len(names[w]) <= 22 else f"{names[w][:10]}…{names[w][-10:]}"
        axes[0][w].set_title(f"{w}: {title}", fontsize=7, parse_math=False)
        for r in range(rows):
            axis = axes[r][w]
            image = support[w, r] if r < shots else query[w, r - shots]
            pixels = image.permute(1, 2, 0).numpy()
            axis.imshow(pixels.squeeze(), cmap="gray", vmin=0, vmax=1, interpolation="nearest")
            axis.set_xticks([])
            axis.set_yticks([])
            for spine in axis.spines.values():
                spine.set_color(_BLUE if r < shots else _GREY)
                spine.set_linewidth(2 if r < shots else 0.8)
    axes[0][0].set_ylabel("support", color=_BLUE, fontsize=9)
    axes[shots][0].set_ylabel("query", color=_GREY, fontsize=9)
    figure.suptitle(headline, fontsize=10)
    return _save(figure, path)


def _save(figure: Figure, path: Path) -> Path:
    """Write a picture whole or not at all."""
    import matplotlib.pyplot as plt

    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".partial{path.suffix}")
    figure.savefig(partial, dpi=130)
    partial.replace(path)
    plt.close(figure)
    return path
