"""How are covariances factored when some may be singular, and some ill?"""

from __future__ import annotations

import torch
from torch import Tensor


def cholesky(matrices: Tensor) -> Tensor:
    """Lower factors, NaN where a matrix has none: one failure is one task's, and no one waits."""
    factor, info = torch.linalg.cholesky_ex(matrices)
    return factor.masked_fill((info != 0)[..., None, None], torch.nan)


def solve(factor: Tensor, right: Tensor) -> Tensor:
    """(L Lᵀ)⁻¹ right, by operations that a CUDA graph can record."""
    half = torch.linalg.solve_triangular(factor, right, upper=False)
    return torch.linalg.solve_triangular(factor.mT, half, upper=True)


def lower_factor(covariance: Tensor) -> Tensor:
    """Lower Cholesky factor of covariances (…, C, C) that may be singular.

    A covariance with directions of no spread (an example without features, say) gets a jitter of
    rounding size, relative to its trace; where rounding left it indefinite, a hundred or ten
    thousand times as much.
    """
    size = covariance.shape[-1]
    numbers = torch.finfo(covariance.dtype)
    eye = torch.eye(size, dtype=covariance.dtype, device=covariance.device)
    with torch.no_grad():
        trace = covariance.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]
        jitter = 8 * size * numbers.eps * trace + numbers.tiny**0.5
        for _ in range(2):
            failed = torch.linalg.cholesky_ex(covariance + jitter * eye).info != 0
            looks = covariance.device.type == "cpu" and not torch.compiler.is_compiling()
            if looks and not failed.any():
                break  # to look is free only here
            jitter = torch.where(failed[..., None, None], 100 * jitter, jitter)
    return cholesky(covariance + jitter * eye)
