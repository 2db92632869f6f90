"""How is a system solved exactly? Build H column by column and factor it, for small models."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ibaml.linalg.result import LinearSolution, MatVec, Reason, relative_residual


def dense_matrix(matvec: MatVec, like: Tensor) -> Tensor:
    """The matrix of ``matvec`` for vectors shaped like ``like`` (..., n), as (..., n, n)."""
    columns = []
    for i in range(like.shape[-1]):
        unit = torch.zeros_like(like)
        unit[..., i] = 1
        columns.append(matvec(unit))
    return torch.stack(columns, -1)


@dataclass(frozen=True)
class Dense:
    """Solve ``H u = b`` exactly for a symmetric H, definite or not; n products and O(n³) work.

    A singular H (to working precision) is reported, and the result is the minimum-norm solution
    H†b. An indefinite H is reported as negative curvature and solved all the same.

    >>> A = torch.tensor([[0.0, 1.0], [1.0, 0.0]])
    >>> Dense()(lambda u: u @ A, torch.tensor([3.0, 5.0])).value
    tensor([5., 3.])
    """

    def __call__(
        self, matvec: MatVec, b: Tensor, precondition: MatVec | None = None
    ) -> LinearSolution:
        if b.dim() == 0:
            solution = self(lambda u: matvec(u[0])[None], b[None])
            return LinearSolution(
                solution.value[0], solution.steps, solution.residual, solution.reason
            )
        n = b.shape[-1]
        h = dense_matrix(matvec, b)
        h = (h + h.mT) / 2
        bad = ~(h.isfinite().all(-1).all(-1) & b.isfinite().all(-1))
        eye = torch.eye(n, dtype=b.dtype, device=b.device)
        h = torch.where(bad[..., None, None], eye, h)

        # Symmetric scaling first: means and log-variances differ by many orders of magnitude.
        scale = h.abs().amax(-1)
        scale = torch.where(scale > 0, scale, torch.ones_like(scale)).rsqrt()
        values, vectors = torch.linalg.eigh(scale[..., :, None] * h * scale[..., None, :])
        size = values.abs()
        singular = size.amin(-1) <= n * torch.finfo(b.dtype).eps * size.amax(-1)
        indefinite = values.amin(-1) < 0

        def invert(r: Tensor) -> Tensor:
            y = vectors.mT @ (scale * r)[..., None]
            return scale * (vectors @ (y / values[..., None]))[..., 0]

        u = invert(b)
        u = u + invert(b - (h @ u[..., None])[..., 0])  # one step of iterative refinement
        if bool(singular.any()):
            least = torch.linalg.pinv(h, hermitian=True) @ b[..., None]
            u = torch.where(singular[..., None], least[..., 0], u)
        u = torch.where(bad[..., None], torch.zeros_like(u), u)

        reason = torch.full_like(bad, Reason.CONVERGED, dtype=torch.long)
        reason = torch.where(indefinite, Reason.NEGATIVE_CURVATURE, reason)
        reason = torch.where(singular, Reason.SINGULAR, reason)
        reason = torch.where(bad, Reason.NONFINITE, reason)
        return LinearSolution(
            value=u,
            steps=torch.full_like(reason, n),
            residual=relative_residual(b - (h @ u[..., None])[..., 0], b),
            reason=reason,
        )
