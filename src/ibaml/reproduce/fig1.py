"""Figure 1: how far is a meta-gradient from the true one after K steps of adaptation?

The error of explicit and implicit gradients against the closed-form oracle on the paper's linear
test, for three curvatures and four ways to solve H u = b, by Monte Carlo and with the expectation
in closed form; and how the K at which the paper's form overtakes the explicit gradient depends on
what the paper does not say: the spectrum of X, its scale, and the query inputs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np

from ibaml.curvature import KINDS, Curvature
from ibaml.linalg import ConjugateGradient, Dense, LinearSolver
from ibaml.reproduce.fig1_picture import draw
from ibaml.reproduce.folder import Numbers, Parts
from ibaml.reproduce.linear import SCANNED, LinearTest
from ibaml.reproduce.rules import explicit_gradient, implicit_gradient, slope_at
from ibaml.reproduce.study import Findings, Progress, Study
from ibaml.tasks.synthetic import QUERY_INPUTS, SPECTRA

EXPECTATIONS = ("mc", "exact")
EXPLICIT = "explicit"
_NEAR = 0.05  # two mean errors that differ by less are called the same


@dataclass(frozen=True)
class Settings:
    """``steps`` are the K; ``scan_…`` belong to the panel on the crossing."""

    seed: int = 0
    seeds: int = 30
    steps: tuple[int, ...] = (0, 1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 15, 20, 30, 50, 100, 200, 500)
    cg_steps: int = 2
    samples: int = 64
    dimension: int = 32
    stiffness: float = 0.5
    spectrum: str = "one-small"
    queries: str = "gaussian"
    scan_seeds: int = 10
    scan_steps: tuple[int, ...] = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 15, 20, 30)
    scan_stiffness: tuple[float, ...] = (0.1, 0.25, 0.5, 1.0, 1.5)

    def __post_init__(self) -> None:
        if self.seeds < 2 or self.scan_seeds < 2:
            raise ValueError("seeds and scan_seeds must be 2 or more: a spread is shown")
        for name in ("steps", "scan_steps"):
            if list(getattr(self, name)) != sorted(set(getattr(self, name))):
                raise ValueError(f"{name} must rise, got {getattr(self, name)}")

    def test(self, **changes: Any) -> LinearTest:
        chosen = {n: getattr(self, n) for n in ("samples", "stiffness", "spectrum", "queries")}
        return LinearTest(
            **{"dimension": self.dimension, "support": self.dimension, **chosen, **changes}
        )


QUICK = Settings(
    seeds=8,
    steps=(0, 1, 2, 3, 4, 5, 6, 7, 8, 10, 15, 20, 50, 200),
    scan_seeds=4,
    scan_steps=(1, 2, 3, 4, 5, 6, 8, 10, 15, 20),
    scan_stiffness=(0.25, 0.5, 1.0),
)


def linear_solvers(cg_steps: int) -> dict[str, LinearSolver]:
    """How H u = b is solved; the paper says L = 2 steps of CG and not from where."""
    return {
        "exact": Dense(),
        "plain": ConjugateGradient(cg_steps, precondition=False),
        "warm": ConjugateGradient(cg_steps, precondition=False, start="preconditioned"),
        "preconditioned": ConjugateGradient(cg_steps),
    }


def errors_of_a_task(
    test: LinearTest,
    steps: Sequence[int],
    solvers: dict[str, LinearSolver],
    kinds: Sequence[Any],
    *,
    seed: int,
    key: int,
    exact: bool,
) -> Numbers:
    """‖g − g*‖ of every rule after every K, and ‖g*‖."""
    batch = test.batch(seed, key)
    support, query = test.energies(batch, seed, exact)
    true = test.true_gradient(batch)
    errors: dict[str, list[float]] = {}
    for count in steps:
        v, g = explicit_gradient(support, query, test.descent(count))
        b = slope_at(support, query, v)
        found = {EXPLICIT: g}
        for kind in kinds:
            for name, solver in solvers.items():
                rule = f"{kind} {name}"
                found[rule] = implicit_gradient(support, v, b, Curvature(kind), solver)
        for rule, g in found.items():
            errors.setdefault(rule, []).append(float((g - true).norm()))
    return {"size": float(true.norm()), "errors": errors}


def crossing(steps: Sequence[int], ours: Iterable[float], theirs: Iterable[float]) -> float | None:
    """The first K ≥ 1 from which ``ours`` is the smaller error, between two K by the logarithm of
    their ratio; None where there is none among the steps."""
    pairs = [
        (k, math.log(a / b)) for k, a, b in zip(steps, ours, theirs, strict=True) if k and b > 0
    ]
    for i, (k, gap) in enumerate(pairs):
        if gap < 0:
            if i == 0:
                return float(k)
            before, above = pairs[i - 1]
            return before + (k - before) * above / (above - gap)
    return None


@dataclass(frozen=True)
class Curves:
    """Errors of all seeds: ``ratio[expectation][rule]`` is NRMSE by seed and K, ``pooled`` the
    root of the summed squares of all seeds over that of the oracle, ``size`` ‖g*‖ by seed."""

    steps: tuple[int, ...]
    size: np.ndarray
    ratio: dict[str, dict[str, np.ndarray]]
    pooled: dict[str, dict[str, np.ndarray]]

    @classmethod
    def of(cls, steps: tuple[int, ...], found: dict[str, list[Numbers]]) -> Curves:
        ratio: dict[str, dict[str, np.ndarray]] = {}
        pooled: dict[str, dict[str, np.ndarray]] = {}
        for expectation, tasks in found.items():
            size = np.array([[task["size"]] for task in tasks])
            for rule in tasks[0]["errors"]:
                error = np.array([task["errors"][rule] for task in tasks])
                ratio.setdefault(expectation, {})[rule] = error / size
                total = (error**2).sum(0) / (size**2).sum()
                pooled.setdefault(expectation, {})[rule] = np.sqrt(total)
        return cls(steps, size[:, 0], ratio, pooled)

    def wins(self, expectation: str, rule: str) -> np.ndarray:
        """In how many seeds a rule is closer than the explicit gradient, by K."""
        found = self.ratio[expectation]
        return np.asarray((found[rule] < found[EXPLICIT]).sum(0))


def run(settings: Settings, parts: Parts, progress: Progress) -> Findings:
    jobs = [(e, key) for key in range(settings.seeds) for e in EXPECTATIONS]
    scan = list(_scan_cells(settings))
    total = len(jobs) + len(scan) * settings.scan_seeds
    solvers, test, done = linear_solvers(settings.cg_steps), settings.test(), 0
    found: dict[str, list[Numbers]] = {e: [] for e in EXPECTATIONS}
    for expectation, key in jobs:
        progress(done, total, f"seed {key}, {expectation}")
        chosen: dict[str, Any] = {
            "steps": settings.steps, "seed": settings.seed, "key": key,
            "exact": expectation == "exact",
        }  # fmt: skip
        found[expectation].append(
            parts(
                {"part": "curves", "cg_steps": settings.cg_steps, **asdict(test), **chosen},
                partial(errors_of_a_task, test, solvers=solvers, kinds=KINDS, **chosen),
            )
        )
        done += 1
    curves = Curves.of(settings.steps, found)
    rows = []
    for cell in scan:
        progress(done, total, f"crossing: {cell.spectrum}, {cell.queries}, {cell.stiffness:g}")
        rows.append(_scan(settings, cell, parts))
        done += settings.scan_seeds
    progress(done, total, "drawing")
    return _findings(settings, curves, rows)


def _scan_cells(settings: Settings) -> Iterator[LinearTest]:
    for spectrum in SPECTRA:
        for queries in QUERY_INPUTS:
            for stiffness in settings.scan_stiffness:
                yield settings.test(spectrum=spectrum, queries=queries, stiffness=stiffness)


def _scan(settings: Settings, test: LinearTest, parts: Parts) -> dict[str, Any]:
    """Where the paper's form overtakes the explicit gradient in one set-up, in closed form."""
    tasks = []
    for key in range(settings.scan_seeds):
        chosen: dict[str, Any] = {"steps": settings.scan_steps, "seed": settings.seed, "key": key}
        tasks.append(
            parts(
                {"part": "scan", **asdict(test), **chosen},
                partial(
                    errors_of_a_task,
                    test,
                    solvers={"exact": Dense()},
                    kinds=("lemma", "energy"),
                    exact=True,
                    **chosen,
                ),
            )
        )
    curves = Curves.of(settings.scan_steps, {"exact": tasks})
    ratio, steps = curves.ratio["exact"], settings.scan_steps
    mean = {rule: found.mean(0) for rule, found in ratio.items()}
    each = [
        crossing(steps, a, b)
        for a, b in zip(ratio["lemma exact"], ratio[EXPLICIT], strict=True)
    ]  # fmt: skip
    return {
        "spectrum": test.spectrum,
        "queries": test.queries,
        "stiffness": test.stiffness,
        "seeds": len(tasks),
        "crossing of the means": crossing(steps, mean["lemma exact"], mean[EXPLICIT]),
        **_spread_of(each),
        "energy below explicit, share of K": float(
            (mean["energy exact"] < mean[EXPLICIT]).mean()
        ),
    }  # fmt: skip


def _spread_of(crossings: Sequence[float | None]) -> dict[str, float | None]:
    """Quartiles of crossings, None where they lie beyond the steps."""
    values = [math.inf if c is None else c for c in crossings]
    found = np.quantile(values, [0.25, 0.5, 0.75], method="nearest")
    names = ("lower quartile", "median", "upper quartile")
    return {
        n: float(q) if math.isfinite(q) else None for n, q in zip(names, found, strict=True)
    }  # fmt: skip


def _findings(
    settings: Settings, curves: Curves, scan: list[dict[str, Any]]
) -> Findings:  # fmt: skip
    numbers = _numbers(settings, curves)
    agrees, differs = _judged(settings, curves, numbers)
    return Findings(
        setup=_setup(settings),
        agrees=agrees,
        differs=differs,
        numbers={**numbers, "scan": scan},
        tables={
            "fig1": _summary_rows(curves),
            "fig1_seeds": _seed_rows(curves),
            "fig1_crossing": scan,
        },
        pictures={"fig1": partial(draw, curves, scan, settings)},
    )


def _summary_rows(curves: Curves) -> list[dict[str, Any]]:
    rows = []
    for expectation, rules in curves.ratio.items():
        for rule, ratio in rules.items():
            low, middle, high = np.quantile(ratio, [0.1, 0.5, 0.9], axis=0)
            wins = curves.wins(expectation, rule)
            for i, k in enumerate(curves.steps):
                rows.append(
                    {
                        "expectation": expectation,
                        "rule": rule,
                        "K": k,
                        "mean": float(ratio[:, i].mean()),
                        "standard deviation": float(ratio[:, i].std(ddof=1)),
                        "10 %": float(low[i]),
                        "median": float(middle[i]),
                        "90 %": float(high[i]),
                        "pooled": float(curves.pooled[expectation][rule][i]),
                        "seeds": len(ratio),
                        "closer than explicit": int(wins[i]),
                    }
                )
    return rows


def _seed_rows(curves: Curves) -> list[dict[str, Any]]:
    return [
        {"expectation": e, "rule": rule, "seed": key, "K": k, "NRMSE": float(ratio[key, i])}
        for e, rules in curves.ratio.items()
        for rule, ratio in rules.items()
        for key in range(len(ratio))
        for i, k in enumerate(curves.steps)
    ]


def _numbers(settings: Settings, curves: Curves) -> dict[str, Any]:
    """The figures that the sentences rest on, for both expectations."""
    numbers: dict[str, Any] = {}
    positive = [i for i, k in enumerate(curves.steps) if k]
    for e in EXPECTATIONS:
        ratio, pooled = curves.ratio[e], curves.pooled[e]
        mean = {rule: found.mean(0) for rule, found in ratio.items()}
        each = [
            crossing(curves.steps, a, b)
            for a, b in zip(ratio["lemma exact"], ratio[EXPLICIT], strict=True)
        ]
        lost = len(ratio[EXPLICIT]) - curves.wins(e, "energy exact")
        ever = (ratio["energy exact"] >= ratio[EXPLICIT])[:, positive].any(1)
        numbers[e] = {
            "lemma crosses explicit, means": crossing(
                curves.steps, mean["lemma exact"], mean[EXPLICIT]
            ),
            "lemma crosses explicit, pooled": crossing(
                curves.steps, pooled["lemma exact"], pooled[EXPLICIT]
            ),
            "lemma crosses explicit, single seeds": _spread_of(each),
            "energy above explicit in the mean at K": [
                curves.steps[i] for i in positive if mean["energy exact"][i] >= mean[EXPLICIT][i]
            ],
            "seeds in which energy is not below explicit, by K": {
                str(curves.steps[i]): int(lost[i]) for i in positive if lost[i]
            },
            "median size of the true gradient, those seeds and all": [
                float(np.median(curves.size[ever])) if ever.any() else None,
                float(np.median(curves.size)),
            ],
            "mean NRMSE at the last K": {rule: float(m[-1]) for rule, m in mean.items()},
        }
    return numbers


def _setup(settings: Settings) -> list[str]:
    test = settings.test()
    return [
        f"Linear regression, d = {test.dimension}, σ = {test.noise}, condition number "
        f"{test.condition:g}, {test.support} support and {test.query} query examples; prior mean 0 "
        f"and variance 1; K steps of descent on (m, ρ) with α = {test.rate} on the summed loss.",
        f"X: spectrum {test.spectrum!r}, α·σ_max²/σ² = {test.stiffness:g}, so σ_max = "
        f"{test.noise * math.sqrt(test.stiffness / test.rate):.4f}; query inputs {test.queries!r}.",
        SCANNED,
        f"{test.samples} Monte-Carlo samples, kept during adaptation, fresh for the meta-loss "
        "(mc); or the expectation in closed form, by noise with exact moments (exact).",
        "NRMSE: ‖g − g*‖/‖g*‖ in (m, ρ) with g* from the closed-form optimum, the exact one in "
        f"both cases; mean over {settings.seeds} seeds, bands from 10 to 90 % of them.",
        f"CG: L = {settings.cg_steps} steps, from 0 (plain), from b/diag (warm), or preconditioned "
        "by the prior's diagonal; in (m, d) for lemma, in (m, ρ) for energy and ggn.",
        f"Crossing: closed form, exact solve, {settings.scan_seeds} seeds a point.",
    ]


def _judged(
    settings: Settings, curves: Curves, numbers: dict[str, Any]
) -> tuple[list[str], list[str]]:
    """What agrees with the paper and what does not, in the figures of this run."""
    agrees: list[str] = []
    differs: list[str] = []
    for e, name in (("mc", "Monte Carlo"), ("exact", "closed form")):
        found = numbers[e]
        at = found["lemma crosses explicit, means"]
        text = f"{name}: the paper's form, solved exactly, overtakes the explicit gradient at K = "
        if at is None:
            differs.append(f"{name}: the paper's form does not overtake the explicit gradient.")
        else:
            each = found["lemma crosses explicit, single seeds"]
            text += f"{at:.1f} in the mean ({_k(found['lemma crosses explicit, pooled'])} pooled; "
            text += f"single seeds: median {_k(each['median'])}, quartiles "
            text += f"{_k(each['lower quartile'])} and {_k(each['upper quartile'])}). Paper: 5."
            (agrees if 3 <= at <= 7 else differs).append(text)
        above = found["energy above explicit in the mean at K"]
        text = f"{name}: with nothing substituted (energy, exact solve) "
        if above:
            text += "the mean is above explicit's at K = " + ", ".join(map(str, above))
            text += ", and below at every other K ≥ 1."
        else:
            text += "there is no crossing: the mean is below explicit's at every K ≥ 1."
        lost = found["seeds in which energy is not below explicit, by K"]
        text += f" Seeds in which it is not: {_listed(lost, settings.seeds) if lost else 'none'}."
        some, every = found["median size of the true gradient, those seeds and all"]
        if some is not None:
            text += f" They have a small true gradient: median ‖g*‖ {some:.0f}, of all seeds "
            text += f"{every:.0f}."
        differs.append(text)
    last = numbers["mc"]["mean NRMSE at the last K"]
    k, length = curves.steps[-1], settings.cg_steps
    mean = {rule: found.mean(0) for rule, found in curves.ratio["mc"].items()}
    first = min(5, k)
    plain = mean["lemma plain"][[i for i, s in enumerate(curves.steps) if s >= first]]
    differs.append(
        f"“L = {length} suffices” does not hold for CG from zero: lemma plain stays between "
        f"{plain.min():.2f} and {plain.max():.2f} for all K ≥ {first} (at K = {k}: "
        f"{last['lemma plain']:.2f}, exact solve {last['lemma exact']:.2f})."
    )
    for e, name in (("mc", "Monte Carlo"), ("exact", "closed form")):
        found = numbers[e]["mean NRMSE at the last K"]
        for solver, words in (("warm", "from b/diag"), ("preconditioned", "preconditioned")):
            near = found[f"lemma {solver}"] - found["lemma exact"] <= _NEAR
            (agrees if near else differs).append(
                f"{name}: “L = {length} suffices” {'holds' if near else 'does not hold'} for lemma "
                f"with CG {words}: {found[f'lemma {solver}']:.3f} at K = {k}, exact solve "
                f"{found['lemma exact']:.3f}."
            )
    agrees.append(
        "Errors fall as K grows, explicit and implicit: in the mean from "
        f"{mean[EXPLICIT][0]:.2f} and {mean['lemma exact'][0]:.2f} at K = {curves.steps[0]} to "
        f"{last[EXPLICIT]:.2f} and {last['lemma exact']:.2f} at K = {k}."
    )
    return agrees, differs


def _k(value: float | None) -> str:
    return "never" if value is None else f"{value:.1f}"


def _listed(lost: dict[str, int], seeds: int) -> str:
    return ", ".join(f"{count} of {seeds} at K = {k}" for k, count in lost.items())


STUDY = Study("fig1", "Figure 1: gradient error on synthetic data", Settings(), QUICK, run)
