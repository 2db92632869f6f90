"""What is the diagonal Gaussian belief? v = (m_t, ρ_t), prior (m, ρ), ρ the log-variance."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ibaml.weights.belief import Belief, Prior, Start, check_kappa
from ibaml.weights.precision import DiagonalPrecision


@dataclass(frozen=True)
class DiagonalGaussian(Belief):
    """q(w; v) = N(m_t, diag exp ρ_t) with the prior N(m, diag exp ρ).

    KL(v ‖ θ) = ½ Σ [exp(ρ_t − ρ) + (m_t − m)² exp(−ρ) − 1 + ρ − ρ_t]

    Args:
        kappa: κ, the weight of the KL; None is β / N.
    """

    kappa: float | None = None

    is_diagonal_gaussian = True
    has_output_moments = True

    def __post_init__(self) -> None:
        check_kappa(self.kappa)

    def blocks(self, n: int) -> dict[str, int]:
        return {"mean": n, "log_var": n}

    def prior_parameters(
        self, means: Mapping[str, Tensor], init_log_var: float
    ) -> dict[str, Start]:
        return {"log_var": {name: torch.full_like(m, init_log_var) for name, m in means.items()}}

    def sample(self, v: Tensor, noise: Tensor) -> Tensor:
        m, rho = v[:, None].chunk(2, -1)
        return m + (rho / 2).exp() * noise

    def penalty(self, v: Tensor, prior: Prior) -> Tensor:
        """The KL divergence of the task's belief from the prior."""
        m, rho = prior
        m_t, rho_t = v.chunk(2, -1)
        # expm1 keeps its accuracy where ρ_t is close to ρ
        terms = torch.expm1(rho_t - rho) - (rho_t - rho) + (m_t - m).square() * (-rho).exp()
        return terms.sum(-1) / 2

    def precision(self, v: Tensor, prior: Prior) -> DiagonalPrecision:
        rho = prior[1].detach()
        rho_t = v.detach().chunk(2, -1)[1]
        return DiagonalPrecision(
            torch.cat([(-rho).exp().expand_as(rho_t), (rho_t - rho).exp() / 2], -1)
        )

    def prior_product(self, v: Tensor, prior: Prior, u: Tensor) -> Prior:
        m, rho = prior
        m_t, rho_t = v.chunk(2, -1)
        u_m, u_rho = u.chunk(2, -1)
        pull = (-rho).exp() * u_m
        return pull.sum(0), ((m_t - m) * pull + (rho_t - rho).exp() * u_rho / 2).sum(0)

    def log_var(self, v: Tensor) -> Tensor:
        return v.chunk(2, -1)[1]

    def log_scales(self, n: int) -> slice:
        return slice(n, 2 * n)

    def log_density(self, weights: Tensor, v: Tensor) -> Tensor:
        m, rho = v[:, None].chunk(2, -1)
        terms = (weights - m).square() * (-rho).exp() + rho + math.log(2 * math.pi)
        return -terms.sum(-1) / 2

    def output_moments(
        self, blocks: Mapping[str, Tensor], features: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Mean mφ and variance Σ_f φ_f²·d_f of every output."""
        variance = features.square() @ blocks["log_var"].exp().mT
        return features @ blocks["mean"].mT, variance
