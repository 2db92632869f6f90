"""How does a posterior become a plain module? By fixed draws, without a learner or randomness."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from ibaml.energy import Likelihood, TaskEnergy
from ibaml.execution import held, norm_layers
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
        outputs = self.members(x)
        outputs = outputs.squeeze(-1) if self.squeeze else outputs
        mean = outputs.mean(0)
        variance = (outputs - mean).square().mean(0)
        return mean, variance if self.noise is None else variance + self.noise


@torch.no_grad()
def predictive_module(task: Posteriors, samples: int = 10) -> nn.Module:
    """The module of one task's posterior, with its default draws (a single one for a point)."""
    if "batch" in task.norm_stats.values():
        raise ValueError(
            'predictions with norm_stats="batch" depend on the other queries, so they cannot be a '
            'module: adapt with norm_stats="running" or "support"'
        )
    task._check_fresh()
    energy = task._sampled(samples, None)
    weights = energy.weights(task._v)
    members = _heads(task, weights) or Members(_copies(task, energy, weights))
    likelihood = _copied(energy.likelihood)
    likelihood.requires_grad_(False)
    if not energy.y.is_floating_point():
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


def _heads(task: Posteriors, weights: dict[str, Tensor]) -> Heads | None:
    """The members as one body with many heads; None unless the network is features and a head."""
    energy = task._energy
    name = energy.run.head
    constants = {**energy.constants, **energy.meta.shared}
    if name is None or "support" in task.norm_stats.values():
        return None
    if energy.run.features(energy.model, constants, energy.x[:, :1]) is None:
        return None
    body = _copied(task.learner.model)
    owner, _, leaf = name.rpartition(".")
    if not name:  # the network is its head
        body = nn.Identity()
    else:
        setattr(body.get_submodule(owner), leaf, nn.Identity())
    dot = f"{name}." if name else ""
    draws = next(iter(weights.values())).shape[1]

    def stacked(part: str) -> Tensor | None:
        if (part_weights := weights.get(dot + part)) is not None:
            return part_weights[0].clone()
        shared = constants.get(dot + part)
        return None if shared is None else shared.detach().expand(draws, *shared.shape).clone()

    weight = stacked("weight")
    assert weight is not None
    return Heads(body.eval().requires_grad_(False), weight, stacked("bias"))


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
