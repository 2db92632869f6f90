"""How does the Neumann series solve a system? With products only: H⁻¹ = η Σₖ (I − ηH)ᵏ."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ibaml.arguments import check_count, check_number
from ibaml.linalg.result import (
    LinearSolution,
    MatVec,
    Reason,
    dot,
    norm,
    per_system,
    relative_residual,
)


@dataclass(frozen=True)
class Neumann:
    """Solve ``H u = b`` by u ← u + η·M⁻¹(b − H u), where M⁻¹ is the preconditioner of the system.

    Args:
        steps: terms of the series after the first (products with H).
        scale: η; converges for η < 2/λ_max(M⁻¹H). ``None`` estimates λ_max by ``power_steps``
            products with H.
        power_steps: how many products that estimate takes.

    >>> Neumann(steps=50, scale=0.4)(lambda u: 2 * u, torch.tensor([2.0])).value
    tensor([1.])
    """

    steps: int = 20
    scale: float | None = None
    power_steps: int = 10

    def __post_init__(self) -> None:
        check_count("steps", self.steps, 0)
        if self.scale is not None:
            check_number("scale", self.scale, above=0)
        check_count("power_steps", self.power_steps, 1)

    def __call__(
        self, matvec: MatVec, b: Tensor, precondition: MatVec | None = None
    ) -> LinearSolution:
        solve = precondition or _unchanged
        eta: Tensor | float
        eta = self.scale if self.scale is not None else 0.95 / self._largest(matvec, b, solve)
        u = torch.zeros_like(b)
        r = b
        reason = torch.full_like(per_system(dot(b, b)), Reason.STEPS, dtype=torch.long)
        steps = torch.zeros_like(reason)
        limit = 1e3 * norm(b)
        for _ in range(self.steps + 1):
            trial = u + solve(eta * r)
            r_next = b - matvec(trial)
            # Growth is divergence: an eigenvalue is negative, or η too large. Keep the last good.
            finite = r_next.isfinite().all(-1) if b.dim() else r_next.isfinite()
            reason = torch.where(finite, reason, Reason.NONFINITE)
            grown = per_system(norm(r_next) > limit)
            reason = torch.where(
                finite & grown & (reason == Reason.STEPS), Reason.NEGATIVE_CURVATURE, reason
            )
            active = reason == Reason.STEPS
            mask = active[..., None] if b.dim() else active
            u, r = torch.where(mask, trial, u), torch.where(mask, r_next, r)
            steps = steps + active
        exact = relative_residual(r, b) <= 10 * torch.finfo(b.dtype).eps
        reason = torch.where(exact & (reason == Reason.STEPS), Reason.CONVERGED, reason)
        return LinearSolution(u, steps, relative_residual(r, b), reason)

    def _largest(self, matvec: MatVec, b: Tensor, solve: MatVec) -> Tensor:
        """Largest eigenvalue of M⁻¹H by power iteration from a fixed vector."""
        n = b.shape[-1] if b.dim() else 1
        rough = torch.sin(1.0 + torch.arange(n, dtype=b.dtype, device=b.device) ** 2)
        p = rough.expand_as(b) if b.dim() else rough[0]
        for _ in range(self.power_steps):
            p = p / norm(p)
            p = solve(matvec(p))
        size = norm(p)
        return torch.where((size > 0) & size.isfinite(), size, torch.ones_like(size))


def _unchanged(r: Tensor) -> Tensor:
    return r
