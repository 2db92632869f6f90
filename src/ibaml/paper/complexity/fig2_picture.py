"""What does Figure 2 look like? Time and memory of the backward pass against K, on plain axes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ibaml.paper.complexity.picture import COLORS, MARKS, spread
from ibaml.paper.complexity.sweep import POINT_OF, label
from ibaml.report.figure import GRAY, blank, hide_frame

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from ibaml.paper.complexity.result import Measured

_PANELS = (("ms", "(a) time", "ms per task"), ("mb", "(b) memory", "peak MB per task"))


def draw(measured: Measured) -> Figure:
    """Two panels as in the paper, a curve per method and number of samples."""
    figure = blank(12.0, 4.6)
    axes = figure.subplots(1, len(_PANELS))
    for axis, (unit, title, across) in zip(axes, _PANELS, strict=True):
        _panel(axis, measured, unit)
        axis.set_title(f"{title} of the backward pass", fontsize=11)
        axis.set_xlabel(f"steps of adaptation K (implicit: L = {measured.sweep.fixed_cg_steps})")
        axis.set_ylabel(across)
    figure.suptitle(measured.headline, fontsize=12, parse_math=False)
    return figure


def _panel(axis: Axes, measured: Measured, unit: str) -> None:
    ends = []
    for method, samples in measured.curves():
        points = measured.along_steps(method, samples)
        if not points:
            continue
        ks = [p.arm.steps for p in points]
        ys = [float(getattr(p.backward, unit)) for p in points]
        few = method in POINT_OF and samples == min(measured.sweep.samples)
        dash = "--" if few and len(measured.sweep.samples) > 1 else "-"
        axis.plot(ks, ys, dash, color=COLORS[method], marker=MARKS[method], ms=4, lw=1.8)
        ends.append((ks[-1], ys[-1], label(method, samples), COLORS[method]))
    axis.set_xlim(0, None)
    axis.set_ylim(0, None)
    axis.set_xticks(measured.sweep.ks)
    axis.grid(alpha=0.25)
    hide_frame(axis)
    top = axis.get_ylim()[1]
    for (x, y, name, color), height in zip(
        ends, spread([y / top for _, y, _, _ in ends], 0.06), strict=True
    ):
        axis.annotate(
            name, (x, y), xytext=(1.03, height), textcoords="axes fraction", va="center",
            fontsize=9, color=color,
            arrowprops={"arrowstyle": "-", "color": GRAY, "lw": 0.5, "alpha": 0.5, "shrinkB": 3},
        )  # fmt: skip
