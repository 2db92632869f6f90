"""What does a linear head minimize when its noise is on the logits instead of on the weights?

For z = Wφ and q(W) = N(m, diag σ²), each example's logits are Gaussian with mean mφ_n and variances
Σ_f φ_nf²σ_cf², and that is all the loss depends on:

    E(m, σ) = mean over s, n of nll(mφ_n + S_n^{1/2}ε_s, y_n) + (β/N)·KL(q ‖ p)

The same E in expectation as with noise on the weights, with less variance. All examples share the
points ε_s, so that their order does not matter.
"""

from __future__ import annotations

import torch
from torch import Tensor


def logit_variance(std: Tensor, features: Tensor) -> Tensor:
    """Σ_f φ_nf²·σ_cf², (T, N, C), for ``std`` (T, C, F) and features (T, N, F)."""
    return features.square() @ std.square().mT


def logit_energy(
    mean: Tensor,
    std: Tensor,
    features: Tensor,
    labels: Tensor,
    prior_mean: Tensor,
    prior_log_var: Tensor,
    points: Tensor,
    beta: Tensor | float = 1.0,
) -> Tensor:
    """E of every task, (T,), with noise on the logits. Differentiable in everything.

    In the coordinates (m, σ) it is strictly convex with `ibaml.heads.points.axis_points`; with
    Sobol' points up to their error, which the KL's curvature covers.

    Args:
        mean: m, (T, C, F).
        std: σ > 0, (T, C, F).
        features: φ of the support examples, (T, N, F); a bias is a constant feature.
        labels: (T, N), 0 … C−1.
        prior_mean: anything that broadcasts to (T, C, F): (F,) is tied over classes.
        prior_log_var: likewise.
        points: ε, (S, C), the same for all examples.
        beta: the weight of the KL; 1 is Bayes.
    """
    center = features @ mean.mT
    # √ has no derivative at 0, where an example has no features at all
    spread = logit_variance(std, features).clamp_min(torch.finfo(std.dtype).tiny).sqrt()
    logits = center[..., None, :] + spread[..., None, :] * points
    right = labels.long()[..., None, None].expand(*logits.shape[:-1], 1)
    nll = logits.logsumexp(-1) - logits.gather(-1, right)[..., 0]
    divergence = diagonal_kl(mean, std, prior_mean, prior_log_var)
    return nll.mean((-2, -1)) + beta / features.shape[-2] * divergence


def diagonal_kl(mean: Tensor, std: Tensor, prior_mean: Tensor, prior_log_var: Tensor) -> Tensor:
    """KL(N(m, diag σ²) ‖ N(m₀, diag exp ρ)) of every task, (T,)."""
    log_ratio = 2 * std.log() - prior_log_var
    pull = (mean - prior_mean).square() * (-prior_log_var).exp()
    return 0.5 * (log_ratio.exp() + pull - 1 - log_ratio).sum((-2, -1))
