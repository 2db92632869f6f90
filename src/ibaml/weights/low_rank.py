"""What is the low-rank Gaussian belief? v = (m_t, ρ_t, U_t), and a prior (m, ρ, U) of that kind."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ibaml.weights.belief import Belief, Prior, Start, check_kappa
from ibaml.weights.precision import Preconditioner

_OFF_ZERO = 0.1  # of a standard deviation


@dataclass(frozen=True)
class LowRankGaussian(Belief):
    """q(w; v) = N(m_t, diag exp ρ_t + U_t U_tᵀ), where U_t has ``rank`` columns. The prior has the
    same form, and its U is meta-learned too. Everything costs O(n·rank²); no matrix is n × n.

    U = 0 is a saddle (U and −U are equivalent), so the prior's U starts at a tenth of a standard
    deviation, in a fixed pattern.

    >>> LowRankGaussian(rank=2).blocks(10)
    {'mean': 10, 'log_var': 10, 'factor_1': 10, 'factor_2': 10}
    """

    rank: int = 1
    kappa: float | None = None

    has_output_moments = True

    def __post_init__(self) -> None:
        if isinstance(self.rank, bool) or not isinstance(self.rank, int) or self.rank < 1:
            raise ValueError(f"rank must be a whole number, 1 or more; got {self.rank!r}")
        check_kappa(self.kappa)

    @property
    def _columns(self) -> list[str]:
        return [f"factor_{k + 1}" for k in range(self.rank)]

    def blocks(self, n: int) -> dict[str, int]:
        return dict.fromkeys(["mean", "log_var", *self._columns], n)

    def noise_size(self, n: int) -> int:
        return n + self.rank

    def prior_parameters(
        self, means: Mapping[str, Tensor], init_log_var: float
    ) -> dict[str, Start]:
        size = _OFF_ZERO * math.exp(init_log_var / 2)
        values: dict[str, Start] = {
            "log_var": {name: torch.full_like(m, init_log_var) for name, m in means.items()}
        }
        for k, column in enumerate(self._columns):
            at, weights = 0, {}
            for name, m in means.items():
                index = torch.arange(at, at + m.numel(), device=m.device, dtype=torch.float64)
                weights[name] = (size * ((k + 1) * index).cos()).to(m.dtype).view_as(m)
                at += m.numel()
            values[column] = weights
        return values

    def _parts(self, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Mean (T, n), log-variances of the diagonal (T, n) and Uᵀ (T, rank, n)."""
        blocks = v.unflatten(-1, (2 + self.rank, -1))
        return blocks[:, 0], blocks[:, 1], blocks[:, 2:]

    def sample(self, v: Tensor, noise: Tensor) -> Tensor:
        m, rho, factor = self._parts(v)
        own, common = noise.split([m.shape[-1], self.rank], -1)
        return m[:, None] + (rho / 2).exp()[:, None] * own + common @ factor

    def penalty(self, v: Tensor, prior: Prior) -> Tensor:
        """The KL divergence of the task's belief from the prior. In units of the prior's diagonal
        the prior's covariance is I + WWᵀ, with inverse I − W(I + WᵀW)⁻¹Wᵀ."""
        m, rho, *columns = prior
        m_t, rho_t, factor_t = self._parts(v)
        scale = (-rho / 2).exp()
        w = torch.stack(columns) * scale  # Wᵀ
        root = _root(w)
        ratio = rho_t - rho
        off = (m_t - m) * scale
        w_t = factor_t * scale

        def explained(x: Tensor) -> Tensor:
            """xᵀW(I + WᵀW)⁻¹Wᵀx summed over the rows x (T, rows, n)."""
            return _divided(root, w @ x.mT).square().sum((-1, -2))

        def log_det(root: Tensor) -> Tensor:
            return 2 * root.diagonal(dim1=-2, dim2=-1).log().sum(-1)

        diagonal = (torch.expm1(ratio) - ratio).sum(-1)
        diagonal = diagonal - _divided(root, w * (ratio / 2).exp()[:, None]).square().sum((-1, -2))
        mean = off.square().sum(-1) - explained(off[:, None])
        factor = w_t.square().sum((-1, -2)) - explained(w_t)
        own = factor_t * (-rho_t / 2).exp()[:, None]
        return (diagonal + mean + factor + log_det(root) - log_det(_root(own))) / 2

    def preconditioner(self, v: Tensor, prior: Prior) -> Preconditioner:
        """The prior's covariance for the mean, which is exact, and for every column of U, where P
        itself is indefinite; a diagonal for the log-variances."""
        _, rho, *columns = prior
        variance, u = rho.exp(), torch.stack(columns)
        ratio = (self._parts(v)[1] - rho).exp() / 2

        def covariance(r: Tensor) -> Tensor:
            return variance * r + (r @ u.mT) @ u

        def precondition(r: Tensor) -> Tensor:
            m, s, factor = self._parts(r)
            solved = [covariance(m), s / ratio, covariance(factor).flatten(-2)]
            return torch.cat(solved, -1)

        return precondition

    def log_var(self, v: Tensor) -> Tensor:
        _, rho, factor = self._parts(v)
        return (rho.exp() + factor.square().sum(1)).log()

    def log_scales(self, n: int) -> slice:
        return slice(n, 2 * n)

    def output_moments(
        self, blocks: Mapping[str, Tensor], features: Tensor
    ) -> tuple[Tensor, Tensor]:
        variance = features.square() @ blocks["log_var"].exp().mT
        moved = torch.stack([features @ blocks[c].mT for c in self._columns], -1)  # (T, N, C, rank)
        covariance = torch.diag_embed(variance) + moved @ moved.mT
        return features @ blocks["mean"].mT, covariance

    def log_density(self, weights: Tensor, v: Tensor) -> Tensor:
        m, rho, factor = self._parts(v)
        scale = (-rho / 2).exp()[:, None]
        w, z = factor * scale, (weights - m[:, None]) * scale
        root = _root(w)
        squares = z.square().sum(-1) - _divided(root, w @ z.mT).square().sum(-2)
        log_det = rho.sum(-1) + 2 * root.diagonal(dim1=-2, dim2=-1).log().sum(-1)
        return -(squares + log_det[:, None] + m.shape[-1] * math.log(2 * math.pi)) / 2


def _root(w: Tensor) -> Tensor:
    """The Cholesky factor of I + w wᵀ, w (…, rank, n). It exists for every finite w, so there is no
    check that would wait for the device."""
    eye = torch.eye(w.shape[-2], dtype=w.dtype, device=w.device)
    return torch.linalg.cholesky_ex(eye + w @ w.mT).L


def _divided(root: Tensor, x: Tensor) -> Tensor:
    return torch.linalg.solve_triangular(root, x, upper=False)
