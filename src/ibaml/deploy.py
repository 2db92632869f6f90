"""How does a posterior become a plain module? By fixed points or draws, without a learner."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ibaml.energy import Likelihood, TaskEnergy
from ibaml.execution import held, norm_layers
from ibaml.heads.class_means import ClassDirections
from ibaml.heads.points import PREDICTION_POINTS, gaussian_points, place
from ibaml.metastep import map_tensors
from ibaml.posterior import Posteriors


class Members(nn.Module):
    """The network under every draw from the posterior: inputs (M, …) to outputs (S, M, …)."""

    def __init__(self, members: list[nn.Module]) -> None:
        super().__init__()
        self.members = nn.ModuleList(members)

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([member(x) for member in self.members])


class Heads(nn.Module):
    """The same if only a linear head differs: one pass through the layers before it."""

    weight: Tensor
    bias: Tensor | None

    def __init__(self, body: nn.Module, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.body = body
        self.register_buffer("weight", weight)  # (S, C, F)
        self.register_buffer("bias", bias)  # (S, C)

    def forward(self, x: Tensor) -> Tensor:
        features = self.body(x)
        outputs = features @ self.weight.transpose(-1, -2)
        return outputs if self.bias is None else outputs + self.bias[:, None]


class GaussianOutputs(nn.Module):
    """Mean (M, C) and covariance of a Gaussian head's outputs for inputs (M, …)."""

    bias: Tensor | None

    def __init__(self, body: nn.Module, moments: _Moments, adapts_bias: bool, bias: Tensor | None):
        super().__init__()
        self.body = body
        self.moments = moments
        self.adapts_bias = adapts_bias
        self.register_buffer("bias", bias)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        features = self.body(x)
        if self.adapts_bias:
            features = nn.functional.pad(features, (0, 1), value=1.0)
        mean, covariance = self.moments(features[None])
        mean = mean if self.bias is None else mean + self.bias
        return mean[0], covariance[0]


class _Moments(nn.Module):
    """The moments of a posterior, whose tensors are buffers here."""

    def __init__(self, structure: Any, function: Callable[[Any, Tensor], tuple[Tensor, Tensor]]):
        super().__init__()
        self.function = function
        self.structure = structure

        def keep(t: Tensor) -> Tensor:
            self.register_buffer(f"part_{len(self._buffers)}", t.detach().clone())
            return t

        map_tensors(keep, structure)

    def forward(self, features: Tensor) -> tuple[Tensor, Tensor]:
        buffers = iter(self.buffers())
        structure = map_tensors(lambda _: next(buffers), self.structure)
        return self.function(structure, features)


class AtPoints(nn.Module):
    """Outputs (S, M, C) at fixed points that stand for the Gaussian."""

    points: Tensor

    def __init__(self, outputs: GaussianOutputs, points: Tensor) -> None:
        super().__init__()
        self.outputs = outputs
        self.register_buffer("points", points.clone())

    def forward(self, x: Tensor) -> Tensor:
        mean, covariance = self.outputs(x)
        return place(mean, covariance, self.points).transpose(0, 1)


class Predictive(nn.Module):
    """Members, and a prediction from all their outputs."""

    noise: Tensor | None

    def __init__(self, members: nn.Module, likelihood: Likelihood, noise: Tensor | None) -> None:
        super().__init__()
        self.members = members
        self.likelihood = likelihood
        self.register_buffer("noise", noise)


class Probabilities(Predictive):
    """Class probabilities (M, C) of inputs (M, …)."""

    def forward(self, x: Tensor) -> Tensor:
        outputs = self.members(x)
        rows = self.likelihood.probabilities(outputs.flatten(0, 1))
        return rows.unflatten(0, outputs.shape[:2]).mean(0)


class MeanAndVariance(Predictive):
    """Mean and variance, each with the shape of the targets of M inputs."""

    squeeze = False

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if isinstance(self.members, GaussianOutputs):
            mean, variance = self.members(x)
            if variance.dim() > mean.dim():
                variance = variance.diagonal(dim1=-2, dim2=-1)
        else:
            outputs = self.members(x)
            mean = outputs.mean(0)
            variance = (outputs - mean).square().mean(0)
        if self.squeeze:
            mean, variance = mean.squeeze(-1), variance.squeeze(-1)
        return mean, variance if self.noise is None else variance + self.noise


@torch.no_grad()
def predictive_module(task: Posteriors, samples: int = 10) -> nn.Module:
    """The module of one task's posterior. It averages over fixed points or draws, as predictions
    do by default."""
    if "batch" in task.norm_stats.values():
        raise ValueError(
            'predictions with norm_stats="batch" depend on the other queries, so they cannot be a '
            'module: adapt with norm_stats="running" or "support"'
        )
    task._check_fresh()
    labels = not task._energy.y.is_floating_point()
    members: nn.Module
    if (gaussian := _gaussian_outputs(task)) is not None:
        members = gaussian
        if labels:
            v, outputs = task._v, task._energy.layout.shapes[0][0]
            if isinstance(task._energy.answer, ClassDirections):
                points = v.new_zeros(1, outputs)
            else:
                points = gaussian_points(PREDICTION_POINTS, outputs, v.dtype, v.device)
            members = AtPoints(gaussian, points)
    else:
        energy = task._sampled(samples, None)
        weights = energy.weights(task._v)
        members = _heads(task, weights) or Members(_copies(task, energy, weights))
    energy = task._energy
    likelihood = _copied(energy.likelihood)
    likelihood.requires_grad_(False)
    if labels:
        return Probabilities(members, likelihood, None).eval()
    noise = likelihood.noise_variance()
    noise = None if noise is None else noise.detach().to(task._v.dtype)
    made = MeanAndVariance(members, likelihood, noise)
    made.squeeze = energy.y.dim() == 2  # each target is one number
    return made.eval()


def _copied(module: nn.Module) -> Any:
    """A copy, taken while no thread runs the module."""
    with held(module):
        return copy.deepcopy(module)


def _gaussian_outputs(task: Posteriors) -> GaussianOutputs | None:
    """The moments of a linear head's outputs; None if they are not Gaussian."""
    energy = task._energy
    gaussian = energy.belief.has_output_moments or energy.answer is not None
    if not gaussian or not energy.run.linear or "support" in task.norm_stats.values():
        return None
    if energy.answer is not None:
        moments = _Moments(energy.answer, lambda answer, features: answer.moments(features))
    else:
        slices = energy.belief.slices(energy.layout.size)
        blocks = {name: energy.rows(task._v[:, where]) for name, where in slices.items()}
        moments = _Moments(blocks, energy.belief.output_moments)
    bias = None if energy.adapts_bias else energy.fixed_bias()
    bias = None if bias is None else bias.detach().clone()
    return GaussianOutputs(_body(task), moments, energy.adapts_bias, bias)


def _body(task: Posteriors) -> nn.Module:
    """The layers before the head."""
    name = task._energy.run.head
    if not name:  # the network is its head
        return nn.Identity()
    body: nn.Module = _copied(task.learner.model)
    owner, _, leaf = name.rpartition(".")
    setattr(body.get_submodule(owner), leaf, nn.Identity())
    return body.eval().requires_grad_(False)


def _heads(task: Posteriors, weights: dict[str, Tensor]) -> Heads | None:
    """The members as one body with many heads; None unless the network is features and a head."""
    energy = task._energy
    name = energy.run.head
    constants = {**energy.constants, **energy.meta.shared}
    if name is None or "support" in task.norm_stats.values():
        return None
    if energy.run.features(energy.model, constants, energy.x[:, :1]) is None:
        return None
    body = _body(task)
    dot = f"{name}." if name else ""
    draws = next(iter(weights.values())).shape[1]

    def stacked(part: str) -> Tensor | None:
        if (part_weights := weights.get(dot + part)) is not None:
            return part_weights[0].clone()
        shared = constants.get(dot + part)
        return None if shared is None else shared.detach().expand(draws, *shared.shape).clone()

    weight = stacked("weight")
    assert weight is not None
    return Heads(body, weight, stacked("bias"))


def _copies(task: Posteriors, energy: TaskEnergy, weights: dict[str, Tensor]) -> list[nn.Module]:
    """One network per draw."""
    statistics = task.statistics(energy) if "support" in task.norm_stats.values() else {}
    members = []
    for s in range(next(iter(weights.values())).shape[1]):
        member = _copied(task.learner.model)
        for layer in norm_layers(member).values():  # buffers for the support set's statistics
            if layer.running_mean is None:
                layer.running_mean = layer.running_var = torch.zeros(layer.num_features)
            layer.track_running_stats = True
        for name, value in {**weights, **statistics}.items():
            _set(member, name, value[0, s].clone())
        member.eval().requires_grad_(False)
        members.append(member)
    return members


def _set(module: nn.Module, name: str, value: Tensor) -> None:
    """Replace a parameter or buffer by a tensor, which may have another shape."""
    owner, _, leaf = name.rpartition(".")
    part = module.get_submodule(owner)
    if leaf in part._parameters:
        setattr(part, leaf, nn.Parameter(value, requires_grad=False))
        if isinstance(part, nn.Linear):  # a tied head has as many rows as the task has classes
            part.out_features = part.weight.shape[0]
    else:
        part._buffers[leaf] = value
