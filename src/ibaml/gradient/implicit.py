"""How is a solution differentiated implicitly, at a cost that does not grow with the steps?

For v̂ with ∇_v E(v̂, θ) = 0 the implicit function theorem gives, for a gradient b = ∇₁L in v̂,

    H u = b,      g = −(∂²E/∂v∂θ)ᵀ u

for every tensor θ that enters E. The paper calls it the generalized implicit gradient. What it
becomes where descent was stopped early is in `stopping`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils import _pytree as pytree

from ibaml.arguments import check_flag, check_number, check_part
from ibaml.curvature import Curvature
from ibaml.energy import Energy, PlainEnergy, Structure, detached
from ibaml.gradient.base import Record
from ibaml.gradient.first_order import FirstOrder
from ibaml.gradient.stopping import Stopped, Stopping, start_precision
from ibaml.linalg import ConjugateGradient, LinearSolution, LinearSolver, Reason
from ibaml.solve import Descent, NewtonCG, Solution, Solver, energy_and_gradient


def enough_steps(stopped: bool = False) -> LinearSolver:
    """Conjugate gradients until every task's system is solved to 0.1 %: usually 10 to 25 steps, at
    most 64; always 16 in a CUDA recording, where the residual cannot be read. Where descent was
    stopped early (H + δI) until 1 %, since the rule itself is no nearer: 4 to 8 steps; a task that
    meets a direction in which C is below −(P + δI)/2, where descent was far from converged, has its
    first-order gradient."""
    if stopped:
        return ConjugateGradient(steps=64, tol=1e-2, recorded=8, trust=0.5)
    return ConjugateGradient(steps=64, tol=1e-3, recorded=16)


@dataclass(frozen=True)
class Implicit:
    """Solve without a graph; in the backward pass solve one linear system per task.

    Args:
        curvature: which H (and G).
        linear_solver: how H u = b is solved; by default CG with as many steps as are needed.
        warn: warn if the linear solve fails (this waits for the device; a learner reports it
            in its diagnostics instead).
        stopping: δ ≥ 0, the precision of the start: H + δI takes the place of H, and the start
            receives δu. ``"auto"`` is one over the sum of the step sizes that descent took, so
            that the rule knows K, and 0 for a task that reached ``tol`` and for solvers that
            converge. None (or 0) takes every task for solved.
    """

    curvature: Curvature = field(default_factory=Curvature)
    linear_solver: LinearSolver = field(default_factory=enough_steps)
    warn: bool = False
    stopping: Stopping | None = None

    def __post_init__(self) -> None:
        check_part("curvature", self.curvature)
        check_part("linear_solver", self.linear_solver)
        check_flag("warn", self.warn)
        check_stopping(self.stopping)
        solver = self.linear_solver
        if isinstance(solver, ConjugateGradient) and solver.steps == 0 and solver.start == "zero":
            raise ValueError(
                "no CG steps from a start of zero give a gradient of exactly zero: use cg_steps of "
                '1 or more, or ConjugateGradient(steps=0, start="preconditioned")'
            )

    def __call__(
        self,
        energy: Energy,
        start: Tensor,
        solver: Solver,
        record: Record,
        *,
        rate: Tensor | None = None,
        examine: bool = True,
    ) -> Tensor:
        if self.stopping == "auto" and isinstance(solver, Descent) and solver.steps == 0:
            return FirstOrder()(energy, start, solver, record, rate=rate, examine=examine)
        detached_energy = detached(energy)
        solution = solver.solve(detached_energy, start.detach(), rate=rate, examine=examine)
        record.solution = solution
        delta = start_precision(self.stopping, detached_energy, solver, solution, rate)
        begin = start.detach() if delta is None else start
        job = (self, detached_energy, record, delta)
        v: Tensor = _Implicit.apply(job, solution.value, begin, *energy.theta)
        return v

    def pull_back(
        self,
        energy: Energy,
        v: Tensor,
        b: Tensor,
        wanted: list[int],
        record: Record,
        delta: Tensor | None = None,
    ) -> list[Tensor | None]:
        """The gradients of the wanted tensors of θ, from the meta-loss's gradient b at v; with a
        precision δ of the start (T, dim), also the start's, last."""
        h = self.curvature.at(energy, v, wanted)
        solved = h if delta is None else Stopped(h, delta)
        solution = self.linear_solver(solved.product, h.to_coordinates(b), solved.precondition)
        record.linear = solution
        if self.warn:
            _report_linear(solution)
        gradients = h.pull_back(solution.value)
        if isinstance(solved, Stopped):
            gradients.append(solved.start_gradient(solution.value))
        return gradients


def check_stopping(stopping: Any) -> None:
    """Refuse anything but "auto", None and a number of 0 or more."""
    if isinstance(stopping, str) and stopping != "auto":
        raise ValueError(f'stopping must be "auto", None or a number; got {stopping!r}')
    if stopping is not None and stopping != "auto":
        check_number("stopping", stopping, least=0)


class _Implicit(torch.autograd.Function):
    """The solution as a function of the start and θ whose backward is the implicit rule."""

    @staticmethod
    def forward(
        ctx: Any, job: tuple[Any, ...], value: Tensor, start: Tensor, *theta: Tensor
    ) -> Tensor:
        ctx.job = job
        ctx.save_for_backward(value)
        return value.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, b: Tensor) -> tuple[Tensor | None, ...]:
        rule, energy, record, delta = ctx.job
        (value,) = ctx.saved_tensors
        wanted = [i for i, need in enumerate(ctx.needs_input_grad[3:]) if need]
        theta_gradients = rule.pull_back(energy, value, b, wanted, record, delta)
        at_start = None if delta is None else theta_gradients.pop()
        needs_start = at_start is not None and ctx.needs_input_grad[2]
        if wanted and not needs_start and all(g is None for g in theta_gradients):
            raise RuntimeError(
                "the implicit gradient is identically zero: the energy's gradient does not depend "
                "on any of the params. Read them from the second argument of the energy (not from "
                "a closure), and let the energy contain what you differentiate (a prior, a weight "
                "decay, a backbone)"
            )
        gradients: dict[int, Tensor | None] = dict(zip(wanted, theta_gradients, strict=True))
        return None, None, at_start, *(gradients.get(i) for i in range(len(energy.theta)))


def implicit_solve(
    energy: Callable[[Any, Any], Tensor],
    start: Any,
    params: Any,
    *,
    solver: Solver | None = None,
    curvature: Curvature | str = "energy",
    linear_solver: LinearSolver | None = None,
    stopping: Stopping | None = None,
    record: Record | None = None,
) -> Any:
    """Minimize ``energy(v, params)`` over v; the solution's backward is the implicit rule.

    A drop-in for an unrolled inner loop: gradients reach every tensor in ``params`` that requires
    them, in memory that does not depend on the number of inner steps.

    Args:
        energy: returns a scalar, or T values for T independent problems, each tensor of v then
            having a leading dimension T. It must read the differentiated tensors from ``params``.
        start: where to begin: a tensor, or a dict, tuple or list of tensors.
        params: tensors (in any such structure) that the energy depends on.
        solver: how to minimize; the default is Newton–CG, which converges on smooth convex
            problems without tuning.
        curvature: ``"energy"``, or a `Curvature` (damping is then absolute, H + μI).
        linear_solver: how H u = b is solved; the default is CG to (nearly) machine precision.
        stopping: see `Implicit`; gradients then reach the start too, if it requires them.
        record: receives what happened (``record.solution``, ``record.linear``).

    >>> decay = torch.tensor(2.0, requires_grad=True)
    >>> w = implicit_solve(lambda w, c: ((w - 3) ** 2 + c * w**2).sum(), torch.zeros(1), decay)
    >>> w.sum().backward()      # w = 3 / (1 + c), so dw/dc = −3 / (1 + c)²
    >>> round(decay.grad.item(), 4)
    -0.3333
    """
    choice = Curvature(curvature) if isinstance(curvature, str) else curvature  # type: ignore[arg-type]
    check_part("curvature", choice)
    if solver is not None:
        check_part("solver", solver)
    if choice.kind != "energy" or choice.block != "all":
        raise ValueError(
            'implicit_solve knows only energy(v, params), so curvature must be "energy" on all '
            f"of v; got {choice.kind!r} on {choice.block!r} (the learner's methods have the others)"
        )
    leaves, spec = pytree.tree_flatten(params)
    learned = tuple(
        i for i, p in enumerate(leaves) if isinstance(p, Tensor) and p.is_floating_point()
    )
    with torch.no_grad():
        first = energy(start, params)
    if not isinstance(first, Tensor) or first.dim() > 1:
        got = tuple(first.shape) if isinstance(first, Tensor) else type(first).__name__
        raise ValueError(f"energy must return a scalar, or one value per problem; got {got}")
    structure = Structure.of(start, first.shape[0] if first.dim() else None)
    begin = structure.join(start)
    v = begin.detach()
    eps = torch.finfo(v.dtype).eps
    task = PlainEnergy(energy, structure, tuple(leaves), spec, learned)
    if solver is None:
        # a tolerance in the energy's own units
        size = energy_and_gradient(detached(task), v)[1].norm(dim=-1)
        size = size[(size > 0) & size.isfinite()]
        solver = NewtonCG(
            steps=100,
            tol=eps**0.75 * (float(size.min()) if len(size) else 1.0),
            curvature=choice,
            linear_solver=ConjugateGradient(steps=500, tol=1e-4),
        )
    if linear_solver is None:
        linear_solver = ConjugateGradient(steps=1000, tol=eps**0.9)
    record = record if record is not None else Record()
    rule = Implicit(choice, linear_solver, warn=True, stopping=stopping)
    solved = rule(task, begin, solver, record)
    _report_solve(record.solution, stationary=not stopping)
    return structure.split(solved)


def _report_linear(solution: LinearSolution) -> None:
    """Warn if the linear solve behind the gradient failed."""
    for reason in (Reason.NEGATIVE_CURVATURE, Reason.SINGULAR, Reason.NONFINITE):
        count = int((solution.reason == reason).sum())
        if count:
            warnings.warn(
                f"implicit_solve: for {count} of {solution.reason.numel()} problems the linear "
                f"solve behind the gradient {reason.sentence} (relative residual up to "
                f"{float(solution.residual.max()):.1e}); is the start a saddle, or does the energy "
                "ignore part of v? linear_solver=Dense() gives the minimum-norm solution",
                RuntimeWarning,
                stacklevel=2,
            )


def _report_solve(solution: Solution | None, stationary: bool) -> None:
    """Never hide a failed solve: raise if all problems failed, warn if some did, or if the solver
    did not end where the rule assumes."""
    assert solution is not None
    failed = int(solution.diverged.sum())
    if failed == solution.diverged.numel():
        raise FloatingPointError(
            "implicit_solve: the inner solve met values that are not finite; lower the solver's "
            "step size, or start elsewhere"
        )
    if failed:
        warnings.warn(
            f"implicit_solve: {failed} of {solution.diverged.numel()} problems diverged and were "
            "left at their start; lower the solver's step size",
            RuntimeWarning,
            stacklevel=3,
        )
    if stationary and solution.gradient is not None:
        size = torch.where(solution.diverged, 0.0, solution.gradient.norm(dim=-1)).max()
        scale = torch.finfo(solution.value.dtype).eps ** 0.25
        reach = 1 + solution.energy_before.abs().max()
        if size > scale * reach:
            warnings.warn(
                f"implicit_solve: the solver ended at ‖∇E‖ = {size:.1e}; the implicit gradient "
                "assumes a stationary point (take more steps; is the energy smooth, and bounded "
                "below?)",
                RuntimeWarning,
                stacklevel=3,
            )
