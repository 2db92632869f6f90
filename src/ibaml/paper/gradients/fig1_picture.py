"""What does Figure 1 look like, with what the paper left out?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ibaml.report.figure import BLUE, GRAY, GREEN, INK, ORANGE, RED, VIOLET, blank

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from ibaml.paper.gradients.curves import Curves
    from ibaml.paper.gradients.fig1 import Settings

_RULES = {
    "explicit": ("explicit", INK, "-"),
    "lemma exact": ("implicit, lemma (the paper's)", RED, "-"),
    "energy exact": ("implicit, energy", BLUE, "-"),
    "ggn exact": ("implicit, ggn", GREEN, "--"),
}
_SOLVERS = {
    "exact": ("exact solve", BLUE, "-"),
    "plain": ("CG from 0", RED, "-"),
    "warm": ("CG from b/diag", ORANGE, "--"),
    "preconditioned": ("CG, preconditioned", GREEN, "-."),
}
_SPECTRA = {
    "one-small": (BLUE, "o"),
    "half-small": (ORANGE, "s"),
    "linear": (GREEN, "^"),
    "geometric": (VIOLET, "D"),
}
_TITLES = {
    "mc": "Monte Carlo, {samples} samples",
    "exact": "expectation in closed form",
}


def draw(curves: Curves, scan: Sequence[Mapping[str, Any]], settings: Settings) -> Figure:
    """Six panels: errors by Monte Carlo and in closed form, who is closer in how many seeds, CG
    with few steps for two curvatures, and what the crossing depends on."""
    figure = blank(15.0, 9.0)
    axes = figure.subplots(2, 3)
    for axis, expectation in zip(axes[0][:2], ("mc", "exact"), strict=True):
        title = _TITLES[expectation].format(samples=settings.samples)
        _errors(axis, curves, expectation, f"Error, {title}")
    _wins(axes[0][2], curves)
    for axis, kind in zip(axes[1][:2], ("lemma", "energy"), strict=True):
        _solvers(axis, curves, kind, settings.cg_steps)
    _crossings(axes[1][2], scan, settings)
    figure.suptitle(
        f"Meta-gradient error after K steps of adaptation, mean of {settings.seeds} seeds, bands "
        "10–90 % of them",
        fontsize=14,
    )
    figure.supxlabel(
        "The paper's set-up diverges as printed; the default one was found by scanning 480. Here: "
        f"spectrum of X {settings.spectrum!r} with condition number 20, σ_max = σ·√("
        f"{settings.stiffness:g}/α), query inputs {settings.queries!r}.",
        fontsize=9.5, color=GRAY,
    )  # fmt: skip
    return figure


def _steps(axis: Axes, steps: Sequence[int], title: str) -> None:
    axis.set_xscale("log")
    ticks = [k for k in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000) if k <= steps[-1]]
    axis.set_xticks(ticks, [str(k) for k in ticks])
    axis.minorticks_off()
    axis.set_xlim(1, max(steps[-1], 2))
    axis.set_xlabel("K, steps of adaptation")
    axis.set_title(title, fontsize=11)
    axis.grid(alpha=0.25)


def _lines(axis: Axes, steps: Sequence[int], ratio: np.ndarray, look: Any, band: bool) -> None:
    label, color, dash = look
    shown = [i for i, k in enumerate(steps) if k]
    x = [steps[i] for i in shown]
    if band:
        low, high = np.quantile(ratio[:, shown], [0.1, 0.9], axis=0)
        axis.fill_between(x, low, high, color=color, alpha=0.09, lw=0)
    axis.plot(x, ratio[:, shown].mean(0), dash, color=color, lw=1.9, label=label)


def _errors(axis: Axes, curves: Curves, expectation: str, title: str) -> None:
    for rule, look in _RULES.items():
        ratios = curves.ratio[expectation][rule]
        _lines(axis, curves.steps, ratios, look, band=rule != "ggn exact")
    axis.set_yscale("log")
    axis.axvline(5, color=GRAY, ls=":", lw=1.3)
    axis.annotate(
        "K = 5", (5, 0.02), xycoords=("data", "axes fraction"), xytext=(4, 0),
        textcoords="offset points", color=GRAY, fontsize=9,
    )  # fmt: skip
    axis.set_ylabel("NRMSE")
    _steps(axis, curves.steps, title)
    axis.legend(frameon=False, fontsize=9)


def _wins(axis: Axes, curves: Curves) -> None:
    """How many seeds have the implicit gradient closer to the oracle."""
    shown = [i for i, k in enumerate(curves.steps) if k]
    x = [curves.steps[i] for i in shown]
    for rule, name, color in (("lemma exact", "lemma", RED), ("energy exact", "energy", BLUE)):
        for expectation, dash in (("mc", "-"), ("exact", "--")):
            seeds = len(curves.ratio[expectation][rule])
            share = 100 * curves.wins(expectation, rule)[shown] / seeds
            label = f"{name}, {'Monte Carlo' if expectation == 'mc' else 'closed form'}"
            axis.plot(x, share, dash, color=color, lw=1.8, marker="o", ms=3.5, label=label)
    axis.set_ylim(-3, 103)
    axis.set_ylabel("% of seeds closer than explicit")
    _steps(axis, curves.steps, "Implicit (exact solve) closer than explicit")
    axis.legend(frameon=False, fontsize=9, loc="lower right")


def _solvers(axis: Axes, curves: Curves, kind: str, cg_steps: int) -> None:
    """Exact solve and CG of few steps; the gradient 0 has NRMSE 1."""
    for solver, look in _SOLVERS.items():
        ratios = curves.ratio["mc"][f"{kind} {solver}"]
        _lines(axis, curves.steps, ratios, look, band=solver in ("exact", "plain"))
    axis.axhline(1, color=GRAY, ls=":", lw=1.3)
    axis.annotate(
        "a gradient of zero", (0.015, 1), xycoords=("axes fraction", "data"), xytext=(0, -3),
        textcoords="offset points", color=GRAY, fontsize=8.5, va="top",
    )  # fmt: skip
    axis.set_yscale("log")
    axis.set_ylabel("NRMSE")
    coordinates = "(m, d)" if kind == "lemma" else "(m, ρ)"
    _steps(axis, curves.steps, f"L = {cg_steps} steps of CG: {kind}, in {coordinates}, Monte Carlo")
    axis.legend(frameon=False, fontsize=9)


def _crossings(axis: Axes, scan: Sequence[Mapping[str, Any]], settings: Settings) -> None:
    """The K where the paper's form overtakes explicit, by spectrum, scale and query inputs."""
    top = settings.scan_steps[-1]
    for spectrum, (color, marker) in _SPECTRA.items():
        for queries, dash in (("gaussian", "-"), ("aligned", "--")):
            rows = [r for r in scan if r["spectrum"] == spectrum and r["queries"] == queries]
            x = [r["stiffness"] for r in rows]
            y = [r["crossing of the means"] for r in rows]
            beyond = [(a, top * 1.12) for a, b in zip(x, y, strict=True) if b is None]
            axis.plot(
                x, [np.nan if b is None else b for b in y], dash, color=color, lw=1.6,
                marker=marker, ms=5, mfc=color if queries == "gaussian" else "white",
                label=f"{spectrum}, {queries}",
            )  # fmt: skip
            if beyond:
                axis.plot(*zip(*beyond, strict=True), "^", color=color, ms=7, clip_on=False)
    axis.axhline(5, color=GRAY, ls=":", lw=1.3)
    axis.set_xscale("log")
    axis.set_yscale("log")
    ticks = list(settings.scan_stiffness)
    axis.set_xticks(ticks, [f"{t:g}" for t in ticks])
    shown_steps = [k for k in (1, 2, 5, 10, 20, 30, 50) if k <= top]
    axis.set_yticks(shown_steps, [str(k) for k in shown_steps])
    axis.minorticks_off()
    axis.set_ylim(0.9, top * 4)
    axis.set_xlabel("α·σ_max(X)²/σ²  (descent diverges at 2)")
    axis.set_ylabel("K where lemma overtakes explicit")
    axis.set_title("What the crossing depends on (closed form)", fontsize=11)
    axis.grid(alpha=0.25)
    axis.legend(
        frameon=False, fontsize=8, ncols=2, loc="upper center",
        title="spectrum of X, query inputs (▲ beyond the steps)", title_fontsize=8,
    )  # fmt: skip
