"""How do time and memory of the meta-gradient grow with K, and with L?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import log
from pathlib import Path
from typing import TYPE_CHECKING

from ibaml.paper.complexity.result import Cost, Measured, Point
from ibaml.paper.complexity.sweep import IMPLICIT_OF, POINT_OF, label
from ibaml.report.figure import BLUE, GRAY, RED, blank, hide_frame, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# explicit methods are warm, implicit ones cold; the deterministic ones paler
COLORS = {"maml": "#e8924a", "abml": RED, "imaml": "#5fa8d3", "ibaml": BLUE}
_DASHES = ("-", "--", "-.", ":")
MARKS = {"maml": "s", "abml": "D", "imaml": "o", "ibaml": "o"}
_GAP = 0.065  # between labels, in heights of a panel


@dataclass(frozen=True)
class _Curve:
    name: str
    method: str
    dash: str
    xs: list[int]
    costs: list[Cost]
    pale: bool = False


def draw_complexity(measured: Measured, path: Path, headline: str | None = None) -> Path:
    """Draw and save `complexity_figure`."""
    return save(complexity_figure(measured, headline), path)


def complexity_figure(measured: Measured, headline: str | None = None) -> Figure:
    """Time above, memory below; the backward pass against K (the paper's Figure 2), the whole
    meta-gradient against K, the backward pass against L. Both axes are logarithmic."""
    sweep = measured.sweep
    panels = [
        (f"backward (L = {sweep.fixed_cg_steps})", "steps of adaptation K",
         _over_steps(measured, lambda p: p.backward)),
        (f"forward and backward together (L = {sweep.fixed_cg_steps})", "steps of adaptation K",
         _over_steps(measured, lambda p: p.together)),
        (f"backward (K = {sweep.fixed_steps}); pale: explicit, K = L", "CG steps L",
         _over_cg_steps(measured)),
    ]  # fmt: skip
    panels = [panel for panel in panels if panel[2]]
    if not panels:
        raise ValueError("nothing to draw: no point of the measurement has costs")
    figure = blank(4.7 * len(panels) + 0.4, 7.6)
    axes = figure.subplots(2, len(panels), squeeze=False)
    for column, (title, across, curves) in enumerate(panels):
        _panel(axes[0][column], curves, lambda cost: cost.ms, "ms per task")
        _panel(axes[1][column], curves, lambda cost: cost.mb, "peak MB per task")
        axes[0][column].set_title(title, fontsize=10.5)
        axes[1][column].set_xlabel(across)
    figure.suptitle(headline or measured.headline, fontsize=12, parse_math=False)
    return figure


def _dash(measured: Measured, method: str, samples: int) -> str:
    if method not in POINT_OF:
        return "-"
    return _DASHES[measured.sweep.samples.index(samples) % len(_DASHES)]


def _curve(
    measured: Measured,
    method: str,
    samples: int,
    points: Sequence[tuple[int, Cost | None]],
    pale: bool = False,
) -> list[_Curve]:
    """The curve of the points that have a cost; no curve if there are none."""
    measured_points = [(x, cost) for x, cost in points if cost is not None]
    if not measured_points:
        return []
    xs, costs = (list(part) for part in zip(*measured_points, strict=True))
    name = label(method, samples)
    return [_Curve(name, method, _dash(measured, method, samples), xs, costs, pale)]


def _over_steps(measured: Measured, cost: Callable[[Point], Cost | None]) -> list[_Curve]:
    return [
        curve
        for method, samples in measured.curves()
        for curve in _curve(
            measured,
            method,
            samples,
            [(p.arm.steps, cost(p)) for p in measured.along_steps(method, samples)],
        )
    ]


def _over_cg_steps(measured: Measured) -> list[_Curve]:
    """Implicit curves over L; the explicit ones, pale, at K = L beside them."""
    curves: list[_Curve] = []
    most = max(measured.sweep.ls)
    for method, samples in measured.curves():
        pale = method in IMPLICIT_OF
        points = (
            [(p.arm.steps, p.backward) for p in measured.along_steps(method, samples)]
            if pale
            else [
                (p.arm.cg_steps or 0, p.backward) for p in measured.along_cg_steps(method, samples)
            ]
        )
        curves += _curve(measured, method, samples, [p for p in points if p[0] <= most], pale)
    return curves if any(not curve.pale for curve in curves) else []


def _panel(
    axis: Axes, curves: Sequence[_Curve], value: Callable[[Cost], float], across: str
) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

    for curve in curves:
        axis.plot(
            curve.xs, [value(c) for c in curve.costs], curve.dash, color=COLORS[curve.method],
            marker=MARKS[curve.method], ms=3.5, lw=1.7, alpha=0.35 if curve.pale else 1.0,
        )  # fmt: skip
    axis.set_xscale("log")
    axis.set_yscale("log")
    xs = sorted({x for curve in curves for x in curve.xs})
    axis.set_xticks(xs, [str(x) for x in xs])
    axis.xaxis.set_minor_locator(NullLocator())
    low, high = (end(value(c) for curve in curves for c in curve.costs) for end in (min, max))
    reach = max(high / low, 10.0) ** 0.08
    axis.set_ylim(low / reach, high * reach)
    axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:,g}"))
    axis.yaxis.set_minor_formatter(NullFormatter())
    axis.set_ylabel(across)
    axis.grid(alpha=0.25)
    hide_frame(axis)
    _label_ends(axis, [(c, c.xs[-1], value(c.costs[-1])) for c in curves])


def _label_ends(axis: Axes, ends: Sequence[tuple[_Curve, int, float]]) -> None:
    """Write each curve's name right of its end, moved apart if two would overlap."""
    low, high = axis.get_ylim()
    heights = [log(y / low) / log(high / low) for _, _, y in ends]
    for (curve, x, y), height in zip(ends, spread(heights, _GAP), strict=True):
        color = COLORS[curve.method]
        axis.annotate(
            curve.name, (x, y), xytext=(1.05, height), textcoords="axes fraction", va="center",
            fontsize=8.5, color=color, alpha=0.6 if curve.pale else 1.0,
            arrowprops={"arrowstyle": "-", "color": GRAY, "lw": 0.5, "alpha": 0.5,
                        "shrinkA": 1, "shrinkB": 3},
        )  # fmt: skip


def spread(heights: Sequence[float], gap: float) -> list[float]:
    """Heights in order, moved as little as possible so that no two are nearer than the gap."""
    order = sorted(range(len(heights)), key=lambda i: heights[i])
    groups: list[list[int]] = []
    centers: list[float] = []
    for i in order:
        groups.append([i])
        centers.append(heights[i])
        while len(groups) > 1 and (
            centers[-1] - centers[-2] < gap * (len(groups[-1]) + len(groups[-2])) / 2
        ):
            merged = groups[-2] + groups[-1]
            groups[-2:] = [merged]
            centers[-2:] = [sum(heights[j] for j in merged) / len(merged)]
    positions = list(heights)
    for group, center in zip(groups, centers, strict=True):
        for place, i in enumerate(group):
            positions[i] = center + gap * (place - (len(group) - 1) / 2)
    return positions
