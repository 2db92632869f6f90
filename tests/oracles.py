"""Slow, independent ways to compute what the library computes fast, in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from ibaml import Curvature, MetaLearner, NewtonCG, TaskBatch
from ibaml.energy import Energy, TaskEnergy
from ibaml.linalg import ConjugateGradient
from ibaml.seeding import draw_seed
from ibaml.solve import Solution

F64 = torch.float64
SEED = 7


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(SEED)


def seed() -> int:
    """The seed a learner draws from `generator()`."""
    return draw_seed(generator())


def relative(a: Tensor, b: Tensor) -> float:
    """‖a − b‖ / ‖b‖."""
    a, b = a.detach(), b.detach()
    return float((a - b).norm() / b.norm().clamp(min=1e-300))


def converged(steps: int = 200) -> NewtonCG:
    """Newton on the exact Hessian, to rounding."""
    return NewtonCG(
        steps=steps,
        tol=1e-14,
        curvature=Curvature("energy"),
        linear_solver=ConjugateGradient(steps=300, tol=1e-6),
    )


@dataclass(frozen=True)
class StartingAt:
    """A solver that begins at a given point whatever the prior says (for re-solves)."""

    inner: NewtonCG
    point: Tensor
    steps: int = 1

    def solve(
        self, energy: Energy, start: Tensor, *, rate: Tensor | None = None, examine: bool = True
    ) -> Solution:
        return self.inner.solve(energy, self.point)


@dataclass(frozen=True)
class Given(StartingAt):
    """A solver that returns a given point."""

    def solve(
        self, energy: Energy, start: Tensor, *, rate: Tensor | None = None, examine: bool = True
    ) -> Solution:
        return replace(NewtonCG(steps=0).solve(energy, self.point), value=self.point)


def blocks(learner: MetaLearner) -> dict[str, list[nn.Parameter]]:
    """The meta-parameters by block: m, ρ, shared (and the likelihood's)."""
    parameters = dict(learner.model.named_parameters())
    block_rows = {
        "m": [
            learner.tied_mean[n.replace(".", "/")] if n in learner.layout.rows else parameters[n]
            for n in learner.roles.adapted
        ],
        **{
            {"log_var": "rho"}.get(name, name): list(group.values())
            for name, group in learner.named_children()
            if isinstance(group, nn.ParameterDict) and name not in ("tied_mean", "log_lr")
        },
        "shared": [parameters[n] for n in learner.roles.shared],
        "likelihood": list(learner.likelihood.parameters()),
        "beta": [] if learner.log_beta is None else [learner.log_beta],
    }
    return {name: ps for name, ps in block_rows.items() if ps}


def gradients(learner: MetaLearner, batch: TaskBatch) -> dict[str, Tensor]:
    """The learner's meta-gradient by block, each as one vector."""
    learner.zero_grad()
    learner(batch, generator()).backward()
    return {
        name: torch.cat([p.grad.reshape(-1).clone() for p in ps])
        for name, ps in blocks(learner).items()
    }


def finite_difference_errors(
    learner: MetaLearner,
    batch: TaskBatch,
    step: float = 1e-3,
    solver: NewtonCG | None = None,
) -> dict:
    """Relative error per block of the learner's gradient against five-point differences of its
    re-solved loss, along the gradient and two random directions. ``solver`` re-solves."""
    exact = gradients(learner, batch)
    solution = learner.diagnostics.record.solution
    assert solution is not None
    learner = learner.replace(solver=StartingAt(solver or converged(), solution.value))
    return directional_errors(learner, batch, exact, step)


def directional_errors(
    learner: MetaLearner, batch: TaskBatch, exact: dict[str, Tensor], step: float = 1e-3
) -> dict:
    """Relative error per block of these gradients against five-point differences of the loss, along
    the gradient and two random directions."""
    rng = torch.Generator().manual_seed(3)
    errors = {}
    for name, parameters in blocks(learner).items():
        g = exact[name]
        worst = 0.0
        for which in range(3):
            d = g if which == 0 else torch.randn(g.shape, generator=rng, dtype=F64)
            d = d / d.norm()
            slope = five_point(
                lambda: float(learner(batch, generator()).detach()), parameters, d, step
            )
            size = g.norm() if which == 0 else g.norm() / len(g) ** 0.5
            worst = max(worst, abs(slope - float(g @ d)) / float(size))
        errors[name] = worst
    return errors


def five_point(
    loss: Callable[[], float], parameters: Iterable[nn.Parameter], d: Tensor, step: float
) -> float:
    """Directional derivative of ``loss`` by the five-point stencil, error O(step⁴)."""
    parameters = list(parameters)
    parts = d.split([p.numel() for p in parameters])
    saved = [p.detach().clone() for p in parameters]

    def at(h: float) -> float:
        with torch.no_grad():
            for p, original, part in zip(parameters, saved, parts, strict=True):
                p.copy_(original + h * part.view_as(p))
        return loss()

    slope = (8 * (at(step) - at(-step)) - (at(2 * step) - at(-2 * step))) / (12 * step)
    at(0.0)
    return slope


def dense_gradients(
    learner: MetaLearner,
    batch: TaskBatch,
    curvature: Curvature | None = None,
    delta: Tensor | float = 0.0,
) -> dict[str, Tensor]:
    """The implicit meta-gradient at the solver's solution, from dense matrices of plain autograd,
    each task on its own, averaged:

        g = ∇₂L − (∂²E/∂v∂θ)ᵀ u + (∂start/∂θ)ᵀ δu,      u = (C + (1+μ)P + diag δ)⁻¹ ∇₁L

    Args:
        curvature: which C (energy or ggn), and μ; the exact Hessian if left out.
        delta: δ, one number or one for every coordinate.
    """
    choice = curvature or Curvature("energy")
    totals: dict[str, Tensor] = {}
    for t in range(len(batch)):
        support, query = learner.problem(batch.select([t]), seed())
        start = learner.belief.start(support.meta.prior, 1).detach()
        v = learner.solver.solve(support.bind(tuple(x.detach() for x in support.theta)), start)
        theta = tuple(x.detach().clone().requires_grad_() for x in support.theta)
        point = v.value.detach().clone().requires_grad_()

        energy = support.bind(theta)
        weight = 1 + choice.damping
        shift = torch.as_tensor(delta, dtype=F64).expand(point.numel())
        h = _dense_curvature(energy, point.detach(), choice)
        h = h + weight * _dense_hessian(energy.penalty, point) + torch.diag(shift)
        losses = learner.objective(point, support.bind(theta), query.bind(theta))
        b, *direct = torch.autograd.grad(losses.sum(), (point, *theta), allow_unused=True)
        u = torch.linalg.solve(h, b.reshape(-1))
        damped = energy.loss(point) + weight * energy.penalty(point)
        (slope,) = torch.autograd.grad(damped.sum(), point, create_graph=True)
        begin = learner.belief.start(energy.meta.prior, 1)
        implicit = begin.reshape(-1) @ (shift * u) - slope.reshape(-1) @ u
        mixed = torch.autograd.grad(implicit, theta, allow_unused=True)
        # back from the flat prior to the parameters, by plain autograd as well
        pieces = [
            (live, (0 if d is None else d) + (0 if m is None else m))
            for live, d, m in zip(support.theta, direct, mixed, strict=True)
        ]
        pieces = [(live, g) for live, g in pieces if isinstance(g, Tensor)]
        for name, parameters in blocks(learner).items():
            gradients = torch.autograd.grad(
                [live for live, _ in pieces],
                parameters,
                [g for _, g in pieces],
                retain_graph=True,
                allow_unused=True,
            )
            flat = torch.cat(
                [
                    (torch.zeros_like(p) if g is None else g).reshape(-1)
                    for p, g in zip(parameters, gradients, strict=True)
                ]
            )
            totals[name] = totals.get(name, 0) + flat / len(batch)
    return totals


def _dense_hessian(function: Callable[[Tensor], Tensor], point: Tensor) -> Tensor:
    """The Hessian of a function of one task's v, as a matrix."""
    h = torch.autograd.functional.hessian(lambda p: function(p).sum(), point.detach())
    return h.reshape(point.numel(), point.numel()).detach()


def _dense_curvature(energy: TaskEnergy, point: Tensor, choice: Curvature) -> Tensor:
    """C of the choice: the loss's Hessian or JᵀΛJ, on all of v or on the means."""
    if choice.kind == "energy":
        c = _dense_hessian(energy.loss, point)
    else:
        outputs = energy.outputs(point).detach()
        jacobian = torch.autograd.functional.jacobian(energy.outputs, point)
        jacobian = jacobian.reshape(outputs.numel(), point.numel()).detach()
        c = jacobian.mT @ _dense_hessian(energy.output_loss, outputs) @ jacobian
    if choice.block == "mean":
        n = energy.layout.size
        c = torch.block_diag(c[:n, :n], torch.zeros_like(c[n:, n:]))
    return c


def smallest_eigenvalue(learner: MetaLearner, batch: TaskBatch) -> float:
    """Smallest eigenvalue of the energy's Hessian at the last solution, over the tasks."""
    support, _ = learner.problem(batch, seed())
    v = learner.diagnostics.record.solution.value  # type: ignore[union-attr]
    h = Curvature("energy").at(support, v)
    from ibaml.linalg import dense_matrix

    matrix = dense_matrix(h.product, v)
    return float(torch.linalg.eigvalsh((matrix + matrix.mT) / 2).min())


def exact_cg() -> ConjugateGradient:
    return ConjugateGradient(steps=2000, tol=1e-13)
