"""What does a classifier say when its logits are Gaussian? p = E softmax(t·z), z ~ N(μ, Σ).

The expectation is a mean over fixed points, the same for every example and every call, so that an
answer never depends on which other examples were asked about, nor on chance. Probit and mean field
are quick approximations by name, a few percent off where the logits are unsure.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

from ibaml.heads.factor import lower_factor
from ibaml.heads.few import classes_first

PREDICTION_POINTS = 4096
_SEED = 20
_ENTRIES = 2**23  # at most this many logits at a time, 64 MB in float64


def gaussian_points(
    count: int,
    dimension: int,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
) -> Tensor:
    """Fixed points that stand for N(0, I), (count, dimension), all of the same weight.

    Scrambled Sobol' points through the normal quantile, in pairs ±ε, so that odd moments vanish,
    then mapped linearly so that the covariance is exactly I. The same at every call.

    >>> points = gaussian_points(64, 3, torch.float64)
    >>> bool(torch.allclose(points.T @ points / 64, torch.eye(3, dtype=torch.float64)))
    True
    """
    if count < 2 * dimension or count % 2:
        raise ValueError(
            f"count must be even and at least 2·dimension = {2 * dimension} (pairs ±ε that span "
            f"all dimensions), got {count}"
        )
    with torch.inference_mode(False):
        return _gaussian_points(count, dimension, dtype, torch.device(device)).clone()


@lru_cache(maxsize=64)
def _gaussian_points(
    count: int, dimension: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    with torch.inference_mode(False):  # others may need them in a graph
        engine = torch.quasirandom.SobolEngine(dimension, scramble=True, seed=_SEED)
        uniform = engine.draw(count // 2, dtype=torch.float64)
        half = torch.special.ndtri(uniform.clamp(1e-10, 1 - 1e-10))
        factor = torch.linalg.cholesky(half.mT @ half / (count // 2))
        half = torch.linalg.solve_triangular(factor, half.mT, upper=False).mT
        return torch.cat([half, -half]).to(device, dtype)


def axis_points(
    dimension: int, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu"
) -> Tensor:
    """The 2·dimension points ±√dimension·e_i: exact to degree 3, few, and far out.

    They stay the same set when any coordinate changes its sign. With such points the mean of a
    convex loss over z = μ + σ·ε is convex in (μ, σ) for σ ≥ 0, not only nearly.
    """
    corner = math.sqrt(dimension) * torch.eye(dimension, dtype=dtype, device=device)
    return torch.cat([corner, -corner])


def place(mean: Tensor, covariance: Tensor, points: Tensor) -> Tensor:
    """The points (S, C) as logits μ + Σ^{1/2}ε, (…, S, C); Σ^{1/2} is the lower Cholesky factor.

    Args:
        mean: (…, C).
        covariance: (…, C, C), or its diagonal (…, C) where the logits are independent.
    """
    _check(mean, covariance)
    if covariance.dim() == mean.dim():
        return mean[..., None, :] + deviation(covariance)[..., None, :] * points
    return mean[..., None, :] + points @ lower_factor(covariance).mT


def place_first(mean: Tensor, covariance: Tensor, points: Tensor) -> Tensor:
    """As `place`, with the points before the examples: (T, S, N, C) for a mean (T, N, C)."""
    if not classes_first(mean) or covariance.dim() == mean.dim():
        return place(mean, covariance, points).transpose(1, 2)
    _check(mean, covariance)
    rows = lower_factor(covariance).permute(2, 0, 3, 1)  # (C, T, C, N)
    return (points @ rows + mean.permute(2, 0, 1)[:, :, None]).permute(1, 2, 3, 0)


def deviation(variance: Tensor) -> Tensor:
    """√variance, with finite derivatives where an example has no features at all."""
    return variance.clamp_min(torch.finfo(variance.dtype).tiny ** 0.5).sqrt()


def log_predictive(
    mean: Tensor,
    covariance: Tensor,
    temperature: Tensor | float = 1.0,
    count: int = PREDICTION_POINTS,
) -> Tensor:
    """log E softmax(t·z), (…, C), by fixed points. Differentiable in everything.

    With 4,096 points probabilities are within 2e-3 where logits have a standard deviation of 2 or
    less, for 2 to 20 classes; 1,024 are enough for a loss.
    """
    classes = mean.shape[-1]
    points = gaussian_points(count, classes, mean.dtype, mean.device)
    flat_mean = mean.reshape(-1, classes)
    tail = covariance.shape[mean.dim() - 1 :]
    flat_covariance = covariance.reshape(-1, *tail)
    examples = max(1, _ENTRIES // points.numel())
    parts = [
        ((temperature * place(m, v, points)).log_softmax(-1).logsumexp(-2) - math.log(count))
        for m, v in zip(flat_mean.split(examples), flat_covariance.split(examples), strict=True)
    ]
    return torch.cat(parts).reshape(mean.shape)


def predict(
    mean: Tensor,
    covariance: Tensor,
    temperature: Tensor | float = 1.0,
    count: int = PREDICTION_POINTS,
) -> Tensor:
    """Class probabilities E softmax(t·z), (…, C), by fixed points; z ~ N(mean, covariance).

    >>> p = predict(torch.tensor([2.0, 0.0]), torch.tensor([9.0, 9.0]))
    >>> [round(x, 2) for x in p.tolist()]  # the point, without spread, says .88
    [0.67, 0.33]
    """
    return log_predictive(mean, covariance, temperature, count).exp()


def predict_probit(mean: Tensor, covariance: Tensor, temperature: Tensor | float = 1.0) -> Tensor:
    """MacKay's softmax(t·μ_c / √(1 + π·t²·Σ_cc / 8)); about 1e-2 off, at worst 1e-1."""
    variance = temperature**2 * _variance(mean, covariance)
    return (temperature * mean / (1 + math.pi / 8 * variance).sqrt()).softmax(-1)


def predict_mean_field(
    mean: Tensor, covariance: Tensor, temperature: Tensor | float = 1.0
) -> Tensor:
    """Mean field over pairs (Lu, Ie and Sha, 2020), then normalized; about 1e-2 off, at worst 7e-2.

    p_c ∝ 1 / Σ_j exp(−t(μ_c − μ_j) / √(1 + π·t²·Var(z_c − z_j) / 8))
    """
    variance = _variance(mean, covariance)
    of_gap = variance[..., :, None] + variance[..., None, :]
    if covariance.dim() > mean.dim():
        of_gap = of_gap - 2 * covariance
    else:
        of_gap = of_gap - 2 * torch.diag_embed(covariance)
    gap = temperature * (mean[..., :, None] - mean[..., None, :])
    scaled = gap / (1 + math.pi / 8 * temperature**2 * of_gap).sqrt()
    return (-(-scaled).logsumexp(-1)).softmax(-1)


def _variance(mean: Tensor, covariance: Tensor) -> Tensor:
    _check(mean, covariance)
    if covariance.dim() == mean.dim():
        return covariance
    return covariance.diagonal(dim1=-2, dim2=-1)


def _check(mean: Tensor, covariance: Tensor) -> None:
    classes = mean.shape[-1:]
    if covariance.shape not in (mean.shape, mean.shape + classes):
        raise ValueError(
            f"covariance must be {tuple(mean.shape + classes)}, or its diagonal "
            f"{tuple(mean.shape)}, for a mean of {tuple(mean.shape)}; got "
            f"{tuple(covariance.shape)}"
        )
