"""How do conjugate gradients solve many systems at once, without waiting for the device?

Every scalar of the method is kept per system, and a mask freezes a system that is finished or has
failed, so that it never affects its neighbors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ibaml.arguments import check_count, check_flag, check_number, check_word
from ibaml.linalg.result import (
    LinearSolution,
    MatVec,
    Reason,
    all_done,
    dot,
    is_recorded,
    norm,
    per_system,
    relative_residual,
)


@dataclass(frozen=True)
class ConjugateGradient:
    """Solve ``H u = b`` for a symmetric positive definite H by (preconditioned) CG.

    Args:
        steps: at most this many products with H (the paper's L).
        tol: stop a system at ‖b − Hu‖ ≤ tol·‖b‖. ``None`` takes exactly ``steps`` steps (systems
            solved to machine precision stay as they are) and never waits for the device.
        precondition: use the preconditioner of the system, if it has one.
        start: ``"zero"``, or ``"preconditioned"`` for the warm start u₀ = M⁻¹b.
        refresh: recompute the true residual after this many steps, against rounding drift.
        recorded: at most this many steps in a CUDA recording, where the residual cannot be read
            and all steps are taken; None for ``steps``.
        trust: a system that meets a direction p with pᵀHp < trust·pᵀMp, M the matrix that the
            preconditioner inverts, is given up: its value is M⁻¹b. None: it stops at a direction of
            negative curvature, at the iterate before it.

    >>> A = torch.tensor([[2.0, 0.0], [0.0, 4.0]])
    >>> u = ConjugateGradient(steps=2)(lambda u: u @ A, torch.tensor([2.0, 4.0])).value
    >>> u.round(decimals=4)
    tensor([1., 1.])
    """

    steps: int = 5
    tol: float | None = None
    precondition: bool = True
    start: Literal["zero", "preconditioned"] = "zero"
    refresh: int = 50
    recorded: int | None = None
    trust: float | None = None

    def __post_init__(self) -> None:
        check_count("steps", self.steps, 0)
        if self.tol is not None:
            check_number("tol", self.tol, least=0)
        check_flag("precondition", self.precondition)
        check_word("start", self.start, ("zero", "preconditioned"))
        check_count("refresh", self.refresh, 1)
        if self.recorded is not None:
            check_count("recorded", self.recorded, 1)
        if self.trust is not None:
            check_number("trust", self.trust, least=0)

    def __call__(
        self, matvec: MatVec, b: Tensor, precondition: MatVec | None = None
    ) -> LinearSolution:
        eps = torch.finfo(b.dtype).eps
        solve = precondition if self.precondition and precondition is not None else _unchanged
        target = norm(b) * max(self.tol or 0.0, eps)

        if self.start == "preconditioned" and precondition is not None:
            u = precondition(b)
            r = b - matvec(u)
        else:
            u, r = torch.zeros_like(b), b
        z = solve(r)
        p, rz = z, dot(r, z)
        mp = r  # M p, without a product with M
        largest = torch.zeros_like(rz)  # Rayleigh quotient, the scale that zero is compared with
        steps = torch.zeros_like(rz, dtype=torch.long)
        reason = torch.full_like(steps, Reason.STEPS)
        reason = torch.where(norm(r) <= target, Reason.CONVERGED, reason)
        reason = torch.where(rz.isfinite(), reason, Reason.NONFINITE)
        u = torch.where(reason == Reason.NONFINITE, torch.zeros_like(u), u)

        max_steps = self.steps
        if self.recorded is not None and is_recorded(b):
            max_steps = min(self.steps, self.recorded)
        for k in range(max_steps):
            active = reason == Reason.STEPS
            if self.tol is not None and all_done(active):
                break
            q = matvec(p)
            curvature = dot(p, q)
            rayleigh = curvature / dot(p, mp)
            largest = torch.maximum(largest, torch.where(active, rayleigh, largest))
            flat = rayleigh.abs() <= 10 * eps * largest
            bends = curvature < 0 if self.trust is None else rayleigh < self.trust
            reason = torch.where(active & bends, Reason.NEGATIVE_CURVATURE, reason)
            reason = torch.where(active & (flat | (curvature == 0)), Reason.SINGULAR, reason)
            reason = torch.where(active & ~curvature.isfinite(), Reason.NONFINITE, reason)
            active = reason == Reason.STEPS

            alpha = rz / curvature
            u = torch.where(active, u + alpha * p, u)
            if (k + 1) % self.refresh == 0:
                r = torch.where(active, b - matvec(u), r)
            else:
                r = torch.where(active, r - alpha * q, r)
            z = solve(r)
            rz_next = dot(r, z)
            p = torch.where(active, z + (rz_next / rz) * p, p)
            mp = torch.where(active, r + (rz_next / rz) * mp, mp)
            rz = torch.where(active, rz_next, rz)
            steps = steps + active
            reason = torch.where(active & (norm(r) <= target), Reason.CONVERGED, reason)

        if self.trust is not None:
            stopped = (reason == Reason.NEGATIVE_CURVATURE) | (reason == Reason.SINGULAR)
            u = torch.where(stopped, solve(b), u)
        return LinearSolution(
            value=u,
            steps=per_system(steps),
            residual=relative_residual(r, b),
            reason=per_system(reason),
        )


def _unchanged(r: Tensor) -> Tensor:
    return r
