"""How does Newton–CG solve a task? By few, expensive steps with a line search."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from ibaml.arguments import check_count, check_number, check_part
from ibaml.curvature import Curvature
from ibaml.energy import Energy, TaskEnergy, detached
from ibaml.linalg import ConjugateGradient, LinearSolver, Reason, all_done
from ibaml.solve.base import Solution, energy_and_gradient


@dataclass(frozen=True)
class NewtonCG:
    """Minimize E by steps that solve H p = −∇E by CG, each task with its own line search.

    Args:
        steps: at most this many Newton steps.
        tol: stop a task at ‖∇E‖ ≤ tol.
        curvature: H; Gauss–Newton is safe anywhere, ``Curvature("energy")`` is quadratic near a
            solution (a direction of negative curvature is left out).
        linear_solver: how the Newton equation is solved.
        radius: no log-variance moves by more than this in one step (trust region).
        halvings: at most this many halvings of a step.
    """

    steps: int = 10
    tol: float | None = None
    curvature: Curvature = field(default_factory=lambda: Curvature("ggn"))
    linear_solver: LinearSolver = field(
        default_factory=lambda: ConjugateGradient(steps=50, tol=1e-3)
    )
    radius: float = 2.0
    halvings: int = 30

    def __post_init__(self) -> None:
        check_count("steps", self.steps, 0)
        if self.tol is not None:
            check_number("tol", self.tol, above=0)
        check_part("curvature", self.curvature)
        check_part("linear_solver", self.linear_solver)
        check_number("radius", self.radius, above=0)
        check_count("halvings", self.halvings, 0)
        if self.curvature.kind == "lemma":
            raise ValueError('NewtonCG minimizes E: its curvature is "ggn" or "energy"')

    def solve(
        self, energy: Energy, start: Tensor, *, rate: Tensor | None = None, examine: bool = True
    ) -> Solution:
        energy = detached(energy)
        start = start.detach()
        v = start
        value, gradient = energy_and_gradient(energy, v)
        before = value
        reason = torch.full_like(value, Reason.STEPS, dtype=torch.long)
        reason = torch.where(value.isfinite(), reason, Reason.NONFINITE)
        steps = torch.zeros_like(reason)
        for _ in range(self.steps):
            if self.tol is not None:
                small = (reason == Reason.STEPS) & (gradient.norm(dim=-1) <= self.tol)
                reason = torch.where(small, Reason.CONVERGED, reason)
            active = reason == Reason.STEPS
            if all_done(active):
                break
            p = self._direction(energy, v, gradient)
            v, value, gradient, moved = self._search(energy, v, p, value, gradient, active)
            steps = steps + moved
            reason = torch.where(active & ~moved, Reason.STALLED, reason)
        if self.tol is not None:
            small = (gradient.norm(dim=-1) <= self.tol) & (reason != Reason.NONFINITE)
            reason = torch.where(small, Reason.CONVERGED, reason)
        return Solution(v, steps, reason, before, value, gradient)

    def _direction(self, energy: Energy, v: Tensor, gradient: Tensor) -> Tensor:
        h = self.curvature.at(energy, v)
        p = self.linear_solver(h.product, -gradient, h.precondition).value
        descends = ((p * gradient).sum(-1, keepdim=True) < 0) & p.isfinite().all(-1, keepdim=True)
        steepest = -gradient if h.precondition is None else -h.precondition(gradient)
        p = torch.where(descends, p, steepest)
        scales = (
            energy.belief.log_scales(energy.layout.size) if isinstance(energy, TaskEnergy) else None
        )
        return p if scales is None else self._within(energy, v, p, gradient, scales)

    @torch.no_grad()
    def _within(
        self, energy: Energy, v: Tensor, p: Tensor, gradient: Tensor, scales: slice
    ) -> Tensor:
        """p inside the trust region, by the better of two ways. Either every log-variance is
        clipped alone, so that one of them does not limit the means; or all of p is shortened, for
        steps whose means would go too far as well."""
        rho = p[:, scales]
        clamped = rho.clamp(-self.radius, self.radius)
        clipped = torch.cat([p[:, : scales.start], clamped, p[:, scales.stop :]], -1)
        reach = rho.abs().amax(-1, keepdim=True)
        shortened = p * (self.radius / reach.clamp(min=self.radius))
        descends = (clipped * gradient).sum(-1) < 0
        better = descends & (energy(v + clipped) < energy(v + shortened))
        return torch.where(better[:, None], clipped, shortened)

    def _search(
        self,
        energy: Energy,
        v: Tensor,
        p: Tensor,
        value: Tensor,
        gradient: Tensor,
        active: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Backtrack to a sufficient decrease of E, or, where E is flat to rounding, of ‖∇E‖."""
        slope, size = (p * gradient).sum(-1), gradient.norm(dim=-1)
        rounding = torch.finfo(v.dtype).eps * value.abs()
        flat = slope.abs() <= 100 * rounding
        length = torch.ones_like(value)
        moved = torch.zeros_like(active)
        result, reached_value, reached_gradient = v, value, gradient
        for _ in range(self.halvings + 1):
            trial = v + length[:, None] * p
            trial_value, trial_gradient = energy_and_gradient(energy, trial)
            decreases = trial_value <= value + 1e-4 * length * slope
            level = trial_value <= value + 100 * rounding
            flattens = (trial_gradient.norm(dim=-1) < size) & level
            accepted = active & ~moved & torch.where(flat, flattens, decreases)
            result = torch.where(accepted[:, None], trial, result)
            reached_value = torch.where(accepted, trial_value, reached_value)
            reached_gradient = torch.where(accepted[:, None], trial_gradient, reached_gradient)
            moved = moved | accepted
            if all_done(active & ~moved):
                break
            length = torch.where(moved, length, length / 2)
        return result, reached_value, reached_gradient, moved
