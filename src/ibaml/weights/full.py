"""What is the full-covariance belief about a linear head? v is its mean alone, prior (m, ρ).

The covariance follows from the mean and the examples (`ibaml.heads`), so it is never stored, and
nothing of size features² is made.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ibaml.arguments import check_flag, check_word
from ibaml.weights.belief import Belief, Prior, Start, check_kappa
from ibaml.weights.precision import DiagonalPrecision
from ibaml.words import INFERENCES, Inference


@dataclass(frozen=True)
class FullGaussian(Belief):
    """A Gaussian with full covariance over the weights of a linear head, and the prior
    N(m, diag exp ρ), where a feature's ρ is the same for all classes. It is solved in its dual and
    differentiated there (`ibaml.heads`), not by a solver and a gradient rule.

    Args:
        inference: how a classifier's posterior becomes Gaussian: ``"laplace"``, around the most
            probable weights, or ``"variational"``, the Gaussian of least energy (slower). In
            regression with Gaussian noise both are exact.
        kappa: κ, the weight of the KL; None is β / N.
        per_class: κ is β over the number of classes instead: all examples of a class count as one,
            which suits features in which they are alike.

    >>> FullGaussian().blocks(10)
    {'mean': 10}
    """

    inference: Inference = "laplace"
    kappa: float | None = None
    per_class: bool = False

    in_dual = True

    def __post_init__(self) -> None:
        check_word("inference", self.inference, INFERENCES)
        check_kappa(self.kappa)
        check_flag("per_class", self.per_class)
        if self.per_class and self.kappa is not None:
            raise ValueError("per_class and kappa both say what the KL weighs: give one of them")

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
