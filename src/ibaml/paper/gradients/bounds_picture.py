"""What do the errors, their terms and their bounds look like, side by side?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ibaml.report.figure import BLUE, GRAY, GREEN, INK, ORANGE, RED, blank

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from ibaml.parts import Numbers

_AGAINST_K = {
    "explicit error": ("explicit error", INK, "o-"),
    "implicit error": ("implicit error, exact solve", RED, "o-"),
    "eps": ("ε", BLUE, "--"),
    "delta": ("δ", ORANGE, "--"),
    "explicit bound": ("Theorem 1", INK, ":"),
    "implicit bound": ("Theorem 2", RED, ":"),
    "implicit bound, Remark 3": ("Theorem 2, Remark 3", GREEN, ":"),
}
_TITLES = {
    "linear": "linear, descent",
    "linear, natural": "linear, natural descent",
    "mlp": "MLP, descent",
}


def draw(cells: Mapping[str, Sequence[Numbers]], numbers: Mapping[str, Any]) -> Figure:
    """A row per model: errors, terms and bounds against K and L, and errors against the terms."""
    figure = blank(15.5, 4.2 * len(cells) + 0.8)
    axes = figure.subplots(len(cells), 3, squeeze=False)
    for line, (model, tasks) in zip(axes, cells.items(), strict=True):
        _against_steps(line[0], tasks, _TITLES[model])
        _against_solves(line[1], tasks, _TITLES[model])
        _against_terms(line[2], tasks, numbers[model], _TITLES[model])
    seeds = len(next(iter(cells.values())))
    figure.suptitle(
        f"Meta-gradient errors and the bounds of Theorems 1 and 2, in (m, d); medians over {seeds} "
        "seeds, errors and bounds over ‖g*‖",
        fontsize=14,
    )
    return figure


def _median(tasks: Sequence[Numbers], where: str, name: str) -> np.ndarray:
    """The median over seeds, row by row; missing values are NaN."""
    relative = "error" in name or "bound" in name or name == "delta'"
    rows = [
        [
            np.nan if row.get(name) is None else row[name] / (task["size"] if relative else 1)
            for row in task[where]
        ]
        for task in tasks
    ]
    values = np.array(rows)
    return np.asarray(np.median(values, axis=0))


def _finish(axis: Axes, title: str, x: str, y: str = "") -> None:
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set_title(title, fontsize=11)
    axis.set_xlabel(x)
    axis.set_ylabel(y)
    axis.grid(alpha=0.25)


def _against_steps(axis: Axes, tasks: Sequence[Numbers], title: str) -> None:
    steps = np.array([row["K"] for row in tasks[0]["rows"]])
    for name, (label, color, dash) in _AGAINST_K.items():
        y = _median(tasks, "rows", name)
        wide = 4 if name == "explicit bound" else 1.7  # Theorem 2's lies on it
        axis.plot(steps[1:], y[1:], dash, color=color, lw=wide, ms=3.5, label=label)
    _finish(axis, f"{title}: against K", "K, steps of adaptation", "error or bound / ‖g*‖; ε; δ")
    axis.set_xticks([k for k in (1, 4, 16, 64, 256, 1024, 4096) if k <= steps[-1]])
    axis.xaxis.set_major_formatter("{x:g}")
    axis.minorticks_off()
    low, high = axis.get_ylim()
    axis.set_ylim(low * 1e-5, high)  # room for the legend
    axis.legend(frameon=False, fontsize=8, loc="lower left")


def _against_solves(axis: Axes, tasks: Sequence[Numbers], title: str) -> None:
    places = list(dict.fromkeys(row["K"] for row in tasks[0]["solves"]))
    shades = [ORANGE, BLUE, RED][-len(places) :]
    for place, color in zip(places, shades, strict=True):
        chosen = [
            {**task, "solves": [r for r in task["solves"] if r["K"] == place]} for task in tasks
        ]
        x = [row["L"] for row in chosen[0]["solves"]]
        at = "at the optimum" if place == "solved" else f"after K = {place}"
        y = _median(chosen, "solves", "implicit error")
        axis.plot(x, y, "o-", color=color, lw=1.7, ms=3.5, label=f"implicit error {at}")
        if place == "solved":
            for name, label, dash in (("delta'", "δ′ there", "--"), (
                "implicit bound", "Theorem 2 there", ":")):  # fmt: skip
                y = _median(chosen, "solves", name)
                axis.plot(x, y, dash, color=color, lw=1.7, label=label)
    _finish(axis, f"{title}: against L", "L, steps of plain CG", "error, bound, δ′ / ‖g*‖")
    axis.set_xticks([n for n in (1, 2, 4, 8, 16, 32, 64) if n <= x[-1]])
    axis.xaxis.set_major_formatter("{x:g}")
    axis.minorticks_off()
    axis.legend(frameon=False, fontsize=8, loc="lower left")


def _against_terms(
    axis: Axes, tasks: Sequence[Numbers], numbers: Mapping[str, Any], title: str
) -> None:  # fmt: skip
    """The implicit error against ε (exact solve) and against δ′ (at the optimum)."""
    solved = [
        {**task, "rows": [r for r in task["solves"] if r["K"] == "solved"]} for task in tasks
    ]  # fmt: skip
    for term, chosen, name, color in (
        ("eps", tasks, "ε, exact solve", BLUE),
        ("delta'", solved, "δ′, at the optimum", ORANGE),
    ):
        x, y = [], []
        for task in chosen:
            top = max(row[term] for row in task["rows"])
            for row in task["rows"]:
                if row["implicit error"] > 1e-11 * task["size"]:
                    x.append(row[term] / top)
                    y.append(row["implicit error"] / task["size"])
        slope = numbers[f"slope in {term}"]
        label = f"{name}" + ("" if slope is None else f": slope {slope['median']:.2f}")
        axis.plot(x, y, "o", color=color, ms=3.5, alpha=0.6, label=label)
    guide = np.array([1e-11, 1.0])
    for scale in (1e-3, 1.0, 1e3):
        axis.plot(guide, scale * guide, ":", color=GRAY, lw=1, zorder=0)
    _finish(axis, f"{title}: the error against its terms", "term / its largest value",
            "implicit error / ‖g*‖")  # fmt: skip
    axis.set_xlim(1e-12, 2)
    axis.legend(frameon=False, fontsize=8, loc="upper left", title="dotted: slope 1",
                title_fontsize=8)  # fmt: skip
