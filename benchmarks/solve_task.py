"""How soon is a task solved if everything is adapted? docs/studies/paper-setting.md.

    python benchmarks/solve_task.py --file pictures.zip --splits splits.json
    python benchmarks/solve_task.py --file … --splits … --learner LEARNER.ibaml --shots 5
    python benchmarks/solve_task.py --file … --splits … --learner LEARNER.ibaml --answers 40
    python benchmarks/solve_task.py --train FOLDER                # plain loops, 100 × 8 tasks
    python benchmarks/solve_task.py --check                       # K-FAC's factors

Every solver starts at the prior of the same tasks, one task at a time, and takes steps
until its budget is spent. Its cost is counted in passes: one for every time the network is run
(with or without its backward pass), one for every product with a curvature. Columns: passes until
‖∇E‖ is a tenth and a hundredth of the start's, passes and processor milliseconds until E is within
10 % and 1 % (of its possible decrease) of the lowest that any solver found, the smallest share of
‖∇E‖, and the share of the decrease of E that is left after some passes. The second table is
about the linear system of the meta-gradient: products until its residual is .1 and .01.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np
import torch
from torch import Tensor, nn

import ibaml
from ibaml import (
    Adam,
    Curvature,
    GradientDescent,
    MetaLearner,
    NaturalDescent,
    NewtonCG,
    PolyakDescent,
)
from ibaml.energy import Categorical, TaskEnergy, detached
from ibaml.evaluation import ClassScores
from ibaml.evaluation.predict import score_tasks
from ibaml.gradient.stopping import Stopped, start_precision
from ibaml.linalg import ConjugateGradient, LinearSolution, MatVec, Reason
from ibaml.solve import Solution, Solver, energy_and_gradient
from ibaml.tasks import EpisodeTasks
from ibaml.testing.base import one_task

Run = Callable[["Watched", Tensor], object]  # until `Enough`
TARGETS = (0.1, 0.01)
NEVER = (math.inf, math.inf)


class Enough(Exception):
    """The budget is spent."""


@dataclass
class Trail:
    """What was spent, and E and ‖∇E‖ that it bought."""

    budget: int
    spent: int = 0
    began: float = field(default_factory=time.process_time)
    seen: list[tuple[int, float, float, float]] = field(default_factory=list)
    best: Tensor | None = None  # where E was lowest

    def spend(self, passes: int = 1) -> None:
        self.spent += passes
        if self.spent > self.budget:
            raise Enough

    def see(self, v: Tensor, value: float, gradient: Tensor) -> None:
        size = float(gradient.norm())
        if not math.isfinite(size):
            raise Enough
        if not self.seen or value < min(e for *_, e, _ in self.seen):
            self.best = v
        self.seen.append((self.spent, time.process_time() - self.began, value, size))

    def to_gradient(self, share: float) -> tuple[float, float]:
        """Passes and seconds until ‖∇E‖ is this share of the start's."""
        limit = share * self.seen[0][3]
        return next(((n, s) for n, s, _, size in self.seen if size <= limit), NEVER)

    def to_energy(self, share: float, best: float) -> tuple[float, float]:
        """Passes and seconds until all but this share of the possible decrease of E is done."""
        limit = best + share * (self.seen[0][2] - best)
        return next(((n, s) for n, s, value, _ in self.seen if value <= limit), NEVER)

    def lowest(self, within: int) -> float:
        return min(value for n, _, value, _ in self.seen if n <= within)


@dataclass(frozen=True)
class Watched(TaskEnergy):
    """An energy that keeps a trail of its passes and gradients."""

    trail: Trail = field(default_factory=lambda: Trail(1000))

    @classmethod
    def of(cls, energy: TaskEnergy, budget: int) -> Watched:
        kept = {f.name: getattr(energy, f.name) for f in fields(energy) if f.init}
        return cls(**kept, trail=Trail(budget))

    def outputs(self, v: Tensor) -> Tensor:
        self.trail.spend()
        return super().outputs(v)

    def __call__(self, v: Tensor) -> Tensor:
        value = super().__call__(v)
        if v.is_leaf and v.requires_grad:
            v.register_hook(partial(self.trail.see, v.detach(), float(value.detach())))
        return value


# --- K-FAC -----------------------------------------------------------------------------------


class Kfac:
    """(A ⊗ G + c)⁻¹ for convolutions and linear layers, 1/c for other weights; one task.

    A = mean of aaᵀ over draws, examples and places, a a layer's input patch; G = sum of ggᵀ, g the
    gradient in the layer's output, for every column of a square root of the loss's Hessian in the
    network's outputs. c is the mean of the rest of H over the layer's weights.
    """

    def __init__(self, energy: TaskEnergy, v: Tensor, rest: Tensor) -> None:
        self.layout, self.rest = energy.layout, rest
        self.factors: dict[str, tuple[Tensor, ...]] = {}
        for name, (a, g) in kfac_factors(energy, v).items():
            (values_a, vectors_a), (values_g, vectors_g) = (
                torch.linalg.eigh(a),
                torch.linalg.eigh(g),
            )
            self.factors[name] = values_a.clamp(min=0), vectors_a, values_g.clamp(min=0), vectors_g

    def __call__(self, r: Tensor) -> Tensor:
        n = self.layout.size
        solved = self.layout.split((r / self.rest)[0, :n])
        right, rest = self.layout.split(r[0, :n]), self.layout.split(self.rest[0, :n])
        for name, (values_a, vectors_a, values_g, vectors_g) in self.factors.items():
            weight, bias = f"{name}.weight", f"{name}.bias"
            joint = torch.cat([right[weight].flatten(1), right[bias][:, None]], 1)
            turned = vectors_g.T @ joint @ vectors_a
            turned = turned / (values_g[:, None] * values_a + rest[weight].mean())
            joint = vectors_g @ turned @ vectors_a.T
            solved[weight] = joint[:, :-1].reshape(right[weight].shape)
            solved[bias] = joint[:, -1]
        flat = torch.cat([t.reshape(-1) for t in solved.values()])[None]
        return torch.cat([flat, (r / self.rest)[:, n:]], 1)

    def times(self, factor: float) -> Kfac:
        """The same with A ⊗ G scaled."""
        scaled = copy(self)
        scaled.factors = {n: (a, va, factor * g, vg) for n, (a, va, g, vg) in self.factors.items()}
        return scaled


def kfac_factors(energy: TaskEnergy, v: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    """A and G of every convolution and linear layer."""
    layers = {
        name: layer
        for name, layer in energy.model.named_modules()
        if isinstance(layer, nn.Conv2d | nn.Linear)
    }
    inputs: dict[str, list[Tensor]] = {name: [] for name in layers}
    outputs: dict[str, list[Tensor]] = {name: [] for name in layers}
    hooks = []
    for name, layer in layers.items():

        def keep(_: nn.Module, args: tuple[Tensor, ...], out: Tensor, name: str = name) -> None:
            inputs[name].append(args[0].detach())
            outputs[name].append(out)

        hooks.append(layer.register_forward_hook(keep))
    with torch.enable_grad():
        plain = energy.run.plain()
        tensors = {**energy.constants, **energy.meta.shared}
        weights = energy.weights(v.detach().requires_grad_())
        logits = plain(energy.model, weights, tensors, energy.x)
    for hook in hooks:
        hook.remove()
    p = logits.detach().softmax(-1)  # (1, S, N, C)
    count = p.shape[1] * p.shape[2]
    grams = {name: [torch.zeros(())] for name in layers}
    wanted = [out for outs in outputs.values() for out in outs]
    for c in range(p.shape[-1]):
        column = -p.clone()
        column[..., c] += 1
        column = column * (p[..., c : c + 1] / count).sqrt()
        energy_spend(energy)
        gradients = iter(torch.autograd.grad(logits, wanted, column, retain_graph=True))
        for name in layers:
            for _ in outputs[name]:
                g = places(next(gradients))
                grams[name].append(g.T @ g)
    factors = {}
    for name, layer in layers.items():
        rows = torch.cat([patches(layer, x) for x in inputs[name]])
        rows = torch.cat([rows, torch.ones_like(rows[:, :1])], 1)
        factors[name] = rows.T @ rows / len(rows), torch.stack(grams[name][1:]).sum(0)
    return factors


def energy_spend(energy: TaskEnergy) -> None:
    if isinstance(energy, Watched):
        energy.trail.spend()


def patches(layer: nn.Module, x: Tensor) -> Tensor:
    """What a layer's rows multiply, one row per example and place."""
    if isinstance(layer, nn.Conv2d):
        x = nn.functional.unfold(x, layer.kernel_size, padding=layer.padding, stride=layer.stride)
        return x.transpose(1, 2).flatten(0, 1)
    return x


def places(g: Tensor) -> Tensor:
    """(N, C, …) as one row per example and place."""
    return g.movedim(1, -1).flatten(0, -2)


def anatomy(energy: TaskEnergy, v: Tensor, delta: float) -> dict[str, float]:
    """Why K-FAC helps or not: how many eigenvalues of the Gauss–Newton matrix C of the means are
    above P + δ, the largest of them, and the cosine of K-FAC and C in each layer (as matrices)."""
    v = v.detach().requires_grad_()
    with torch.enable_grad():
        outputs = energy.outputs(v)  # (1, S, N, C)
    p = outputs.detach().softmax(-1)
    root = (torch.diag_embed(p.sqrt()) - p.sqrt()[..., None] * p[..., None, :]).flatten(0, 2)
    root = root / len(root) ** 0.5  # (SN, columns, C): the loss's Hessian is rootᵀ root
    rows = []
    for i in range(len(root)):
        for column in root[i]:
            weight = torch.zeros_like(p).flatten(0, 2)
            weight[i] = column
            g = torch.autograd.grad(outputs, v, weight.view_as(p), retain_graph=True)[0]
            rows.append(g[0, : energy.layout.size])
    jacobian = torch.stack(rows)
    values = torch.linalg.eigvalsh(jacobian @ jacobian.T)
    rest = float(penalty(energy, v)[0, 0]) + delta
    facts = {"above P + δ": float((values > rest).sum()), "largest": float(values[-1])}
    parts = energy.layout.split(jacobian)
    for name, (a, g) in kfac_factors(energy, v).items():
        weight, bias = parts[f"{name}.weight"], parts[f"{name}.bias"]
        own = torch.cat([weight.flatten(2), bias[..., None]], 2)
        shared = torch.einsum("roi,op,ij,rpj->", own, g, a, own)
        gram = own.flatten(1) @ own.flatten(1).T
        facts[name] = float(shared / (gram.norm() * a.norm() * g.norm()))
    return facts


def check_kfac() -> None:
    """Our factors against curvlinops' in float64 (pip install curvlinops-for-pytorch)."""
    from curvlinops import KFACLinearOperator

    net = ibaml.nn.conv4(5, 4, 3, 16).double()
    learner = MetaLearner(net, ibaml.Point(0.1), GradientDescent(1), ibaml.Implicit(), samples=1)
    x = torch.randn(1, 10, 3, 16, 16, dtype=torch.float64)
    y = torch.arange(5).repeat(2)[None]
    energy, _ = learner.problem(ibaml.TaskBatch(x, y, x, y), 0)
    start = learner.belief.start(energy.meta.prior, 1).detach()
    net.train()  # batch statistics
    factors = kfac_factors(detached(energy), start)
    weights = [p for name in factors for p in net.get_submodule(name).parameters()]
    theirs = KFACLinearOperator(
        net, nn.CrossEntropyLoss(), weights, [(x[0], y[0])], fisher_type="type-2",
        kfac_approx="expand", separate_weight_and_bias=False, check_deterministic=False,
    )  # fmt: skip
    dense, at = theirs @ torch.eye(sum(w.numel() for w in weights), dtype=torch.float64), 0
    for name, (a, g) in factors.items():
        count = len(a) * len(g)
        columns = torch.arange(count).view(len(g), len(a))
        order = torch.cat([columns[:, :-1].flatten(), columns[:, -1]])
        ours = torch.kron(g, a)[order][:, order]
        exact, at = dense[at : at + count, at : at + count], at + count
        print(f"{name}: relative difference {float((ours - exact).norm() / exact.norm()):.1e}")


# --- solvers to try --------------------------------------------------------------------------


@dataclass(frozen=True)
class Counting:
    """Conjugate gradients whose products are counted, with a preconditioner of choice."""

    trail: Trail
    solver: ConjugateGradient
    preconditioner: Callable[[], MatVec] | None = None

    def __call__(
        self, matvec: MatVec, b: Tensor, precondition: MatVec | None = None
    ) -> LinearSolution:
        def counted(p: Tensor) -> Tensor:
            self.trail.spend()
            return matvec(p)

        chosen = precondition if self.preconditioner is None else self.preconditioner()
        return self.solver(counted, b, chosen)


def by(solver: Solver) -> Run:
    return solver.solve


def newton(kind: str, damping: float = 0.0, kfac: bool = False) -> Run:
    """``damping`` of 9: λ + δ of about 1."""

    def run(energy: Watched, start: Tensor) -> None:
        v = start
        pre = (lambda: Kfac(energy, v, (1 + damping) * penalty(energy, v))) if kfac else None
        linear = Counting(energy.trail, ConjugateGradient(10, tol=0.3), pre)
        solver = NewtonCG(1, curvature=Curvature(kind, damping), linear_solver=linear, halvings=10)
        while True:
            v = solver.solve(energy, v).value
            energy.trail.spent -= 1  # the gradient at v was known

    return run


def penalty(energy: TaskEnergy, v: Tensor) -> Tensor:
    """P, a diagonal."""
    precision = energy.precision(v)
    assert precision is not None
    assert precision.diagonal is not None
    return precision.diagonal.expand_as(v)


def barzilai_borwein(long: bool) -> Run:
    def run(energy: Watched, start: Tensor) -> None:
        v, size = start, 0.1
        _, g = energy_and_gradient(energy, v)
        while True:
            s = -size * g
            v = v + s
            _, following = energy_and_gradient(energy, v)
            y, g = following - g, following
            sy = float((s * y).sum())
            size = float((s * s).sum()) / sy if long else sy / float((y * y).sum())
            size = min(max(size, 0.01), 10.0) if sy > 0 else 0.1

    return run


Step = Callable[[Tensor], Tensor]  # of a gradient


def search(
    energy: Watched, v: Tensor, value: Tensor, g: Tensor, p: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Backtrack from v + p to a sufficient decrease."""
    slope, length = float((g * p).sum()), 1.0
    for _ in range(12):
        there = v + length * p
        reached, gradient = energy_and_gradient(energy, there)
        if float(reached) <= float(value) + 1e-4 * length * slope:
            break
        length /= 2
    return there, reached, gradient


def lbfgs(memory: int, damping: float | None = None) -> Run:
    """From (K-FAC + P + damping)⁻¹, or from a tenth."""

    def run(energy: Watched, start: Tensor) -> None:
        v = start
        pairs: list[tuple[Tensor, Tensor]] = []
        first: Step = lambda r: 0.1 * r  # noqa: E731
        if damping is not None:
            first = kfac_inverse(damping, energy, v)
        value, g = energy_and_gradient(energy, v)
        while True:
            p = -two_loops(g, pairs, first)
            if float((p * g).sum()) >= 0:
                p, pairs = -first(g), []
            there, value, following = search(energy, v, value, g, p)
            s, y = there - v, following - g
            v, g = there, following
            if float((s * y).sum()) > 1e-8 * float((y * y).sum()):
                pairs = [*pairs, (s, y)][-memory:]

    return run


def two_loops(g: Tensor, pairs: list[tuple[Tensor, Tensor]], first: Step) -> Tensor:
    weights = []
    for s, y in reversed(pairs):
        a = (s * g).sum() / (s * y).sum()
        weights.append(a)
        g = g - a * y
    g, scale = first(g), 1.0
    if pairs:
        s, y = pairs[-1]
        scale = float((s * y).sum() / (y * first(y)).sum())
    g = scale * g
    for (s, y), a in zip(pairs, reversed(weights), strict=True):
        g = g + s * (a - (y * g).sum() / (s * y).sum())
    return g


def preconditioned(make: Callable[[Watched, Tensor], Step], every: int) -> Run:
    """Steps −M⁻¹∇E with a line search; M is made again every few steps."""

    def run(energy: Watched, start: Tensor) -> None:
        v, step = start, 0
        value, g = energy_and_gradient(energy, v)
        while True:
            if step % every == 0:
                inverse = make(energy, v)
            v, value, g = search(energy, v, value, g, -inverse(g))
            step += 1

    return run


def kfac_inverse(damping: float, energy: Watched, v: Tensor) -> Step:
    return Kfac(energy, v, penalty(energy, v) + damping)


def diagonal_inverse(probes: int, damping: float, energy: Watched, v: Tensor) -> Step:
    """By Hutchinson's estimate of the Gauss–Newton matrix's diagonal."""
    h = Curvature("ggn").at(energy, v)
    generator = torch.Generator().manual_seed(0)
    total = torch.zeros_like(v)
    for _ in range(probes):
        z = torch.randn(v.shape, generator=generator).sign().to(v)
        energy.trail.spend()
        total += z * (h.product(z) - penalty(energy, v) * z)
    diagonal = (total / probes).abs() + penalty(energy, v) + damping
    return lambda g: g / diagonal


def solvers() -> dict[str, Run]:
    many = 100_000
    kfac = kfac_inverse
    return {
        **{f"descent, α {a:g}": by(GradientDescent(many, a)) for a in (0.03, 0.1, 0.3)},
        "natural, α 0.1": by(NaturalDescent(many, 0.1)),
        **{f"Adam, {a:g}": by(Adam(many, a)) for a in (0.003, 0.01)},
        "Newton–CG, Gauss–Newton": newton("ggn"),
        "Newton–CG, Gauss–Newton, μ 9": newton("ggn", 9.0),
        "Newton–CG, Gauss–Newton, μ 9, K-FAC": newton("ggn", 9.0, kfac=True),
        "Newton–CG, exact, μ 9": newton("energy", 9.0),
        **{f"Polyak, α {a:g}": by(PolyakDescent(many, a)) for a in (0.1, 0.3, 1.0)},
        **{
            f"Nesterov, α 0.03, {mu:g}": by(GradientDescent(many, 0.03, momentum=mu))
            for mu in (0.7, 0.9)
        },
        **{
            f"Nesterov, α 0.1, {mu:g}": by(GradientDescent(many, 0.1, momentum=mu))
            for mu in (0.5, 0.7, 0.9)
        },
        "Barzilai–Borwein": barzilai_borwein(True),
        "L-BFGS, 20": lbfgs(20),
        "L-BFGS, 20, from K-FAC + 1": lbfgs(20, 1.0),
        "diagonal + 1, once in 5": preconditioned(partial(diagonal_inverse, 3, 1.0), 5),
        "K-FAC + 1, once in 5": preconditioned(partial(kfac, 1.0), 5),
        "K-FAC + 1, once": preconditioned(partial(kfac, 1.0), many),
    }


@dataclass(frozen=True)
class Searched:
    """A solver to try as a `Solver`, each task by itself: where E was lowest within its passes."""

    run: Run
    passes: int
    steps: int = 1

    def solve(
        self, energy: TaskEnergy, start: Tensor, *, rate: Tensor | None = None, examine: bool = True
    ) -> Solution:
        values = []
        for t in range(len(start)):
            one = Watched.of(one_task(energy, t), self.passes)
            with suppress(Enough):
                self.run(one, start[t : t + 1])
            assert one.trail.best is not None
            values.append(one.trail.best)
        value = torch.cat(values)
        after, gradient = energy_and_gradient(energy, value)
        steps = torch.full_like(after, self.passes, dtype=torch.long)
        reason = torch.full_like(steps, Reason.STEPS)
        return Solution(
            value, steps, reason, energy_and_gradient(energy, start)[0], after, gradient
        )


# --- the measurement -------------------------------------------------------------------------


def problems(
    learner: MetaLearner, tasks: EpisodeTasks, count: int
) -> Iterator[tuple[TaskEnergy, TaskEnergy, Tensor]]:
    """Energies of support and query set and the start, a task at a time."""
    for key in range(count):
        (batch,) = tasks.batches("val", [key])
        batch = batch.to(learner.reference.device)
        support, query = learner.problem(batch, 0)
        start = learner.belief.start(support.meta.prior, 1).detach()
        yield detached(support), detached(query), start


def systems(learner: MetaLearner, tasks: EpisodeTasks, count: int) -> None:
    """Products until the residual of the meta-gradient's linear system is .1 and .01."""
    solutions: dict[str, list[tuple[LinearSolution, LinearSolution]]] = {}
    facts: list[dict[str, float]] = []
    for support, query, start in problems(learner, tasks, count):
        for steps, stopping, kind in (
            (15, "auto", "energy"), (15, "auto", "ggn"), (50, "auto", "energy"), (50, None, "ggn"),
        ):  # fmt: skip
            descent = GradientDescent(steps, 0.1)
            solution = descent.solve(support, start)
            v = solution.value
            delta = start_precision(stopping, support, descent, solution)
            delta = torch.zeros_like(v) if delta is None else delta
            block = (
                "mean"
                if kind == "energy" and not isinstance(learner.belief, ibaml.Point)
                else "all"
            )
            h = Stopped(Curvature(kind, block=block).at(support, v), delta)
            _, b = energy_and_gradient(query, v)
            rest = penalty(support, v) + delta
            if kind == "ggn" and stopping:
                facts.append(anatomy(support, v, float(delta[0, 0])))
            kfac = Kfac(support, v, rest)
            rule = "K-aware" if stopping else "implicit"
            for name, inverse in {
                "no preconditioner": None, "P + δ": h.precondition, "K-FAC": kfac,
                "K-FAC / 10": kfac.times(0.1),
            }.items():  # fmt: skip
                both = [ConjugateGradient(200, tol=t)(h.product, b, inverse) for t in TARGETS]
                solutions.setdefault(f"{rule}, {kind}, K = {steps}: {name}", []).append(tuple(both))
    print(f"\n{'linear system':44} {'to .1':>6} {'to .01':>6}   unsolved")
    for name, pairs in solutions.items():
        steps = " ".join(f"{median(int(p[i].steps) for p in pairs):6.0f}" for i in range(2))
        failed = sum(int(p[1].reason) != Reason.CONVERGED for p in pairs)
        print(f"{name:44} {steps}   {failed} of {len(pairs)}", flush=True)
    print("eigenvalues of C, and cosines of K-FAC's layers with C's (medians):")
    print("   ".join(f"{name} {median(f[name] for f in facts):.2g}" for name in facts[0]))


def nlls(learner: MetaLearner, tasks: EpisodeTasks, count: int) -> tuple[float, np.ndarray]:
    """Accuracy in %, and the nll of every validation task (batch statistics, as in training)."""
    scores = score_tasks(learner, tasks, "val", range(count), norm_stats="batch")
    assert isinstance(scores, ClassScores)
    means = scores.means()
    return 100 * float(means["accuracy"].mean()), np.array(means["nll"].tolist())


def told(gap: np.ndarray) -> str:
    return f"{gap.mean():+.3f} ± {1.96 * gap.std(ddof=1) / math.sqrt(len(gap)):.3f}"


def answers(learner: MetaLearner, tasks: EpisodeTasks, count: int) -> None:
    """Are answers better where tasks are solved better? The same prior, the solver changed."""
    base = None
    print(f"{'solver':28} {'acc %':>6} {'nll':>6}   against descent, K = 15")
    for name, solver in {
        "descent, α 0.1, K 15": GradientDescent(15, 0.1),
        "descent, α 0.1, K 5": GradientDescent(5, 0.1),
        "descent, α 0.3, K 15": GradientDescent(15, 0.3),
        "Polyak, α 1, K 15": PolyakDescent(15, 1.0),
        "Nesterov, α 0.1, 0.7, K 15": GradientDescent(15, 0.1, momentum=0.7),
        "descent, α 0.1, K 50": GradientDescent(50, 0.1),
        "L-BFGS, 15 passes": Searched(lbfgs(20), 15),
        "L-BFGS, 100 passes": Searched(lbfgs(20), 100),
    }.items():
        other = learner.replace(solver=solver, gradient=ibaml.FirstOrder()).eval()
        accuracy, mine = nlls(other, tasks, count)
        base = mine if base is None else base
        print(f"{name:28} {accuracy:6.1f} {mine.mean():6.3f}   {told(mine - base)}", flush=True)


ARMS: dict[str, Solver] = {
    "descent": GradientDescent(15, 0.1),
    "Nesterov 0.7": GradientDescent(15, 0.1, momentum=0.7),
    "descent, α 0.3": GradientDescent(15, 0.3),
    "Polyak, α 0.3": PolyakDescent(15, 0.3),
    "Polyak, α 1": PolyakDescent(15, 1.0),
    "Nesterov 0.7, K 5": GradientDescent(5, 0.1, momentum=0.7),
    "descent, K 5": GradientDescent(5, 0.1),
}


def meta_train(solver: Solver, tasks: EpisodeTasks, given: argparse.Namespace) -> MetaLearner:
    torch.manual_seed(given.seed)
    learner = learner_of(given, tasks).replace(solver=solver)
    optimizer = torch.optim.Adam(learner.parameters())
    generator = torch.Generator().manual_seed(given.seed)
    began = time.process_time()
    for step in range(given.iterations):
        share = 0.5 * (1 + math.cos(math.pi * step / given.iterations))
        optimizer.param_groups[0]["lr"] = 0.003 * share
        optimizer.zero_grad()
        for batch in tasks.batches("train", range(8 * step, 8 * step + 8)):
            learner(batch.to(learner.reference.device), generator).backward()
        nn.utils.clip_grad_norm_(learner.parameters(), 10.0)
        optimizer.step()
    each = 1000 * (time.process_time() - began) / (8 * given.iterations)
    print(f"trained, {each:.0f} ms a task: {solver}", flush=True)
    return learner


def train(tasks: EpisodeTasks, given: argparse.Namespace) -> None:
    """Is meta-learning better where tasks are solved better? A plain loop, the solver changed."""
    given.train.mkdir(parents=True, exist_ok=True)
    base = None
    for name in given.arms:
        path = given.train / f"{name.replace(' ', '_')}.ibaml"
        if not path.exists():
            meta_train(ARMS[name], tasks, given).save(path)
        learner = ibaml.load(path, solver=ARMS[name]).to(given.device)
        accuracy, mine = nlls(learner.eval(), tasks, 200)
        base = mine if base is None else base
        print(f"{name:20} {accuracy:5.1f} {mine.mean():.3f}   {told(mine - base)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--file", type=Path, help="pictures; default: glyphs")
    parser.add_argument("--splits", type=Path)
    parser.add_argument("--learner", type=Path, help="default: an untrained prior")
    parser.add_argument("--point", action="store_true", help="a point belief (untrained prior)")
    parser.add_argument("--shots", type=int, default=1)
    parser.add_argument("--size", type=int, default=42)
    parser.add_argument("--channels", type=int, default=16)
    parser.add_argument("--tasks", type=int, default=8)
    parser.add_argument("--budget", type=int, default=200)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--smooth", action="store_true", help="softplus and mean pooling")
    parser.add_argument("--only", default="", help="solvers whose name contains this")
    parser.add_argument("--answers", type=int, help="tasks answered by solvers, nothing else")
    parser.add_argument("--train", type=Path, help="meta-train instead, into a folder")
    parser.add_argument("--iterations", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--arms", nargs="+", choices=tuple(ARMS), default=tuple(ARMS))
    parser.add_argument("--check", action="store_true", help="K-FAC's factors alone")
    given = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if given.check:
        check_kfac()
        return
    if given.file is None:
        data: ibaml.tasks.Dataset = ibaml.tasks.glyphs()
    else:
        data = ibaml.tasks.open_data(str(given.file), splits=given.splits, image_size=given.size)
    tasks = EpisodeTasks(data, 5, shots=given.shots)
    if given.train is not None:
        train(tasks, given)
        return
    learner = learner_of(given, tasks)
    if given.smooth:
        smoothen(learner.model)
    if given.answers:
        answers(learner, tasks, given.answers)
        return
    rows: dict[str, list[Trail]] = {}
    for support, _, start in problems(learner, tasks, given.tasks):
        for name, run in solvers().items():
            if given.only not in name:
                continue
            if name.startswith("natural") and not support.belief.is_diagonal_gaussian:
                continue
            energy = Watched.of(support, given.budget)
            with suppress(Enough):
                run(energy, start)
            rows.setdefault(name, []).append(energy.trail)
    report(rows, given.budget)
    systems(learner, tasks, given.tasks)


def report(rows: dict[str, list[Trail]], budget: int) -> None:
    each = [min(t.lowest(budget) for t in trails) for trails in zip(*rows.values(), strict=True)]
    print(
        f"{'solver':36} {'‖∇E‖ .1':>8} {'.01':>5} {'E 10 %':>8} {'1 %':>5} {'ms':>6} {'ms':>6} "
        f"{'‖∇E‖ left':>10} {'E left, %':>9} of 8, 16, 32 passes"
    )
    for name, trails in rows.items():
        to_gradient = [middle([t.to_gradient(share) for t in trails])[0] for share in TARGETS]
        to_energy = [
            middle([t.to_energy(share, b) for t, b in zip(trails, each, strict=True)])
            for share in TARGETS
        ]
        left = median(min(size for *_, size in t.seen) / t.seen[0][3] for t in trails)
        print(
            f"{name:36} {to_gradient[0]:8.0f} {to_gradient[1]:5.0f} {to_energy[0][0]:8.0f} "
            f"{to_energy[1][0]:5.0f} {1000 * to_energy[0][1]:6.0f} {1000 * to_energy[1][1]:6.0f} "
            f"{left:10.3f} {after(trails, each, 8):9.1f} {after(trails, each, 16):5.1f} "
            f"{after(trails, each, 32):5.1f}",
            flush=True,
        )


def after(trails: list[Trail], each: list[float], passes: int) -> float:
    """Median % of the possible decrease of E that is left after some passes."""
    return 100 * median(
        (t.lowest(passes) - best) / (t.seen[0][2] - best)
        for t, best in zip(trails, each, strict=True)
    )


def middle(pairs: list[tuple[float, float]]) -> tuple[float, float]:
    """Median passes and seconds; those that never came there count as infinite."""
    return median(p for p, _ in pairs), median(s for _, s in pairs)


def smoothen(model: nn.Module) -> None:
    """No kinks: softplus for ReLU, mean for max pooling."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.ReLU):
                setattr(parent, name, nn.Softplus(beta=4.0))
            if isinstance(child, nn.MaxPool2d):
                setattr(parent, name, nn.AvgPool2d(2))


def learner_of(given: argparse.Namespace, tasks: EpisodeTasks) -> MetaLearner:
    """The loaded learner, or an untrained prior."""
    if given.learner is not None:
        return ibaml.load(given.learner).to(given.device).train()
    shape, lam, log_var = tasks.example_shape, 0.11, -7.0
    net = ibaml.nn.conv4(5, given.channels, shape[0], shape[-1]).to(given.device)
    belief: ibaml.Belief = ibaml.DiagonalGaussian(kappa=lam * math.exp(log_var))
    if given.point:
        belief = ibaml.Point(lam)
    exact = Curvature("energy", block="all" if given.point else "mean")
    return MetaLearner(
        net, belief, GradientDescent(15, 0.1),
        ibaml.Implicit(exact, ConjugateGradient(10, tol=1e-2), stopping="auto"),
        likelihood=Categorical("learned" if given.file is None else 1.0),
        samples=2, noise="antithetic", init_log_var=log_var,
    )  # fmt: skip


if __name__ == "__main__":
    main()
