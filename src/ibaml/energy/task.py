"""What is the energy of a batch of tasks? Expected nll of the support sets plus κ times a penalty.

    E(v, θ) = mean over samples s and examples n of nll(f(w_s; x_n), y_n)  +  κ·penalty(v, θ)

The weights w_s are drawn from v with fixed noise, so E is one deterministic function of (v, θ).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from ibaml.energy.base import detached
from ibaml.energy.likelihood import Likelihood
from ibaml.execution import Runner, held
from ibaml.heads.class_means import ClassDirections
from ibaml.heads.gaussian import GaussianHead
from ibaml.heads.points import place_first
from ibaml.weights import Belief, Layout, Precision, Prior, Slot


@dataclass(frozen=True)
class MetaParameters:
    """All meta-learned tensors that the energy depends on, and those that only predictions read.
    ``log_beta`` is log β if it is learned."""

    prior: Prior
    shared: Mapping[str, Tensor] = field(default_factory=dict)
    likelihood: Mapping[str, Tensor] = field(default_factory=dict)
    log_beta: Tensor | None = None
    outside: Mapping[str, Tensor] = field(default_factory=dict)  # not in the energy

    def tensors(self) -> tuple[Tensor, ...]:
        beta = () if self.log_beta is None else (self.log_beta,)
        return (*self.prior, *self.shared.values(), *self.likelihood.values(), *beta)

    def replace(self, tensors: tuple[Tensor, ...]) -> MetaParameters:
        last = len(tensors) - (self.log_beta is not None)
        n, k = len(self.prior), len(self.shared)
        return MetaParameters(
            prior=tensors[:n],
            shared=dict(zip(self.shared, tensors[n : n + k], strict=True)),
            likelihood=dict(zip(self.likelihood, tensors[n + k : last], strict=True)),
            log_beta=None if self.log_beta is None else tensors[last],
            outside=self.outside,
        )


@dataclass(frozen=True)
class TaskEnergy:
    """The energy of T tasks, v of shape (T, dim).

    Attributes:
        weight: κ, the weight of the penalty; κ/β if log β is learned.
        noise: standard normal numbers (T, S, `Belief.noise_size`).
        constants: frozen weights and buffers, batch norm's among them.
        redraw: draws new noise for one step, for solvers that ask for it.
        points: normal numbers (S, C) that stand for noise on the outputs of a linear head, the same
            for all examples; None for noise on the weights.
        answer: the posterior of a linear head, if it is more than v.
        predicts: whether outputs are read as for predictions (in the meta-loss).
    """

    model: nn.Module
    run: Runner
    belief: Belief
    layout: Layout
    likelihood: Likelihood
    meta: MetaParameters
    constants: Mapping[str, Tensor | None]
    x: Tensor
    y: Tensor
    noise: Tensor
    weight: float | Tensor
    redraw: Callable[[int], Tensor] | None = None
    predicts: bool = False
    points: Tensor | None = None
    answer: GaussianHead | None = None
    _cache: dict[str, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def theta(self) -> tuple[Tensor, ...]:
        return self.meta.tensors()

    @property
    def slots(self) -> tuple[Slot, ...]:
        return self.layout.slots(self.belief.blocks(self.layout.size))

    @property
    def lowest(self) -> Tensor | float | None:
        """The loss of a perfect fit: penalties are not negative."""
        if self.likelihood.takes_labels(self.y):
            return 0.0  # −log of a probability
        variance = self.noise_variance()
        if variance is None:
            return None
        numbers = self.y[0, 0].numel()
        return numbers * 0.5 * (2 * math.pi * variance).log()

    @property
    def kappa(self) -> float | Tensor:
        """κ, the weight of the penalty: β / N for most beliefs."""
        log_beta = self.meta.log_beta
        return self.weight if log_beta is None else self.weight * log_beta.exp()

    @property
    def penalized(self) -> frozenset[int]:
        beta = () if self.meta.log_beta is None else (len(self.theta) - 1,)
        return frozenset((*range(len(self.meta.prior)), *beta))

    def part(self, v: Tensor, block: str) -> Tensor:
        """One block of v, or of a tensor with the shape of v."""
        return v[..., self.belief.slices(self.layout.size)[block]]

    def bind(self, theta: tuple[Tensor, ...]) -> TaskEnergy:
        return replace(self, meta=self.meta.replace(theta))

    def frozen(self) -> TaskEnergy:
        """The energy as a function of v alone, with the features that are computed already."""
        frozen = detached(self)
        if (features := self._cache.get("features")) is not None:
            frozen._cache.update(features=features.detach(), recorded=True)
        return frozen

    def resample(self, step: int) -> TaskEnergy:
        if self.redraw is None:
            return self
        again = replace(self, noise=self.redraw(step))
        again._cache.update(self._cache)  # other noise, same features
        return again

    def __call__(self, v: Tensor) -> Tensor:
        return self.loss(v) + self.penalty(v)

    def weights(self, v: Tensor) -> dict[str, Tensor]:
        """The drawn weights by name, ``(T, S, *shape)``."""
        if self.answer is not None:
            return self.layout.split(self.flat(self.answer.sample(self.noise)))
        return self.layout.split(self.belief.sample(v, self.noise))

    def outputs(self, v: Tensor) -> Tensor:
        """The network's outputs, (T, S, N, …)."""
        if self.points is not None:
            mean, covariance = self.output_moments(v)
            if isinstance(self.answer, ClassDirections):
                return mean[:, None]  # no spread
            return place_first(mean, covariance, self.points)
        constants = {**self.constants, **self.meta.shared}
        features = self._features(constants)
        if features is not None:
            return self.run.from_features(self.weights(v), constants, features)
        return self.run(self.model, self.weights(v), constants, self.x)

    def _features(self, constants: Mapping[str, Tensor | None]) -> Tensor | None:
        """The features that an adapted head reads. They are the same at every v, so they are
        computed once (again if gradients are needed that the first pass did not record)."""
        recorded = torch.is_grad_enabled()
        if "features" not in self._cache or (recorded and not self._cache["recorded"]):
            self._cache["features"] = self.run.features(self.model, constants, self.x)
            self._cache["recorded"] = recorded
        return self._cache["features"]

    # --- a linear head by itself -----------------------------------------------------------------

    @property
    def is_linear_head(self) -> bool:
        """Whether the adapted weights are those of a linear layer that reads a vector per example
        and ends the network, so that outputs are linear in them."""
        if self.run.head is None or not self.layout.names[0].endswith("weight"):
            return False
        features = self._features({**self.constants, **self.meta.shared})
        return features is not None and features.dim() == 3

    def head_features(self) -> Tensor:
        """What the head's rows multiply, (T, N, F): features, then a constant 1 for a bias."""
        features = self._features({**self.constants, **self.meta.shared})
        assert features is not None
        return nn.functional.pad(features, (0, 1), value=1.0) if self.adapts_bias else features

    def rows(self, flat: Tensor) -> Tensor:
        """Flat weights of a head (…, n) as its rows (…, C, F), the bias last."""
        weight, *bias = self.layout.split(flat).values()
        return torch.cat([weight, bias[0][..., None]], -1) if bias else weight

    def flat(self, rows: Tensor) -> Tensor:
        """Rows (…, C, F) as flat weights (…, n)."""
        if not self.adapts_bias:
            return rows.flatten(-2)
        return torch.cat([rows[..., :-1].flatten(-2), rows[..., -1]], -1)

    @property
    def adapts_bias(self) -> bool:
        """Whether the head's bias is adapted too."""
        return len(self.layout.names) == 2

    def output_moments(self, v: Tensor) -> tuple[Tensor, Tensor]:
        """Mean (T, N, C) of a linear head's outputs, and their covariance (T, N, C, C), or variance
        (T, N, C) if they are independent."""
        features = self.head_features()
        if self.answer is not None:
            mean, covariance = self.answer.moments(features)
        else:
            slices = self.belief.slices(self.layout.size)
            blocks = {name: self.rows(v[:, where]) for name, where in slices.items()}
            mean, covariance = self.belief.output_moments(blocks, features)
        bias = None if self.adapts_bias else self.fixed_bias()
        return mean if bias is None else mean + bias, covariance

    def fixed_bias(self) -> Tensor | None:
        """The bias of a head whose weight alone is adapted."""
        name = f"{self.run.head}.bias" if self.run.head else "bias"
        return {**self.constants, **self.meta.shared}.get(name)

    # --- how well outputs explain targets --------------------------------------------------------

    def nll(self, outputs: Tensor) -> Tensor:
        """nll of every sample and example, (T, S, N)."""
        tasks, samples, examples = outputs.shape[:3]
        y = self.y[:, None].expand(tasks, samples, *self.y.shape[1:]).flatten(0, 2)
        rows = outputs.flatten(0, 2)
        if self.predicts:
            rows = self.likelihood.rescale(rows, self.meta.outside)
        with held(self.likelihood):
            flat = functional_call(self.likelihood, dict(self.meta.likelihood), (rows, y))
        return flat.view(tasks, samples, examples)

    def predictive_nll(self, v: Tensor) -> Tensor:
        """−log of the averaged likelihood of every example, (T, N): in closed form for a linear
        head with Gaussian noise, else over the draws or points."""
        if self.points is not None and not self.likelihood.takes_labels(self.y):
            noise = self.noise_variance()
            if noise is not None:
                mean, covariance = self.output_moments(v)
                return gaussian_nll(self.y.view_as(mean), mean, _variance(mean, covariance) + noise)
        nll = self.nll(self.outputs(v))
        return math.log(nll.shape[1]) - torch.logsumexp(-nll, 1)

    def noise_variance(self) -> Tensor | None:
        """The variance of the targets' noise, differentiable where it is learned."""
        with held(self.likelihood):
            named = {f"likelihood.{n}": t for n, t in self.meta.likelihood.items()}
            variance: Tensor | None = functional_call(_NoiseOf(self.likelihood), named, ())
            return variance

    def output_loss(self, outputs: Tensor) -> Tensor:
        """The loss as a function of the outputs (for Gauss–Newton products)."""
        return self.nll(outputs).mean((1, 2))

    def loss(self, v: Tensor) -> Tensor:
        return self.output_loss(self.outputs(v))

    def penalty(self, v: Tensor) -> Tensor:
        if not self.belief.has_prior:
            return v.new_zeros(v.shape[0])
        return self.kappa * self.belief.penalty(v, self.meta.prior)

    def precision(self, v: Tensor) -> Precision | None:
        if not self.belief.has_prior:
            return None
        kappa = self.kappa.detach() if isinstance(self.kappa, Tensor) else self.kappa
        return self.belief.precision(v, self.meta.prior).times(kappa)

    def penalty_gradient(self, v: Tensor, u: Tensor, wanted: Collection[int]) -> dict[int, Tensor]:
        """By the belief's closed form if it has one, else by autograd."""
        theta = tuple(t.detach() for t in self.theta)
        energy = self.bind(theta)
        closed = self.belief.prior_product(v.detach(), energy.meta.prior, u)
        gradients = {i: energy.kappa * g for i, g in enumerate(closed or ()) if i in wanted}
        rest = [i for i in wanted if i in self.penalized and i not in gradients]
        if rest and self.belief.has_prior:
            with torch.enable_grad():
                point = v.detach().requires_grad_()
                leaves = {i: theta[i].clone().requires_grad_() for i in rest}
                bound = tuple(leaves.get(i, t) for i, t in enumerate(theta))
                penalty = self.bind(bound).penalty(point).sum()
                (slope,) = torch.autograd.grad(penalty, point, create_graph=True)
            products = torch.autograd.grad(slope, list(leaves.values()), -u, allow_unused=True)
            gradients |= {i: g for i, g in zip(rest, products, strict=True) if g is not None}
        return gradients


class _NoiseOf(nn.Module):
    """A likelihood's noise variance as a module's output, to be called with other parameters."""

    def __init__(self, likelihood: Likelihood) -> None:
        super().__init__()
        self.likelihood = likelihood

    def forward(self) -> Tensor | None:
        return self.likelihood.noise_variance()


def gaussian_nll(y: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    """−log N(y; mean, variance), summed over the numbers of a target: (…, C) to (…)."""
    square = (y - mean).square() / variance
    return 0.5 * (square + (2 * math.pi * variance).log()).sum(-1)


def _variance(mean: Tensor, covariance: Tensor) -> Tensor:
    if covariance.dim() == mean.dim():
        return covariance
    return covariance.diagonal(dim1=-2, dim2=-1)
