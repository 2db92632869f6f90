"""What does everybody ask of a Gaussian posterior over the linear heads of T tasks?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ibaml.heads.prior import HeadPrior


class GaussianHead(Protocol):
    """A Gaussian over the rows of a linear head, for each of T tasks; a dataclass of tensors."""

    def moments(self, query: Tensor) -> tuple[Tensor, Tensor]:
        """Mean (T, Q, C) of the outputs for features (T, Q, F), and their covariance (T, Q, C, C)
        or, if outputs are independent, variance (T, Q, C)."""

    def mean_weights(self) -> Tensor:
        """The mean of every weight, (T, C, F)."""

    def weight_variances(self) -> Tensor:
        """The variance of every weight, (T, C, F)."""

    def noise_sizes(self) -> list[int]:
        """How many normal numbers one draw takes, for each of its parts."""

    def sample(self, noise: Tensor) -> Tensor:
        """Heads (T, S, C, F) from standard normal numbers (T, S, sum of `noise_sizes`)."""


@dataclass(frozen=True)
class BeforeExamples:
    """The prior as the posterior of tasks that have no examples."""

    prior: HeadPrior
    tasks: int
    classes: int

    def moments(self, query: Tensor) -> tuple[Tensor, Tensor]:
        variance = self.prior.gram_diagonal(query).expand(-1, self.classes, -1).mT
        return self.prior.logits(query, self.classes), variance

    def mean_weights(self) -> Tensor:
        return self.prior.mean.expand(self.tasks, self.classes, -1)

    def weight_variances(self) -> Tensor:
        return self.prior.weight_variances(self.classes).expand(self.tasks, -1, -1)

    def noise_sizes(self) -> list[int]:
        return [self.classes * self.prior.mean.shape[-1], self.classes * self.prior.rank]

    def sample(self, noise: Tensor) -> Tensor:
        own, common = noise.split(self.noise_sizes(), -1)
        draws = [
            self.prior.draw(own[:, s], common[:, s], self.classes) for s in range(noise.shape[1])
        ]
        return self.mean_weights()[:, None] + torch.stack(draws, 1)
