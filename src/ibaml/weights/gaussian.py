"""Diagonal Gaussian belief: v = (m_t, ρ_t), prior (m, ρ), ρ the log-variance."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ibaml.weights.belief import Prior


@dataclass(frozen=True)
class DiagonalGaussian:
    """q(w; v) = N(m_t, diag exp ρ_t) with the prior N(m, diag exp ρ); κ = β / N.

    KL(v ‖ θ) = ½ Σ [exp(ρ_t − ρ) + (m_t − m)² exp(−ρ) − 1 + ρ − ρ_t]
    """

    blocks: tuple[str, ...] = ("mean", "log_var")
    stochastic: bool = True

    @property
    def has_prior(self) -> bool:
        return True

    def weight(self, beta: float, examples: int) -> float:
        return beta / examples

    def start(self, prior: Prior, tasks: int) -> Tensor:
        return torch.cat(prior).expand(tasks, -1)

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

    def precision(self, v: Tensor, prior: Prior) -> Tensor:
        _, rho = prior
        rho_t = v.chunk(2, -1)[1]
        return torch.cat([(-rho).exp().expand_as(rho_t), (rho_t - rho).exp() / 2], -1)

    def prior_product(self, v: Tensor, prior: Prior, u: Tensor) -> Prior:
        m, rho = prior
        m_t, rho_t = v.chunk(2, -1)
        u_m, u_rho = u.chunk(2, -1)
        pull = (-rho).exp() * u_m
        return pull.sum(0), ((m_t - m) * pull + (rho_t - rho).exp() * u_rho / 2).sum(0)

    def log_density(self, weights: Tensor, v: Tensor) -> Tensor:
        m, rho = v[:, None].chunk(2, -1)
        terms = (weights - m).square() * (-rho).exp() + rho + math.log(2 * math.pi)
        return -terms.sum(-1) / 2
