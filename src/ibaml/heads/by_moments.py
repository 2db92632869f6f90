"""How does a head's loss change with the means and variances of its outputs? All that E needs.

A Gaussian head enters the loss only through the mean a and variance b of every output, x = (a, b)
side by side, and an example's loss depends on its own outputs alone. So the loss's second
derivative is one small matrix an example, whatever the number of features.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ibaml.heads.points import deviation, place


@dataclass(frozen=True)
class ByMoments:
    """The mean loss of every task, (T,), with its first (T, N, 2C) and second (T, N, 2C, 2C)
    derivatives in the outputs' means and variances (T, N, 2C)."""

    value: Tensor
    slope: Tensor
    curvature: Tensor


def placed(moments: Tensor, points: Tensor) -> Tensor:
    """Outputs a + √b·ε at all points (S, C), (…, S, C), for moments (…, 2C)."""
    mean, variance = moments.chunk(2, -1)
    return place(mean, variance, points)


def by_moments(loss: Callable[[Tensor], Tensor], moments: Tensor, points: Tensor) -> ByMoments:
    """For any loss of outputs (T, N, S, C) that is a sum over examples, by autograd."""
    with torch.enable_grad():
        x = moments.detach().requires_grad_()
        value = loss(placed(x, points))
        (slope,) = torch.autograd.grad(value.sum(), x, create_graph=True)
        size = x.shape[-1]
        unit = torch.eye(size, dtype=x.dtype, device=x.device)
        unit = unit[:, None, None].expand(size, *x.shape)
        (curvature,) = torch.autograd.grad(slope, x, unit, is_grads_batched=True)
    return ByMoments(value.detach(), slope.detach(), curvature.movedim(0, -2))


def softmax_by_moments(labels: Tensor, moments: Tensor, points: Tensor) -> ByMoments:
    """For the cross-entropy with labels (T, N), in closed form.

    With π the probabilities at a point and j = ε/(2√b) the derivative of its output in b: the mean
    over the points of (1, j)ᵀ(diag π − ππᵀ)(1, j), and −∇_b/(2b) on the variances' diagonal.
    """
    root = deviation(moments.chunk(2, -1)[1])
    inner = points / (2 * root[..., None, :])  # j
    log_p = placed(moments, points).log_softmax(-1)
    target = torch.nn.functional.one_hot(labels.long(), log_p.shape[-1]).to(log_p.dtype)
    value = -(log_p.mean(-2) * target).sum((-2, -1)) / labels.shape[-1]
    p = log_p.exp()
    by_variance = p * inner
    both = torch.cat([p, by_variance], -1)
    slope = torch.cat([p.mean(-2) - target, by_variance.mean(-2) - target * inner.mean(-2)], -1)
    curvature = both.mT @ both / -len(points)
    cross = torch.diag_embed(by_variance.mean(-2))
    own = (by_variance * inner).mean(-2) - slope.chunk(2, -1)[1] / (2 * root.square())
    top = torch.cat([torch.diag_embed(p.mean(-2)), cross], -1)
    curvature = curvature + torch.cat([top, torch.cat([cross, torch.diag_embed(own)], -1)], -2)
    examples = labels.shape[-1]
    return ByMoments(value, slope / examples, curvature / examples)
