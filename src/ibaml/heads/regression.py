"""What does a linear head learn from a few numbers, and how sure is it of them, exactly?

The likelihood is Gaussian, y_n = w·φ_n + noise of variance σ², so that the optimum of
Σ_n E_q[nll] + β·KL over all Gaussians is known in closed form. With ε = β·σ² and K = ΦDΦᵀ,

    w = m + DΦᵀ (K + ε)⁻¹ (y − Φm),      Σ = D − DΦᵀ (K + ε)⁻¹ ΦD,

where only Gram matrices of the examples appear, never a matrix of size features × features. With
β = 1 this is Bayes: a Gaussian process whose kernel is φᵀDφ′. Outputs are independent given the
features. Everything is differentiable in the prior, the features, the targets, σ² and β.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ibaml.heads.factor import cholesky, solve
from ibaml.heads.prior import HeadPrior


@dataclass(frozen=True)
class RegressionPosterior:
    """A full-covariance posterior over a linear head for numbers, held in the dual.

    Args:
        prior: what it started from.
        features: of the support examples, (T, N, F).
        dual: (K + ε)⁻¹ (y − Φm), (T, N, D).
        factor: the lower Cholesky factor of K + ε, (T, D or 1, N, N); NaN where there is none.
        log_evidence: log N(y; Φm, K + ε) of each output, (T, D): the log probability of the
            support targets if β is 1.
        epsilon: ε, (D or 1,).
    """

    prior: HeadPrior
    features: Tensor
    dual: Tensor
    factor: Tensor
    log_evidence: Tensor
    epsilon: Tensor

    def moments(self, query: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance of the outputs without noise, (T, Q, D), for features (T, Q, F)."""
        cross = self.prior.gram(self.features, query)  # (T, D or 1, N, Q)
        pull = (cross.mT @ self.dual.mT[..., None])[..., 0].mT
        mean = self.prior.logits(query, self.dual.shape[-1]) + pull
        explained = torch.linalg.solve_triangular(self.factor, cross, upper=False).square().sum(-2)
        # nothing is surer than certain: where examples explain all, rounding is left
        variance = (self.prior.gram_diagonal(query) - explained).clamp_min(0)
        return mean, variance.mT.expand_as(mean)

    def mean_weights(self) -> Tensor:
        """Means of the weights, (T, D, F)."""
        return self.prior.mean + self.prior.times(self.dual.mT @ self.features)

    def weight_variances(self) -> Tensor:
        """Variances of the weights, the diagonal of Σ, (T, D, F)."""
        outputs = self.dual.shape[-1]
        reached = self.prior.reached(self.features, outputs)
        explained = torch.linalg.solve_triangular(self.factor, reached, upper=False)
        return (self.prior.weight_variances(outputs) - explained.square().sum(-2)).clamp_min(0)

    def noise_sizes(self) -> list[int]:
        """How many normal numbers one draw takes: for ρ, for the low-rank part, for examples."""
        _, examples, outputs = self.dual.shape
        width = self.features.shape[-1]
        return [outputs * width, outputs * self.prior.rank, examples * outputs]

    def sample(self, noise: Tensor) -> Tensor:
        """Heads (T, S, D, F) from standard normal numbers (T, S, sum of `noise_sizes`), by
        Matheron's rule: a draw from the prior, moved to where the examples want it."""
        outputs = self.dual.shape[-1]
        own, common, heard = noise.split(self.noise_sizes(), -1)
        mean, root, draws = self.mean_weights(), self.epsilon.sqrt(), []
        for s in range(noise.shape[1]):
            drawn = self.prior.draw(own[:, s], common[:, s], outputs)
            off = self.features @ drawn.mT + root * heard[:, s].view_as(self.dual)
            dual = _solved(self.factor.expand(-1, outputs, -1, -1), off)
            draws.append(mean + drawn - self.prior.times(dual.mT @ self.features))
        return torch.stack(draws, 1)


def regression(
    prior: HeadPrior,
    features: Tensor,
    targets: Tensor,
    noise_variance: Tensor | float,
    beta: Tensor | float = 1.0,
) -> RegressionPosterior:
    """The posterior of every task's head after N examples, in closed form.

    Args:
        prior: of the head's rows, one row an output.
        features: of the support examples, (T, N, F); a bias is a constant feature.
        targets: (T, N), or (T, N, D) for several outputs.
        noise_variance: σ², a number or one for every output, (D,).
        beta: the weight of the KL in Σ_n nll + β·KL; 1 is Bayes.

    >>> prior = HeadPrior(mean=torch.zeros(1), log_var=torch.zeros(1))
    >>> posterior = regression(prior, torch.ones(1, 3, 1), torch.full((1, 3), 2.0), 1.0)
    >>> [round(float(value), 2) for value in posterior.moments(torch.ones(1, 1, 1))]
    [1.5, 0.25]
    """
    targets = targets[..., None] if targets.dim() == 2 else targets
    noise = torch.as_tensor(noise_variance, dtype=features.dtype, device=features.device)
    _check(features, targets, noise)
    outputs = targets.shape[-1]
    gram = prior.gram(features, features)
    epsilon = (beta * noise).reshape(-1, 1, 1)  # (D or 1, 1, 1)
    eye = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
    factor = cholesky(gram + epsilon * eye)
    rest = targets - prior.logits(features, outputs)
    dual = _solved(factor.expand(-1, outputs, -1, -1), rest)
    volume = 2 * factor.diagonal(dim1=-2, dim2=-1).log().sum(-1) + len(eye) * math.log(2 * math.pi)
    log_evidence = -0.5 * ((rest * dual).sum(-2) + volume)
    return RegressionPosterior(prior, features, dual, factor, log_evidence, epsilon.flatten())


def _solved(factor: Tensor, targets: Tensor) -> Tensor:
    """(K + ε)⁻¹·t for t (T, N, D) and factors (T, D, N, N)."""
    return solve(factor, targets.mT[..., None])[..., 0].mT


def _check(features: Tensor, targets: Tensor, noise: Tensor) -> None:
    if features.dim() != 3 or targets.dim() != 3 or targets.shape[:2] != features.shape[:2]:
        raise ValueError(
            "features must be (T, N, F) and targets (T, N) or (T, N, D), got "
            f"{tuple(features.shape)} and {tuple(targets.shape)}"
        )
    if noise.dim() > 1 or noise.numel() not in (1, targets.shape[-1]):
        raise ValueError(
            f"noise_variance must be a number or ({targets.shape[-1]},), one for every output; "
            f"got shape {tuple(noise.shape)}"
        )
