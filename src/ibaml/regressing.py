"""What is a number, given a few examples, and how sure is that?

A linear function plus waves of any direction (random Fourier features of a Gaussian kernel), with
Gaussian weights and noise: `ibaml.heads.regression` answers exactly. How large each part is, its
length scale and the noise maximize the evidence, of the examples themselves or of other tasks;
other tasks also say which linear function to expect.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ibaml.heads.prior import HeadPrior
from ibaml.heads.regression import RegressionPosterior, regression

_WAVES = 64
_STEPS = 60


@dataclass(frozen=True)
class Beliefs:
    """What is believed before the examples, of inputs (x − center)/spread and targets likewise.

    Attributes:
        center, spread: of the features, then the target, (F + 1,).
        mean: of the weights of the linear part and the constant, (F + 1,).
        free: logarithms: the constant's and linear weights' standard deviations (F + 1,), that of
            the waves, their length scale, and the noise's standard deviation.
    """

    center: Tensor
    spread: Tensor
    mean: Tensor
    free: Tensor

    def features(self, x: Tensor) -> Tensor:
        """What the linear head reads, (n, 1 + F + 2·waves)."""
        x = (x - self.center[:-1]) / self.spread[:-1]
        generator = torch.Generator().manual_seed(0)
        turns = torch.randn(x.shape[1], _WAVES, generator=generator, dtype=x.dtype)
        angle = x @ turns / self.free[-2].exp()
        waves = torch.cat([angle.cos(), angle.sin()], -1) / math.sqrt(_WAVES)
        return torch.cat([torch.ones_like(x[:, :1]), x, waves], -1)

    def posterior(self, x: Tensor, y: Tensor) -> RegressionPosterior:
        waves = 2 * _WAVES
        mean = torch.cat([self.mean, self.mean.new_zeros(waves)])
        log_var = 2 * torch.cat([self.free[:-3], self.free[-3].expand(waves)])
        y = (y - self.center[-1]) / self.spread[-1]
        prior = HeadPrior(mean, log_var)
        return regression(prior, self.features(x)[None], y[None], (2 * self.free[-1]).exp())


@dataclass(frozen=True)
class Believed:
    """The answer: means and standard deviations of new measurements."""

    beliefs: Beliefs
    posterior: RegressionPosterior

    @torch.no_grad()
    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        mean, variance = self.posterior.moments(self.beliefs.features(x)[None])
        noise = (2 * self.beliefs.free[-1]).exp()
        center, spread = self.beliefs.center[-1], self.beliefs.spread[-1]
        return center + spread * mean[0, :, 0], spread * (variance[0, :, 0] + noise).sqrt()


@torch.no_grad()
def believed(beliefs: Beliefs, x: Tensor, y: Tensor) -> Believed:
    """After examples x (n, F), y (n,)."""
    if x.shape[1] != len(beliefs.center) - 1:
        raise ValueError(
            f"X has {x.shape[1]} features, but the prior is for {len(beliefs.center) - 1}"
        )
    return Believed(beliefs, beliefs.posterior(x, y))


def fit_beliefs(x: Tensor, y: Tensor, tasks: Sequence[int] | np.ndarray | None = None) -> Beliefs:
    """The beliefs with the most evidence, held to moderate ones.

    Args:
        x, y: examples (n, F) and (n,), float64.
        tasks: of which task each is; None for one task, which says nothing of the linear function
            to expect.
    """
    both = torch.cat([x, y[:, None]], 1)
    center, spread = both.mean(0), both.std(0, correction=0)
    spread = torch.where(spread > 1e-9 * both.abs().amax(0).clamp_min(1e-300), spread, 1.0)
    width = x.shape[1]
    usual = torch.cat([
        torch.zeros(1), torch.full((width,), -0.5 * math.log(width)),
        torch.tensor([-0.7, 0.5 * math.log(width) + 0.5, -1.5]),
    ]).to(x)  # fmt: skip
    index = torch.zeros(len(x), dtype=torch.long) if tasks is None else torch.as_tensor(tasks)
    parts = [(x[index == t], y[index == t]) for t in index.unique()]
    free = usual.clone().requires_grad_()
    mean = torch.zeros(width + 1, dtype=x.dtype, requires_grad=tasks is not None)
    learned = [free, mean] if tasks is not None else [free]
    optimizer = torch.optim.LBFGS(learned, max_iter=_STEPS, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimizer.zero_grad()
        beliefs = Beliefs(center, spread, mean, free)
        evidence = torch.stack([beliefs.posterior(*part).log_evidence.sum() for part in parts])
        held = (free - usual).square().sum() / 2 + mean.square().sum() / 2
        value = held - evidence.sum()
        value.backward()
        return value

    with torch.enable_grad():
        optimizer.step(loss)
    found = free.detach()
    if not bool(found.isfinite().all()):
        found = usual
    return Beliefs(center, spread, mean.detach().nan_to_num(), found)
