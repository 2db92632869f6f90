"""What are the errors of one task's meta-gradients after K steps, and where do two curves cross?"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ibaml.curvature import Curvature
from ibaml.linalg import ConjugateGradient, Dense, LinearSolver
from ibaml.paper.gradients.linear import LinearTest
from ibaml.paper.gradients.rules import explicit_gradient, implicit_gradient, slope_at
from ibaml.parts import Numbers

EXPLICIT = "explicit"


def linear_solvers(cg_steps: int) -> dict[str, LinearSolver]:
    """How H u = b is solved; the paper says L = 2 steps of CG, but not from which start."""
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
        gradients = {EXPLICIT: g}
        for kind in kinds:
            for name, solver in solvers.items():
                rule = f"{kind} {name}"
                gradients[rule] = implicit_gradient(support, v, b, Curvature(kind), solver)
        for rule, g in gradients.items():
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
    def of(cls, steps: tuple[int, ...], errors: dict[str, list[Numbers]]) -> Curves:
        ratio: dict[str, dict[str, np.ndarray]] = {}
        pooled: dict[str, dict[str, np.ndarray]] = {}
        for expectation, tasks in errors.items():
            size = np.array([[task["size"]] for task in tasks])
            for rule in tasks[0]["errors"]:
                error = np.array([task["errors"][rule] for task in tasks])
                ratio.setdefault(expectation, {})[rule] = error / size
                total = (error**2).sum(0) / (size**2).sum()
                pooled.setdefault(expectation, {})[rule] = np.sqrt(total)
        return cls(steps, size[:, 0], ratio, pooled)

    def wins(self, expectation: str, rule: str) -> np.ndarray:
        """In how many seeds a rule is closer than the explicit gradient, by K."""
        ratios = self.ratio[expectation]
        return np.asarray((ratios[rule] < ratios[EXPLICIT]).sum(0))

    def crossings(self, expectation: str) -> list[float | None]:
        """Where the paper's form overtakes the explicit gradient, seed by seed."""
        steps_of_crossing = self.ratio[expectation]
        return [
            crossing(self.steps, a, b)
            for a, b in zip(
                steps_of_crossing["lemma exact"], steps_of_crossing[EXPLICIT], strict=True
            )
        ]


def quartiles(crossings: Sequence[float | None]) -> dict[str, float | None]:
    """Quartiles of crossings, None where they lie beyond the steps."""
    values = [math.inf if c is None else c for c in crossings]
    three = np.quantile(values, [0.25, 0.5, 0.75], method="nearest")
    names = ("lower quartile", "median", "upper quartile")
    return {
        n: float(q) if math.isfinite(q) else None for n, q in zip(names, three, strict=True)
    }  # fmt: skip
