"""What does the two-covariance model say about queries, given a few examples of each class?

In its coordinates (`ibaml.heads.from_data.TwoCovariance`) every feature is on its own: a class with
n examples of mean x̄ has its own mean y | x ~ N(n·b·x̄ / (n·b + 1), b / (n·b + 1)), and a query of
the class is a draw from N(y, 1). Classes are equally likely a priori.
"""

from __future__ import annotations

import torch
from torch import Tensor


def plda_logits(
    support: Tensor, labels: Tensor, query: Tensor, classes: int, between: Tensor
) -> Tensor:
    """log p(query | class's examples), (T, Q, C), for mapped features; its softmax is the answer.

    Args:
        support: (T, N, K), mapped.
        labels: (T, N), 0 … classes − 1; a class without examples is as unknown as any.
        query: (T, Q, K), mapped.
        classes: how many.
        between: variances of class means, (K,).
    """
    counts, means = class_means(support, labels, classes)
    gain = counts[..., None] * between / (counts[..., None] * between + 1)
    variance = 1 + between - gain * between
    center = gain * means
    precision = 1 / variance
    # Σ_k (q − m)²/v without a tensor of size Q × C × K
    square = query.square() @ precision.mT - 2 * query @ (center * precision).mT
    constant = (center.square() * precision + variance.log()).sum(-1)
    return -0.5 * (square + constant[:, None] + between.numel() * _LOG_2PI)


_LOG_2PI = float(torch.tensor(2 * torch.pi, dtype=torch.float64).log())


def class_means(support: Tensor, labels: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    """Examples of every class (T, C), and their mean (T, C, K), 0 where there are none."""
    member = torch.nn.functional.one_hot(labels.long(), classes).to(support.dtype)
    counts = member.sum(1)
    return counts, (member.mT @ support) / counts.clamp_min(1)[..., None]
