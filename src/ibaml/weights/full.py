"""What is believed about a linear head alone? v is its mean, and the prior (m, ρ).

How sure the head is follows from the mean and the examples (`ibaml.heads`), so it is never stored,
and nothing of size features² is made.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ibaml.arguments import check_word
from ibaml.weights.belief import Belief, Prior, Start, check_kappa
from ibaml.weights.precision import DiagonalPrecision
from ibaml.words import INFERENCES, SIMPLE_HEADS, Inference, SimpleHeadName


class _Head(Belief):
    """A belief that is solved in closed form, or in its dual, and differentiated there, not by a
    solver and a gradient rule. A feature's ρ is the same for all classes."""

    in_dual = True

    def blocks(self, n: int) -> dict[str, int]:
        return {"mean": n}

    def noise_size(self, n: int) -> int:
        return 0  # weights are drawn by the posterior itself

    def prior_parameters(
        self, means: Mapping[str, Tensor], init_log_var: float
    ) -> dict[str, Start]:
        return {
            "log_var": {name: torch.full_like(m[:1], init_log_var) for name, m in means.items()}
        }

    def start(self, prior: Prior, tasks: int) -> Tensor:
        return prior[0].expand(tasks, -1)

    def sample(self, v: Tensor, noise: Tensor) -> Tensor:
        """The mean: no weights are drawn in the energy."""
        return v[:, None].expand(-1, noise.shape[1], -1)

    def penalty(self, v: Tensor, prior: Prior) -> Tensor:
        """½ Σ (m_t − m)² exp(−ρ): the part of the KL divergence that depends on the mean."""
        m, rho = prior
        return ((v - m).square() * (-rho).exp()).sum(-1) / 2

    def precision(self, v: Tensor, prior: Prior) -> DiagonalPrecision:
        return DiagonalPrecision((-prior[1].detach()).exp().expand_as(v))


@dataclass(frozen=True)
class FullGaussian(_Head):
    """A Gaussian with full covariance over the weights of a linear head, and the prior
    N(m, diag exp ρ).

    Args:
        inference: how a classifier's posterior becomes Gaussian: ``"laplace"``, around the most
            probable weights, or ``"variational"``, the Gaussian of least energy (slower). In
            regression with Gaussian noise both are exact.
        kappa: κ, the weight of the KL; None is β / N.

    >>> FullGaussian().blocks(10)
    {'mean': 10}
    """

    inference: Inference = "laplace"
    kappa: float | None = None

    def __post_init__(self) -> None:
        check_word("inference", self.inference, INFERENCES)
        check_kappa(self.kappa)


@dataclass(frozen=True)
class ClassMeans(_Head):
    """Class means known from few examples, for features that are white within classes and of length
    1, such as those of `ibaml.nn.discriminant`. A priori a class's mean is N(0, diag exp ρ) and its
    examples lie around it with variance 1; the head's rows are the directions of the posterior
    means (`ibaml.heads.class_means`), without spread.

    >>> ClassMeans().noise_size(10)
    0
    """


@dataclass(frozen=True)
class SimpleHead(_Head):
    """A linear head of the literature, to compare with, with the prior N(m, diag exp ρ) where it
    has one.

    Args:
        kind: ``"point"``, the most probable rows alone; ``"prototypes"`` (ProtoNet); ``"ridge"``
            (R2-D2); ``"gp"``, Gaussian processes on labels ±1. `ibaml.heads.simple` has them.
        kappa: κ, the weight of the prior; None is β / N.

    >>> SimpleHead("ridge").noise_size(10)
    0
    """

    kind: SimpleHeadName
    kappa: float | None = None

    def __post_init__(self) -> None:
        check_word("kind", self.kind, SIMPLE_HEADS)
        check_kappa(self.kappa)
