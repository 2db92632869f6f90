"""What do all pictures share? A blank figure, the colors, and how it is saved."""

from __future__ import annotations

from collections.abc import Iterator
from io import BytesIO
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING

from ibaml.extras import need
from ibaml.files import write_whole

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLUE, GRAY, RED, GREEN = "#1f5fa8", "#8a8a8a", "#c0392b", "#2e8b57"
ORANGE, VIOLET, INK = "#e08214", "#7b4fa3", "#222222"
SLATE, TEAL, BROWN = "#555555", "#17a2b8", "#b5651d"
_LINES = (BLUE, ORANGE, GREEN, RED, VIOLET, SLATE, TEAL, BROWN)
NAMES = {  # what a page calls the colors, which it has for light and for dark
    INK: "ink", GRAY: "gray", BLUE: "blue", ORANGE: "orange", GREEN: "green", RED: "red",
    VIOLET: "violet", SLATE: "slate", TEAL: "teal", BROWN: "brown",
}  # fmt: skip


def blank(width: float, height: float) -> Figure:
    """A new figure, size in inches, without a window and without changing the backend."""
    need("matplotlib")
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def line_styles() -> Iterator[tuple[str, str]]:
    """A color and a dash for each line, so that lines differ without color too."""
    return zip(cycle(_LINES), cycle(("-", "--", "-.", ":")), strict=False)


def line_names() -> Iterator[tuple[str, str]]:
    """As `line_styles`, with the names of the colors."""
    return ((NAMES[color], dash) for color, dash in line_styles())


def hide_frame(axis: Axes) -> None:
    """Hide all but the left and the bottom edge of an axis."""
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)


def save(figure: Figure, path: Path) -> Path:
    """Write a picture atomically."""
    kinds = figure.canvas.get_supported_filetypes()
    if path.suffix[1:].lower() not in kinds:
        raise ValueError(f"{path}: a picture's name ends in .{', .'.join(sorted(kinds))}")
    path.parent.mkdir(parents=True, exist_ok=True)
    drawn = BytesIO()
    figure.savefig(drawn, format=path.suffix[1:].lower(), dpi=130)
    write_whole(path, drawn.getvalue())
    return path
