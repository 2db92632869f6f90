"""How is a linear head with a diagonal Gaussian solved? By Newton's method in (m, σ).

With noise on the outputs E is (nearly) strictly convex in the means and standard deviations: it
has one minimum, and a Newton step descends from anywhere. The log-variances that are solved for
only name σ. A step in them is taken in t = δσ/σ, where with J = ∂(a, b)/∂(m, t), the outputs' means
a and variances b, and B the loss's second derivative in those,

    ∇²E = JᵀBJ + diag(κ·exp(−ρ₀), 2κ + 2∇_ρ E).
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields

import torch
from torch import Tensor

from ibaml.arguments import check_count, check_number, check_part
from ibaml.energy import ByTarget, Categorical, Energy, TaskEnergy, detached
from ibaml.heads.by_moments import ByMoments, by_moments, placed, softmax_by_moments
from ibaml.heads.dual import safe_length
from ibaml.heads.points import deviation
from ibaml.linalg import ConjugateGradient, LinearSolver, Reason, all_done, is_recorded
from ibaml.solve.base import Solution

_LENGTHS = 4
_FEW = 200  # so many moments of outputs, and solving with their matrix is faster than CG


@dataclass(frozen=True)
class HeadNewton:
    """Newton's method for `DiagonalGaussian` on a linear head, with ``noise="outputs"``.

    A step's length is the best of four between 1 and log(1 + δ)/δ, with δ the most by which the
    full step moves an output, or two of an example apart (`ibaml.heads.dual.laplace` says why). All
    four are evaluated at once, and a step of any length keeps σ > 0.

    Args:
        steps: at most this many.
        tol: stop a task when ‖∇E‖ is at most this times what it was at the start; None never.
        linear_solver: how the Newton equation is solved, preconditioned by the diagonal above. Up
            to 100 examples × outputs a task it is solved exactly, in the dual.
    """

    steps: int = 16
    tol: float | None = 1e-5
    linear_solver: LinearSolver = field(
        default_factory=lambda: ConjugateGradient(steps=20, tol=0.1, recorded=10)
    )

    def __post_init__(self) -> None:
        check_count("steps", self.steps, 0)
        if self.tol is not None:
            check_number("tol", self.tol, above=0)
        check_part("linear_solver", self.linear_solver)

    @torch.no_grad()
    def solve(
        self, energy: Energy, start: Tensor, *, rate: Tensor | None = None, examine: bool = True
    ) -> Solution:
        heads = _Heads(_checked(energy))
        at = heads.at(start.detach())
        before, first = at.value, at.gradient.norm(dim=-1)
        reason = torch.full_like(before, Reason.STEPS, dtype=torch.long)
        reason = torch.where(before.isfinite() & first.isfinite(), reason, Reason.NONFINITE)
        steps = torch.zeros_like(reason)
        for _ in range(self.steps):
            reason = self._converged(at, first, reason)
            active = reason == Reason.STEPS
            if all_done(active):
                break
            new, slope = heads.best_along(at, self._direction(heads, at))
            moved = active & _is_better(at, new, slope)
            at = at.where(moved, new)
            steps = steps + moved
            reason = torch.where(active & ~moved, Reason.STALLED, reason)
        reason = self._converged(at, first, reason)
        return Solution(at.v, steps, reason, before, at.value, at.gradient)

    def _converged(self, at: _At, first: Tensor, reason: Tensor) -> Tensor:
        if self.tol is None:
            return reason
        small = (at.gradient.norm(dim=-1) <= self.tol * first) & (reason != Reason.NONFINITE)
        return torch.where(small, Reason.CONVERGED, reason)

    def _direction(self, heads: _Heads, at: _At) -> Tensor:
        """(δm, t) by the Newton equation, or the preconditioned gradient where that does not
        descend (with most points E is only nearly convex)."""
        diagonal = heads.diagonal(at)
        mean, spread = diagonal.chunk(2, -1)
        safe = torch.cat([mean, spread.clamp(min=heads.kappa)], -1)
        slope = heads.in_t(at.gradient)
        if 2 * heads.outputs <= _FEW and not is_recorded(slope):
            step = heads.exact_step(at, safe, slope)
        else:
            step = self.linear_solver(
                lambda u: heads.pulled(at, at.curved(heads.seen(at, u))) + diagonal * u,
                -slope,
                lambda r: r / safe,
            ).value
        descends = ((step * slope).sum(-1) < 0) & step.isfinite().all(-1)
        return torch.where(descends[:, None], step, -slope / safe)


@dataclass(frozen=True)
class _At:
    """A point: v, E, its gradient in v, the variances as rows, and the loss in the outputs."""

    v: Tensor
    value: Tensor
    gradient: Tensor
    variance: Tensor
    moments: Tensor
    curvature: Tensor

    def curved(self, seen: Tensor) -> Tensor:
        """B times changes of the outputs' moments (T, N, 2C)."""
        return (self.curvature @ seen[..., None])[..., 0]

    def where(self, moved: Tensor, new: _At) -> _At:
        pairs = ((getattr(self, f.name), getattr(new, f.name)) for f in fields(self))
        return _At(*(torch.where(moved.view(-1, *[1] * (a.dim() - 1)), b, a) for a, b in pairs))


class _Heads:
    """The heads of all tasks as functions of v = (m, ρ) and of steps (δm, t)."""

    def __init__(self, energy: TaskEnergy) -> None:
        assert energy.points is not None
        self.energy, self.points = energy, energy.points
        self.n = energy.layout.size
        self.kappa = energy.kappa
        self.features = energy.head_features()
        self.squares = self.features.square()
        self.outputs = energy.y.shape[1] * energy.points.shape[1]
        self.bias = None if energy.adapts_bias else energy.fixed_bias()
        # a subclass may have another nll
        self.softmax = type(energy.likelihood) in (Categorical, ByTarget) and (
            energy.likelihood.takes_labels(energy.y)
        )

    def at(self, v: Tensor) -> _At:
        mean, variance = self.energy.rows(v[:, : self.n]), self.energy.rows(v[:, self.n :].exp())
        outputs = self.features @ mean.mT
        outputs = outputs if self.bias is None else outputs + self.bias
        moments = torch.cat([outputs, self.squares @ variance.mT], -1)
        loss = self._loss(moments)
        m, rho = self.energy.meta.prior
        off, ratio = v[:, : self.n] - m, torch.expm1(v[:, self.n :] - rho)
        penalty = self.kappa * torch.cat([off * (-rho).exp(), ratio / 2], -1)
        pull = self._transposed(variance, loss.slope)
        value = loss.value + self.energy.penalty(v)
        return _At(v, value, pull + penalty, variance, moments, loss.curvature)

    def _loss(self, moments: Tensor) -> ByMoments:
        if self.softmax:
            return softmax_by_moments(self.energy.y, moments, self.points)
        loss = self.energy.output_loss
        return by_moments(lambda outputs: loss(outputs.transpose(1, 2)), moments, self.points)

    def seen(self, at: _At, step: Tensor) -> Tensor:
        """J·(δm, t): changes of the outputs' means and variances, (T, N, 2C)."""
        mean, t = self.energy.rows(step[:, : self.n]), self.energy.rows(step[:, self.n :])
        changes = self.features @ mean.mT, self.squares @ (2 * at.variance * t).mT
        return torch.cat(changes, -1)

    def pulled(self, at: _At, moments: Tensor) -> Tensor:
        """Jᵀ times (T, N, 2C), (T, dim)."""
        return self.in_t(self._transposed(at.variance, moments))

    def _transposed(self, variance: Tensor, moments: Tensor) -> Tensor:
        by_mean, by_variance = moments.mT.chunk(2, -2)
        parts = by_mean @ self.features, variance * (by_variance @ self.squares)
        return torch.cat([self.energy.flat(part) for part in parts], -1)

    def in_t(self, gradient: Tensor) -> Tensor:
        """A gradient in (m, t) instead of (m, ρ): ρ changes by 2t."""
        return torch.cat([gradient[:, : self.n], 2 * gradient[:, self.n :]], -1)

    def diagonal(self, at: _At) -> Tensor:
        """What ∇²E in (m, t) has besides JᵀBJ."""
        precision = self.kappa * (-self.energy.meta.prior[1]).exp()
        spread = 2 * (self.kappa + at.gradient[:, self.n :])
        return torch.cat([precision.expand_as(spread), spread], -1)

    def exact_step(self, at: _At, diagonal: Tensor, slope: Tensor) -> Tensor:
        """−(D + JᵀBJ)⁻¹∇E by Woodbury's formula: D⁻¹(Jᵀw − ∇E) with (I + BK)w = BJD⁻¹∇E and the
        Gram matrices K = JD⁻¹Jᵀ of the outputs, as many unknowns as moments of outputs."""
        alone = -slope / diagonal
        of_mean, of_t = self.energy.rows(1 / diagonal.unflatten(-1, (2, -1))).unbind(1)
        grams = torch.cat(
            [
                (self.features[:, None] * of_mean[:, :, None]) @ self.features[:, None].mT,
                (self.squares[:, None] * (4 * at.variance.square() * of_t)[:, :, None])
                @ self.squares[:, None].mT,
            ],
            1,
        )  # (T, 2C, N, N)
        matrix = at.curvature[:, :, :, None] * grams.permute(0, 2, 3, 1)[:, :, None]
        matrix = matrix.flatten(3, 4).flatten(1, 2)  # rows and columns (n, output's moment)
        eye = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
        target = at.curved(self.seen(at, alone)).flatten(1)
        w = torch.linalg.solve_ex(matrix + eye, target).result.view_as(at.moments)
        return alone - self.pulled(at, w) / diagonal

    def best_along(self, at: _At, step: Tensor) -> tuple[_At, Tensor]:
        """The best of four points along a step, and how much its length should decrease E."""
        seen = self.seen(at, step)
        lengths = _lengths(at.moments, seen, self.points)  # (T, 4)
        trials = _along(at.v, step, lengths, self.n)
        variances = self.energy.rows(trials[..., self.n :].exp())  # (T, 4, C, F)
        spread = (self.squares @ variances.flatten(1, 2).mT).unflatten(-1, variances.shape[1:3])
        means, moved = (x.chunk(2, -1)[0][:, :, None] for x in (at.moments, seen))
        moments = torch.cat([means + lengths[:, None, :, None] * moved, spread], -1)
        outputs = placed(moments, self.points).movedim(1, 3)  # (T, 4, S, N, C)
        nll = self.energy.nll(outputs.flatten(1, 2)).unflatten(1, outputs.shape[1:3])
        values = nll.mean((2, 3)) + self.energy.penalty(trials)
        best = values.nan_to_num(nan=torch.inf).argmin(-1, keepdim=True)
        slope = (self.in_t(at.gradient) * step).sum(-1)
        best = torch.where(_is_flat(at, slope)[:, None], 0, best)
        chosen = trials.gather(1, best[..., None].expand(-1, 1, trials.shape[-1]))[:, 0]
        return self.at(chosen), slope * lengths.gather(1, best)[:, 0]


def _along(v: Tensor, step: Tensor, lengths: Tensor, n: int) -> Tensor:
    """v after steps of these lengths, (T, lengths, dim). A σ that grows is multiplied by 1 + t, one
    that shrinks by 1/√(1 − 2t): so one that has to follow a precision gets there in one step."""
    moved = lengths[..., None] * step[:, None]
    t = moved[..., n:]
    change = 2 * t.clamp_min(0).log1p() - (-2 * t.clamp_max(0)).log1p()
    return v[:, None] + torch.cat([moved[..., :n], change], -1)


def _lengths(moments: Tensor, seen: Tensor, points: Tensor) -> Tensor:
    """Lengths from 1 down to what surely descends, (T, 4)."""
    root = deviation(moments.chunk(2, -1)[1])[..., None, :]
    mean, change = seen[..., None, :].chunk(2, -1)
    outputs = mean + change / (2 * root) * points
    outputs = torch.nn.functional.pad(outputs.flatten(1, 2), (0, 1))  # and how far one moves
    share = torch.linspace(0, 1, _LENGTHS, dtype=moments.dtype, device=moments.device)
    return safe_length(outputs)[:, None] ** share


def _is_flat(at: _At, slope: Tensor) -> Tensor:
    return slope.abs() <= 100 * torch.finfo(slope.dtype).eps * at.value.abs()


def _is_better(at: _At, new: _At, slope: Tensor) -> Tensor:
    """A sufficient decrease of E, or, where E is flat to rounding, of ‖∇E‖."""
    decreases = new.value <= at.value + 1e-4 * slope
    rounding = 100 * torch.finfo(slope.dtype).eps * at.value.abs()
    flattens = new.gradient.norm(dim=-1) < at.gradient.norm(dim=-1)
    flattens = flattens & (new.value <= at.value + rounding)
    fine = new.gradient.isfinite().all(-1) & new.value.isfinite()
    return fine & torch.where(_is_flat(at, slope), flattens, decreases)


def _checked(energy: Energy) -> TaskEnergy:
    if not isinstance(energy, TaskEnergy) or not energy.belief.is_diagonal_gaussian:
        raise ValueError(
            "HeadNewton needs a diagonal Gaussian belief (ibaml or abml): use NewtonCG()"
        )
    if energy.points is None:
        raise ValueError(
            'HeadNewton needs noise="outputs" and adapt="head" with a head that is one nn.Linear: '
            "use NewtonCG() for everything else"
        )
    return detached(energy)
