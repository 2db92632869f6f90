"""How does a section get its drawing? Without matplotlib it has none, and shows the table."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from ibaml.extras import missing
from ibaml.report.inline import inline_svg

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def drawn(draw: Callable[[], Figure], name: str, label: str) -> str | None:
    """The drawing as part of a page; see `inline_svg`."""
    return None if missing("matplotlib") else inline_svg(draw(), name, label)
