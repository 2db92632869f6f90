"""How are covariances factored when some may be singular, and some ill?"""

from __future__ import annotations

import torch
from torch import Tensor


def cholesky(matrices: Tensor) -> Tensor:
    """Lower factors, NaN where a matrix has none: one failure is one task's, and no one waits."""
    factor, info = torch.linalg.cholesky_ex(matrices)
    return factor.masked_fill((info != 0)[..., None, None], torch.nan)


def lower_factor(covariance: Tensor) -> Tensor:
    """Lower Cholesky factor of covariances (…, C, C) that may be singular.

    A covariance with directions of no spread (an example without features, say) gets a jitter of
    rounding size, relative to its trace.
    """
    size = covariance.shape[-1]
    numbers = torch.finfo(covariance.dtype)
    trace = covariance.detach().diagonal(dim1=-2, dim2=-1).mean(-1)
    jitter = 8 * size * numbers.eps * trace + numbers.tiny**0.5
    eye = torch.eye(size, dtype=covariance.dtype, device=covariance.device)
    return cholesky(covariance + jitter[..., None, None] * eye)
