"""What is the point belief? v = w, one weight vector per task, with or without a Gaussian prior."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ibaml.arguments import check_number
from ibaml.weights.belief import Belief, Prior, Start
from ibaml.weights.precision import DiagonalPrecision


@dataclass(frozen=True)
class Point(Belief):
    """One weight vector per task. With ``lam`` the energy has λ/2·‖w − θ‖² (iMAML); without it the
    prior mean is only the start of adaptation (MAML)."""

    lam: float = 0.0

    def __post_init__(self) -> None:
        check_number("lam", self.lam, least=0)

    @property
    def has_prior(self) -> bool:
        return self.lam > 0

    def blocks(self, n: int) -> dict[str, int]:
        return {"mean": n}

    def prior_parameters(
        self, means: Mapping[str, Tensor], init_log_var: float
    ) -> dict[str, Start]:
        return {}

    def noise_size(self, n: int) -> int:
        return 0

    def weight(self, beta: float | Tensor, examples: int) -> float:
        return 1.0

    def sample(self, v: Tensor, noise: Tensor) -> Tensor:
        return v[:, None].expand(-1, noise.shape[1], -1)

    def penalty(self, v: Tensor, prior: Prior) -> Tensor:
        return self.lam / 2 * (v - prior[0]).square().sum(-1)

    def precision(self, v: Tensor, prior: Prior) -> DiagonalPrecision:
        return DiagonalPrecision(torch.full_like(v.detach(), self.lam))

    def prior_product(self, v: Tensor, prior: Prior, u: Tensor) -> Prior:
        return (self.lam * u.sum(0),)

    def log_density(self, weights: Tensor, v: Tensor) -> Tensor:
        """The log-density of the isotropic Gaussian N(v, I/λ)."""
        if not self.has_prior:
            raise ValueError("a point without a prior has no density: give it lam > 0")
        squares = self.lam * (weights - v[:, None]).square().sum(-1)
        return -(squares + v.shape[-1] * math.log(2 * math.pi / self.lam)) / 2
