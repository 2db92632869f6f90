"""How fast and how far do solvers of a diagonal Gaussian head get? NewtonCG against HeadNewton.

    python benchmarks/head_solver.py --embeddings embeddings.npz   # from ibaml embed

Eight tasks at once, one thread, single precision, noise on the outputs by 16 points. Features of
glyphs come from a Conv4-16 after 100 meta-steps on its training classes. λ = β/(N·d) is the
strength of the prior. Columns: processor milliseconds of a solve; steps of the slowest task; what
is missing to the minimum of E, and ‖∇E‖ over that at the start, the worst task's; then of the
meta-gradient: its milliseconds, the most CG steps, and its relative error against double precision,
solved to rounding. The second table is about the number of points: how far E, and the probabilities
of queries at its minimum, are from those with 1,024 points.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

import ibaml
import ibaml.heads.points
from ibaml import Curvature, DiagonalGaussian, Implicit, MetaLearner, NewtonCG, TaskBatch
from ibaml.energy import TaskEnergy, detached
from ibaml.linalg import ConjugateGradient
from ibaml.solve import HeadNewton, Solution, Solver, energy_and_gradient

TASKS, STRENGTHS, POINTS = 8, (0.001, 0.01, 0.1), (10, 16, 64, 256)
SOLVERS: dict[str, Solver] = {
    "NewtonCG": NewtonCG(8, linear_solver=ConjugateGradient(10, tol=0.3), halvings=10),
    "HeadNewton": HeadNewton(),
}
EXACT = HeadNewton(60, tol=1e-11, linear_solver=ConjugateGradient(300, tol=1e-4))


@dataclass(frozen=True)
class Place:
    """Tasks of features, and the prior's log-variance that suits their length."""

    name: str
    batch: TaskBatch
    log_var: float
    head: nn.Linear

    def learner(self, strength: float, *, double: bool = False, **choices: object) -> MetaLearner:
        head = nn.Linear(self.head.in_features, self.head.out_features)
        head.load_state_dict(self.head.state_dict())
        beta = strength * self.batch.support_x.shape[1] * math.exp(self.log_var)
        plain = {"solver": EXACT, "samples": 16, "gradient": Implicit(Curvature("energy"))}
        return MetaLearner(
            head.double() if double else head, DiagonalGaussian(), objective="predictive",
            adapt="all", noise="outputs", beta=beta, init_log_var=self.log_var,
            **{**plain, **choices},
        )  # fmt: skip

    def problem(self, learner: MetaLearner) -> tuple[TaskEnergy, Tensor]:
        energy, _ = learner.problem(self.tasks(learner), 0)
        start = learner.belief.start(energy.meta.prior, len(self.batch)).detach()
        return detached(energy), start

    def tasks(self, learner: MetaLearner) -> TaskBatch:
        return self.batch.to(learner.reference.dtype)


def of_glyphs() -> Iterator[Place]:
    torch.manual_seed(0)
    net = ibaml.nn.conv4(5, 16, 1, 28)
    learner = ibaml.methods.ibaml(net)
    for shots in (1, 5):
        tasks = ibaml.tasks.EpisodeTasks(ibaml.tasks.glyphs(), 5, shots)
        if shots == 1:
            optimizer = torch.optim.Adam(learner.parameters(), 0.01)
            for step in range(100):
                optimizer.zero_grad()
                (batch,) = tasks.batches("train", range(8 * step, 8 * step + 8))
                learner(batch, torch.Generator().manual_seed(step)).backward()
                optimizer.step()
        (batch,) = tasks.batches("val", range(TASKS))
        batch = with_features(batch, lambda x: features_of(learner, x))
        head = [m for m in net.modules() if isinstance(m, nn.Linear)][-1]
        yield Place(f"glyphs {shots}-shot", batch, -5.0, head)


def of_embeddings(path: Path) -> Iterator[Place]:
    content = np.load(path)
    data = ibaml.tasks.feature_vectors(content["x"], content["y"])  # standardizes
    for shots in (1, 5):
        tasks = ibaml.tasks.EpisodeTasks(data, 5, shots)
        (batch,) = tasks.batches("train", range(TASKS))
        head = nn.Linear(batch.support_x.shape[-1], 5)
        nn.init.zeros_(head.weight)
        unit = with_features(batch, lambda x: nn.functional.normalize(x, dim=-1))
        yield Place(f"embeddings, length 1, {shots}-shot", unit, 0.0, head)
        yield Place(f"embeddings, standardized, {shots}-shot", batch, -5.0, head)


def with_features(batch: TaskBatch, features: Callable[[Tensor], Tensor]) -> TaskBatch:
    support, query = features(batch.support_x), features(batch.query_x)
    return TaskBatch(support, batch.support_y, query, batch.query_y)


@torch.no_grad()
def features_of(learner: MetaLearner, x: Tensor) -> Tensor:
    y = torch.zeros(x.shape[:2], dtype=torch.long)
    energy, _ = learner.problem(TaskBatch(x, y, x, y), 0)
    return energy.head_features()[..., :-1].clone()


def milliseconds(*works: Callable[[], object], repeats: int = 5) -> list[float]:
    """The least processor time of each, taken in turns: other jobs disturb it little."""
    best = [math.inf] * len(works)
    for _ in range(repeats):
        for i, work in enumerate(works):
            began = time.process_time()
            work()
            best[i] = min(best[i], 1e3 * (time.process_time() - began))
    return best


def meta_gradient(learner: MetaLearner, batch: TaskBatch) -> Tensor:
    learner.zero_grad()
    learner(batch, torch.Generator().manual_seed(0)).backward()
    return torch.cat([p.grad.flatten().double() for p in learner.parameters()])


def backward_time(learner: MetaLearner, batch: TaskBatch) -> float:
    best = math.inf
    for _ in range(3):
        loss = learner(batch, torch.Generator().manual_seed(0))
        best = min(best, milliseconds(loss.backward, repeats=1)[0])
    return best


def compare(place: Place, strength: float) -> None:
    double = place.learner(strength, double=True, gradient=exact_rule())
    energy, start = place.problem(double)
    minimum: Solution = EXACT.solve(energy, start)
    first = energy_and_gradient(energy, start)[1].norm(dim=-1)
    exact = meta_gradient(double, place.tasks(double))
    learners = {name: place.learner(strength, solver=s) for name, s in SOLVERS.items()}
    energy, start = place.problem(learners["HeadNewton"])
    times = milliseconds(*(partial(s.solve, energy, start) for s in SOLVERS.values()))
    for (name, learner), spent in zip(learners.items(), times, strict=True):
        solution = learner.solver.solve(energy, start)
        assert solution.energy_after is not None
        assert solution.gradient is not None
        missing = (solution.energy_after - minimum.energy_after).max()
        left = (solution.gradient.norm(dim=-1) / first).max()
        for kind in ("ggn", "energy"):
            ruled = learner.replace(gradient=Implicit(Curvature(kind)))
            batch = place.tasks(ruled)
            error = (meta_gradient(ruled, batch) - exact).norm() / exact.norm()
            backward = backward_time(ruled, batch)
            print(
                f"{place.name:35} {strength:5g} {name:10} {spent:6.1f} "
                f"{int(solution.steps.max()):5} {float(missing):9.1e} {float(left):8.1e}   "
                f"{kind:6} {backward:6.1f} "
                f"{int(ruled.diagnostics.cg_steps.max()):4} {float(error):9.1e}"
            )


def exact_rule() -> Implicit:
    return Implicit(Curvature("energy"), ConjugateGradient(1000, tol=1e-10))


def points(place: Place, strength: float) -> None:
    def solved(count: int) -> tuple[Tensor, Tensor, float]:
        learner = place.learner(strength, double=True, samples=count)
        energy, start = place.problem(learner)
        solver = HeadNewton()
        (spent,) = milliseconds(lambda: solver.solve(energy, start), repeats=3)
        v = EXACT.solve(energy, start).value
        batch = place.tasks(learner)
        query = replace(energy, x=batch.query_x, y=batch.query_y)
        mean, variance = query.output_moments(v)
        return energy(v), ibaml.heads.points.predict(mean, variance), spent

    value, answer, _ = solved(1024)
    for count in POINTS:
        near, probabilities, spent = solved(count)
        print(
            f"{place.name:35} {strength:5g} {count:6} {spent:6.1f} "
            f"{float((near - value).abs().max()):9.1e} "
            f"{float((probabilities - answer).abs().max()):9.1e}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--embeddings", type=Path, help="an .npz of x (N, F) and y (N,)")
    given = parser.parse_args()
    torch.set_num_threads(1)
    places = [*of_glyphs(), *(of_embeddings(given.embeddings) if given.embeddings else ())]
    print(
        f"{'problem':35} {'λ':>5} {'solver':10} {'ms':>6} {'steps':>5} {'E − min':>9} "
        f"{'‖∇E‖':>8}   {'H':6} {'ms':>6} {'CG':>4} {'error':>9}"
    )
    for place in places:
        for strength in STRENGTHS:
            compare(place, strength)
    print(f"\n{'problem':35} {'λ':>5} {'points':>6} {'ms':>6} {'E':>9} {'p':>9}")
    for place in places[1::3]:
        points(place, STRENGTHS[1])


if __name__ == "__main__":
    main()
