"""Theorems 1 and 2: do the errors of meta-gradients stay below their bounds, and follow them?

For a linear model and for a multilayer perceptron, against the steps of adaptation K and of the
linear solve L.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import numpy as np

from ibaml.paper.gradients.bounds_picture import draw
from ibaml.paper.gradients.linear import SCANNED
from ibaml.paper.gradients.terms import PROBLEMS, SOLVED, Problem, Settings, cell
from ibaml.paper.study import Findings, Progress, Study
from ibaml.parts import Numbers, Parts

QUICK = Settings(
    seeds=2,
    steps=(0, 1, 4, 16, 64, 256, 512, 1024, 2048),
    jacobian_steps=64,
    points=3,
)


def log_slope(terms: Sequence[float], errors: Sequence[float]) -> float | None:
    """The slope of log error against log term; None for fewer than three points."""
    if len(terms) < 3:
        return None
    x, y = np.log(terms), np.log(errors)
    return float(np.polyfit(x, y, 1)[0])


def slopes(errors: Numbers) -> dict[str, float | None]:
    """The slopes where each term dominates, once it fell tenfold: ε with an exact solve, δ′ at the
    optimum. Errors below 1e-11 of the gradient are left out as rounding."""
    solves = [r for r in errors["solves"] if r["K"] == SOLVED]
    slope = {}
    for term, rows in (("eps", errors["rows"]), ("delta'", solves)):
        top = max(r[term] for r in rows)
        usable = [
            r for r in rows if r[term] <= 0.1 * top and r["implicit error"] > 1e-11 * errors["size"]
        ]
        slope[term] = log_slope([r[term] for r in usable], [r["implicit error"] for r in usable])
    return slope


def _cell_of(make: Callable[[Settings, int], Problem], settings: Settings, key: int) -> Numbers:
    return cell(make(settings, key), settings)


def run(settings: Settings, parts: Parts, progress: Progress) -> Findings:
    total = len(PROBLEMS) * settings.seeds
    cells: dict[str, list[Numbers]] = {}
    own = {k: v for k, v in asdict(settings).items() if k != "seeds"}
    for name, make in PROBLEMS.items():
        for key in range(settings.seeds):
            done = sum(map(len, cells.values()))
            progress(done, total, f"{name}, seed {key}")
            cells.setdefault(name, []).append(
                parts(
                    {"part": name, "key": key, **own},
                    partial(_cell_of, make, settings, key),
                )
            )
    progress(total, total, "drawing")
    return _findings(settings, cells)


def _findings(settings: Settings, cells: dict[str, list[Numbers]]) -> Findings:
    numbers = {name: _numbers(tasks) for name, tasks in cells.items()}
    agrees, differs = _judged(numbers)
    return Findings(
        setup=_setup(settings),
        agrees=agrees,
        differs=differs,
        numbers=numbers,
        tables={"bounds": _step_rows(cells), "bounds_solves": _solve_rows(cells)},
        pictures={"bounds": partial(draw, cells, numbers)},
    )


def _step_rows(cells: dict[str, list[Numbers]]) -> list[dict[str, Any]]:
    names = ("explicit error", "implicit error", "eps", "delta", "explicit bound",
             "implicit bound", "explicit bound, Remark 3", "implicit bound, Remark 3")  # fmt: skip
    return [
        {
            "model": model,
            "seed": key,
            "K": row["K"],
            **{name: row.get(name) for name in names},
            **{f"constant {n}": value for n, value in row["constants"].items()},
        }
        for model, tasks in cells.items()
        for key, task in enumerate(tasks)
        for row in task["rows"]
    ]


def _solve_rows(cells: dict[str, list[Numbers]]) -> list[dict[str, Any]]:
    return [
        {"model": model, "seed": key, **row}
        for model, tasks in cells.items()
        for key, task in enumerate(tasks)
        for row in task["solves"]
    ]


CASES = {
    "Theorem 1": ("explicit", "rows"),
    "Theorem 2, exact solve": ("implicit", "rows"),
    "Theorem 2, L steps of CG": ("implicit", "unsolved"),
    "Theorem 2, L steps of CG at the optimum": ("implicit", SOLVED),
}


def ratios(task: Numbers, case: str) -> list[float]:
    """Bound over error, for errors above 1e-9 of the gradient (below is rounding)."""
    which, where = CASES[case]
    rows = task["rows"]
    if where != "rows":
        rows = [r for r in task["solves"] if (r["K"] == SOLVED) == (where == SOLVED)]
    pairs = [(r.get(f"{which} error"), r.get(f"{which} bound")) for r in rows]
    return [b / e for e, b in pairs if e is not None and e > 1e-9 * task["size"]]


def _numbers(tasks: Sequence[Numbers]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for case in CASES:
        values = [r for task in tasks for r in ratios(task, case)]
        spread = {**(_spread(values) or {}), "violations": sum(r < 1 for r in values)}
        out[f"{case}: bound over error"] = spread
    each = [slopes(task) for task in tasks]
    for term in ("eps", "delta'"):
        out[f"slope in {term}"] = _spread([s for values in each if (s := values[term]) is not None])
    return out


def _spread(values: Sequence[float]) -> dict[str, float] | None:
    if not values:
        return None
    least, most = min(values), max(values)
    return {
        "least": least, "median": float(np.median(values)), "most": most, "points": len(values)
    }  # fmt: skip


def _setup(settings: Settings) -> list[str]:
    return [
        f"linear: the task of Figure 1 (d = {settings.dimension}), expectation in closed form. "
        + SCANNED,
        "mlp: sinusoids, 10 support and 20 query examples, tanh network 1–5–1, prior variance "
        "e⁻², noise 0.5, 8 antithetic samples, descent with rate 0.1 on the mean loss.",
        "Coordinates (m, d), the paper's summed loss with κ = 1, Lemma 1's H and G, the meta-loss "
        "the mean query nll (so C = 0). v̂: K steps of descent on (m, ρ). The optimum: Newton to "
        "rounding (mlp: the minimum that descent tends to). g*: closed form (linear), the implicit "
        "gradient at the optimum (mlp).",
        f"Constants: A, B, D, E are the largest values at {settings.points} points between v̂ and "
        "the optimum and between the two, σ_t and ρ_t are computed at both. For the linear model "
        "these are exact (constant Hessians, E = 0), for the network estimates from below.",
        "Remark 3: the largest constants over all K in place of each K's own. A Gaussian nll is "
        "not Lipschitz everywhere; it is where adaptation goes.",
        f"δ up to K = {settings.jacobian_steps}. CG: plain, from zero. {settings.seeds} seeds.",
        "Slopes of log error: against ε where it fell tenfold and the solve is exact, against δ′ "
        "at the optimum.",
    ]


_STEEPER = (
    "It falls faster than its bound: in the linear model Lemma 1's H, G and b do not depend on the "
    "task's variances, and their error is most of ε under plain descent. Under natural descent "
    "(linear, natural) the variances converge first."
)


def _judged(numbers: dict[str, Any]) -> tuple[list[str], list[str]]:
    agrees: list[str] = []
    differs: list[str] = []
    for model, summary in numbers.items():
        for case in CASES:
            r = summary[f"{case}: bound over error"]
            if "points" not in r:
                continue
            text = f"{model}, {case}: {r['violations']} of {r['points']} errors exceed the bound; "
            text += f"bound over error {r['least']:.1e} to {r['most']:.1e}, median "
            text += f"{r['median']:.1e}."
            (differs if r["violations"] else agrees).append(text)
        for term, name in (("eps", "ε"), ("delta'", "δ′")):
            s = summary[f"slope in {term}"]
            if s is None:
                continue
            text = f"{model}: where {name} dominates, the implicit error's slope in it is "
            text += f"{s['median']:.3f} ({s['least']:.3f} to {s['most']:.3f} over seeds)."
            if model == "linear" and term == "eps" and s["least"] > 1.1:
                agrees.append(f"{text} {_STEEPER}")
            else:
                near = abs(s["least"] - 1) <= 0.1 and abs(s["most"] - 1) <= 0.1
                (agrees if near else differs).append(text)
    loose = min(f["Theorem 2, exact solve: bound over error"]["least"] for f in numbers.values())
    differs.append(
        "As numbers the bounds say little where ε counts: Theorem 2's is at least "
        f"{loose:.1e} times the error. What they do say is the order: errors fall with ε, δ, δ′."
    )
    return agrees, differs


STUDY = Study("bounds", "Theorems 1 and 2: errors and their bounds", Settings(), QUICK, run)
