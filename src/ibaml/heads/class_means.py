"""Which linear head do class means give that are known from few examples?

In features that are white within classes, a class's mean is a priori y ~ N(0, b) with one variance
a feature, and its examples are y + N(0, 1): the two-covariance model (PLDA). After k examples of
mean x̄ the mean is known as

    E[y | x] = k·b / (k·b + 1) · x̄,

little in directions in which classes hardly differ. Features have length 1, so the head's row is
the direction of this estimate, and its outputs are cosines: they mean the same for any number of
classes and examples, so that one temperature does for all.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ibaml.heads.plda import class_means


@dataclass(frozen=True)
class ClassDirections:
    """A head without spread: rows of length 1, (T, C, F), 0 for a class without examples."""

    rows: Tensor

    def moments(self, query: Tensor) -> tuple[Tensor, Tensor]:
        mean = query @ self.rows.mT
        return mean, torch.zeros_like(mean)

    def mean_weights(self) -> Tensor:
        return self.rows

    def weight_variances(self) -> Tensor:
        return torch.zeros_like(self.rows)

    def noise_sizes(self) -> list[int]:
        return [0]

    def sample(self, noise: Tensor) -> Tensor:
        return self.rows[:, None].expand(-1, noise.shape[1], -1, -1)


def class_directions(
    features: Tensor, labels: Tensor, classes: int, variance: Tensor
) -> ClassDirections:
    """The head of every task; differentiable in features and variances.

    Args:
        features: of the support examples, (T, N, F).
        labels: (T, N), 0 … classes − 1; a class may have no examples.
        classes: how many.
        variance: b, (F,).

    >>> x = torch.tensor([[[1.0, 0.0], [0.0, 1.0]]])
    >>> head = class_directions(x, torch.tensor([[0, 1]]), 2, torch.ones(2))
    >>> head.moments(x)[0].argmax(-1).tolist()
    [[0, 1]]
    """
    counts, means = class_means(features, labels, classes)
    known = counts[..., None] * variance
    return ClassDirections(torch.nn.functional.normalize(known / (known + 1) * means, dim=-1))
