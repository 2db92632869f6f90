"""What does a Gaussian process say whose likelihood compares the right class with each other one?

p(y | z) is taken as Π_{j≠y} σ(z_y − z_j) (Titsias, 2016). With Pólya-Gamma variables ω each factor
is Gaussian in z (Snell and Zemel, 2021), and a mean-field posterior q(z)·q(ω) has closed rounds:

    ω_nj = tanh(c_nj/2) / (2·c_nj),   c² = E_q (z_y − z_j)²,
    Λ_n  = Σ_j ω_nj·(e_y − e_j)(e_y − e_j)ᵀ,   r_n = ½ Σ_j (e_y − e_j),
    q(z) = N with precision K⁻¹ + Λ and precision-times-mean K⁻¹z₀ + r.

Each round raises a lower bound on the evidence, so that nothing has to be damped.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ibaml.heads.dual import DualPosterior, Reason, check_task, spread_by, tolerance
from ibaml.heads.inverse import DenseInverse, dense_system
from ibaml.heads.points import PREDICTION_POINTS, gaussian_points, place
from ibaml.heads.prior import HeadPrior


@dataclass(frozen=True)
class OneVsEach:
    """The posterior, and the lower bound on the log evidence at its solution, (T,)."""

    posterior: DualPosterior
    evidence: Tensor


def one_vs_each(
    prior: HeadPrior,
    features: Tensor,
    labels: Tensor,
    classes: int,
    rounds: int = 200,
    tol: float | None = None,
) -> OneVsEach:
    """The mean-field posterior of every task; arguments as for `ibaml.heads.dual.laplace`.

    The evidence's derivative in the prior and the features is the right one, since it is at its
    maximum in ω. Derivatives of the posterior's logits hold ω, as training through draws of ω does.
    """
    check_task(features, labels, classes)
    start, gram = prior.logits(features, classes), prior.gram(features, features)
    target = torch.nn.functional.one_hot(labels.long(), classes).to(features.dtype)
    limit = tolerance(tol, features.dtype)
    with torch.no_grad():
        weight = 0.25 * (1 - target)  # ω at c = 0
        taken = torch.zeros(len(labels), dtype=torch.long, device=labels.device)
        residual = torch.full_like(start[:, 0, 0], torch.inf)
        reason = torch.full_like(taken, int(Reason.STEPS))
        for _ in range(rounds):
            active = reason == Reason.STEPS
            after = _expected_weight(start, gram, target, weight)
            size = (after - weight).abs().amax((-2, -1))
            fine = active & size.isfinite()
            weight = torch.where(fine[:, None, None], after, weight)
            taken, residual = taken + fine, torch.where(fine, size, residual)
            reason = torch.where(fine & (size <= limit), int(Reason.CONVERGED), reason)
            reason = torch.where(active & ~fine, int(Reason.NONFINITE), reason)
            if reason.device.type == "cpu" and bool((reason != Reason.STEPS).all()):
                break
    curvature, slope = _curvature(target, weight), _slope(target)
    lean = slope - (curvature @ start[..., None])[..., 0]
    inverse = DenseInverse.at(gram, curvature)
    dual = lean - inverse.times(spread_by(gram, lean))
    posterior = DualPosterior(prior, features, dual, inverse, 1.0, taken, residual, reason)
    gap = _gap_size(start, gram, target, weight).detach()
    constant = (1 - target) * (torch.nn.functional.logsigmoid(gap) - gap / 2 + weight * gap**2 / 2)
    at_start = ((slope - 0.5 * (slope - lean)) * start).sum((-2, -1))
    gained = 0.5 * (lean * spread_by(gram, dual)).sum((-2, -1))
    volume = dense_system(gram, curvature).slogdet().logabsdet
    evidence = constant.sum((-2, -1)) + at_start + gained - 0.5 * volume
    return OneVsEach(posterior, evidence)


def predict_one_vs_each(
    mean: Tensor,
    covariance: Tensor,
    temperature: Tensor | float = 1.0,
    count: int = PREDICTION_POINTS,
) -> Tensor:
    """E of Π_{j≠c} σ(t·(z_c − z_j)), normalized over c, (…, C), by the fixed points."""
    points = gaussian_points(count, mean.shape[-1], mean.dtype, mean.device)
    logits = temperature * place(mean, covariance, points)
    gap = logits[..., :, None] - logits[..., None, :]
    return torch.nn.functional.logsigmoid(gap).sum(-1).softmax(-1).mean(-2)


def probit_one_vs_each(mean: Tensor, covariance: Tensor) -> Tensor:
    """log of Π_{j≠c} E σ(z_c − z_j), (…, C), each E by the probit approximation (MacKay, 1992).

    Smooth, so that it can be sharpened by a temperature, which a mean over points cannot: there
    the few points that decide are sharpened with it. Comparisons are taken as independent.
    """
    variance = covariance.diagonal(dim1=-2, dim2=-1)
    of_gap = variance[..., :, None] + variance[..., None, :] - 2 * covariance
    gap = mean[..., :, None] - mean[..., None, :]
    each = torch.nn.functional.logsigmoid(gap / (1 + torch.pi / 8 * of_gap.clamp_min(0)).sqrt())
    return each.sum(-1) + math.log(2)  # without j = c, which has log σ(0)


def _slope(target: Tensor) -> Tensor:
    """r: (C − 1)/2 at the right class, −1/2 elsewhere."""
    return 0.5 * (target * target.shape[-1] - 1)


def _curvature(target: Tensor, weight: Tensor) -> Tensor:
    """Λ (T, N, C, C), for ω (T, N, C), 0 at the right class."""
    cross = target[..., :, None] * weight[..., None, :]
    total = weight.sum(-1, keepdim=True) * target
    return torch.diag_embed(weight + total) - cross - cross.mT


def _expected_weight(start: Tensor, gram: Tensor, target: Tensor, weight: Tensor) -> Tensor:
    """ω once more."""
    gap = _gap_size(start, gram, target, weight).clamp_min(1e-4)  # at 0 it is 1/4, as here to 1e-9
    return (1 - target) * (gap / 2).tanh() / (2 * gap)


def _gap_size(start: Tensor, gram: Tensor, target: Tensor, weight: Tensor) -> Tensor:
    """c = √E_q (z_y − z_j)², (T, N, C), under the Gaussian that ω gives."""
    curvature = _curvature(target, weight)
    lean = _slope(target) - (curvature @ start[..., None])[..., 0]
    inverse = DenseInverse.at(gram, curvature)
    mean = start + spread_by(gram, lean - inverse.times(spread_by(gram, lean)))
    own = torch.diag_embed(gram.diagonal(dim1=-2, dim2=-1).expand(-1, mean.shape[-1], -1).mT)
    covariance = own - inverse.quadratic(gram)
    variance = covariance.diagonal(dim1=-2, dim2=-1)
    right = (target[..., None, :] @ covariance)[..., 0, :]  # Cov(z_y, z_j)
    of_gap = variance + (target * variance).sum(-1, keepdim=True) - 2 * right
    apart = (target * mean).sum(-1, keepdim=True) - mean
    return (apart.square() + of_gap.clamp_min(0)).sqrt()
