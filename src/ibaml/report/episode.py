"""What is in one episode, and what did a learner predict?"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from ibaml.report.figure import BLUE, GRAY, GREEN, RED, blank, save


def draw_episode(
    support: Tensor,
    query: Tensor,
    names: Sequence[str],
    path: Path,
    headline: str,
    probabilities: Tensor | None = None,
) -> Path:
    """A picture of one episode: a column per class, support above, query below.

    Args:
        support, query: pixels in [0, 1], (ways, n, C, H, W).
        names: of the classes.
        probabilities: of the classes for every query, (ways, n, classes). Each query then shows its
            likeliest class and probability, with a green frame if that is right and a red one if
            not.
    """
    ways, shots = support.shape[:2]
    if probabilities is not None and (
        probabilities.shape[:-1] != query.shape[:2] or probabilities.shape[-1] < ways
    ):
        raise ValueError(
            f"probabilities must be (ways, queries, classes) = ({ways}, {query.shape[1]}, {ways} "
            f"or more), got {tuple(probabilities.shape)}"
        )
    rows = shots + query.shape[1]
    row_height = 1.25 if probabilities is None else 1.45
    figure = blank(1.5 * ways + 0.6, row_height * rows + 0.8)
    axes = figure.subplots(rows, ways, squeeze=False)
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
            color, width = (BLUE, 2.0) if r < shots else (GRAY, 0.8)
            if r >= shots and probabilities is not None:
                said = probabilities[w, r - shots]
                top = int(said.argmax())
                color, width, mark = (GREEN, 2.5, "✓") if top == w else (RED, 2.5, "✗")
                text = f"{mark} {top}: {100 * float(said[top]):.0f} %"
                axis.set_xlabel(text, color=color, fontsize=8, labelpad=2)
            for spine in axis.spines.values():
                spine.set_color(color)
                spine.set_linewidth(width)
    axes[0][0].set_ylabel("support", color=BLUE, fontsize=9)
    axes[shots][0].set_ylabel("query", color=GRAY, fontsize=9)
    figure.suptitle(headline, fontsize=10, parse_math=False)
    return save(figure, path)
