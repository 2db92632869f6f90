"""The energy of a batch of tasks: expected nll of the support set plus κ times the prior's penalty.

    E(v, θ) = mean over samples s and examples n of nll(f(w_s; x_n), y_n)  +  κ·penalty(v, θ)

with weights w_s drawn from v by fixed noise, so that E is one deterministic function of (v, θ).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from ibaml.energy.likelihood import Likelihood
from ibaml.execution import Runner, held
from ibaml.weights import Belief, Layout, Prior, Slot


@dataclass(frozen=True)
class Theta:
    """Everything meta-learned that the energy depends on, and what only predictions read."""

    prior: Prior
    shared: Mapping[str, Tensor] = field(default_factory=dict)
    likelihood: Mapping[str, Tensor] = field(default_factory=dict)
    outside: Mapping[str, Tensor] = field(default_factory=dict)  # of predictions, not of the energy

    def tensors(self) -> tuple[Tensor, ...]:
        return (*self.prior, *self.shared.values(), *self.likelihood.values())

    def replace(self, tensors: tuple[Tensor, ...]) -> Theta:
        n, k = len(self.prior), len(self.shared)
        return Theta(
            prior=tensors[:n],
            shared=dict(zip(self.shared, tensors[n : n + k], strict=True)),
            likelihood=dict(zip(self.likelihood, tensors[n + k :], strict=True)),
            outside=self.outside,
        )


@dataclass(frozen=True)
class TaskEnergy:
    """The energy of T tasks, v of shape (T, dim).

    Attributes:
        kappa: κ, the weight of the penalty.
        noise: standard normal (T, S, n).
        constants: frozen weights and buffers, batch norm's among them.
        redraw: noise for a step of its own, for solvers that ask for it.
        predicts: whether outputs are read as predictions are (by the meta-loss).
    """

    model: nn.Module
    run: Runner
    belief: Belief
    layout: Layout
    likelihood: Likelihood
    meta: Theta
    constants: Mapping[str, Tensor | None]
    x: Tensor
    y: Tensor
    noise: Tensor
    kappa: float
    redraw: Callable[[int], Tensor] | None = None
    predicts: bool = False
    _kept: dict[str, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def theta(self) -> tuple[Tensor, ...]:
        return self.meta.tensors()

    @property
    def slots(self) -> tuple[Slot, ...]:
        return self.layout.slots(self.belief.blocks)

    @property
    def closed(self) -> frozenset[int]:
        return frozenset(range(len(self.meta.prior)))

    def bind(self, theta: tuple[Tensor, ...]) -> TaskEnergy:
        return replace(self, meta=self.meta.replace(theta))

    def resample(self, step: int) -> TaskEnergy:
        if self.redraw is None:
            return self
        again = replace(self, noise=self.redraw(step))
        again._kept.update(self._kept)  # other noise, same features
        return again

    def __call__(self, v: Tensor) -> Tensor:
        return self.loss(v) + self.penalty(v)

    def weights(self, v: Tensor) -> dict[str, Tensor]:
        """The drawn weights by name, (T, S, *shape)."""
        return self.layout.split(self.belief.sample(v, self.noise))

    def outputs(self, v: Tensor) -> Tensor:
        """The network's outputs, (T, S, N, …)."""
        constants = {**self.constants, **self.meta.shared}
        features = self._features(constants)
        if features is not None:
            return self.run.from_features(self.weights(v), constants, features)
        return self.run(self.model, self.weights(v), constants, self.x)

    def _features(self, constants: Mapping[str, Tensor | None]) -> Tensor | None:
        """What an adapted head reads. It is the same at every v, so it is computed once (again
        where gradients are wanted that the first pass did not record)."""
        recorded = torch.is_grad_enabled()
        if "features" not in self._kept or (recorded and not self._kept["recorded"]):
            self._kept["features"] = self.run.features(self.model, constants, self.x)
            self._kept["recorded"] = recorded
        return self._kept["features"]

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

    def output_loss(self, outputs: Tensor) -> Tensor:
        """The loss as a function of the outputs (for Gauss–Newton products)."""
        return self.nll(outputs).mean((1, 2))

    def loss(self, v: Tensor) -> Tensor:
        return self.output_loss(self.outputs(v))

    def penalty(self, v: Tensor) -> Tensor:
        if not self.belief.has_prior:
            return v.new_zeros(v.shape[0])
        return self.kappa * self.belief.penalty(v, self.meta.prior)

    def precision(self, v: Tensor) -> Tensor | None:
        if not self.belief.has_prior:
            return None
        return self.kappa * self.belief.precision(v, self.meta.prior)

    def prior_gradient(self, v: Tensor, u: Tensor) -> dict[int, Tensor]:
        product = self.belief.prior_product(v, self.meta.prior, u)
        return {i: self.kappa * g for i, g in enumerate(product)}
