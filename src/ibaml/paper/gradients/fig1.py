"""Figure 1: how far is a meta-gradient from the true one after K steps of adaptation?

The error of explicit and implicit gradients against the closed-form oracle on the paper's linear
test, for three curvatures and four ways to solve H u = b, by Monte Carlo and with the expectation
in closed form; and how the K at which the paper's form overtakes the explicit gradient depends on
what the paper does not say: the spectrum of X, its scale, and the query inputs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from ibaml.curvature import KINDS
from ibaml.fields import require, setting
from ibaml.linalg import Dense
from ibaml.paper.gradients.curves import (
    EXPLICIT,
    Curves,
    crossing,
    errors_of_a_task,
    linear_solvers,
    quartiles,
)
from ibaml.paper.gradients.fig1_findings import judged, numbers_of, seed_rows, setup, summary_rows
from ibaml.paper.gradients.fig1_picture import draw
from ibaml.paper.gradients.linear import LinearTest
from ibaml.paper.study import Findings, Progress, Study, rising
from ibaml.parts import Numbers, Parts
from ibaml.tasks.synthetic import QUERY_INPUTS, SPECTRA, QueryInputs, Spectrum

EXPECTATIONS = ("mc", "exact")


@dataclass(frozen=True)
class Settings:
    """The curves over K, and (``scan_…``) the panel on where they cross."""

    seed: int = 0
    seeds: int = setting(30, "Number of tasks; their spread is shown.", least=2)
    steps: tuple[int, ...] = setting(
        (0, 1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 15, 20, 30, 50, 100, 200, 500),
        "K, steps of adaptation.", least=0, check=rising,
    )  # fmt: skip
    cg_steps: int = setting(2, "L, steps of conjugate gradients.", least=1)
    samples: int = setting(64, "Monte-Carlo samples.", least=1)
    dimension: int = setting(32, "Weights of the linear model, and support examples.", least=1)
    stiffness: float = setting(0.5, "α·σ_max(X)²/σ², the scale of X.")
    spectrum: Spectrum = "one-small"
    queries: QueryInputs = "gaussian"
    scan_seeds: int = setting(10, "Number of tasks per point; quartiles are shown.", least=2)
    scan_steps: tuple[int, ...] = setting(
        (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 15, 20, 30), "K there.", least=0, check=rising
    )
    scan_stiffness: tuple[float, ...] = setting((0.1, 0.25, 0.5, 1.0, 1.5), "The scales of X.")

    def __post_init__(self) -> None:
        require(self)
        for stiffness in (self.stiffness, *self.scan_stiffness):
            self.test(stiffness=stiffness)  # a wrong value fails now, not after others are computed

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


def run(settings: Settings, parts: Parts, progress: Progress) -> Findings:
    jobs = [(e, key) for key in range(settings.seeds) for e in EXPECTATIONS]
    scan = list(_scan_cells(settings))
    total = len(jobs) + len(scan) * settings.scan_seeds
    solvers, test, done = linear_solvers(settings.cg_steps), settings.test(), 0
    errors: dict[str, list[Numbers]] = {e: [] for e in EXPECTATIONS}
    for expectation, key in jobs:
        progress(done, total, f"seed {key}, {expectation}")
        chosen: dict[str, Any] = {
            "steps": settings.steps, "seed": settings.seed, "key": key,
            "exact": expectation == "exact",
        }  # fmt: skip
        errors[expectation].append(
            parts(
                {"part": "curves", "cg_steps": settings.cg_steps, **asdict(test), **chosen},
                partial(errors_of_a_task, test, solvers=solvers, kinds=KINDS, **chosen),
            )
        )
        done += 1
    curves = Curves.of(settings.steps, errors)
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
    mean = {rule: ratios.mean(0) for rule, ratios in ratio.items()}
    return {
        "spectrum": test.spectrum,
        "queries": test.queries,
        "stiffness": test.stiffness,
        "seeds": len(tasks),
        "crossing of the means": crossing(steps, mean["lemma exact"], mean[EXPLICIT]),
        **quartiles(curves.crossings("exact")),
        "energy below explicit, share of K": float(
            (mean["energy exact"] < mean[EXPLICIT]).mean()
        ),
    }  # fmt: skip


def _findings(
    settings: Settings, curves: Curves, scan: list[dict[str, Any]]
) -> Findings:  # fmt: skip
    numbers = numbers_of(settings, curves)
    agrees, differs = judged(settings, curves, numbers)
    return Findings(
        setup=setup(settings),
        agrees=agrees,
        differs=differs,
        numbers={**numbers, "scan": scan},
        tables={
            "fig1": summary_rows(curves),
            "fig1_seeds": seed_rows(curves),
            "fig1_crossing": scan,
        },
        pictures={"fig1": partial(draw, curves, scan, settings)},
    )


STUDY = Study("fig1", "Figure 1: gradient error on synthetic data", Settings(), QUICK, run)
