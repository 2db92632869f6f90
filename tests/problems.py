"""Small learners and batches that the tests share."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import ibaml
from ibaml import TaskBatch
from oracles import F64

_DESCENT = {"solver": "descent", "steps": 5, "lr": 0.01}
_SAMPLED = {"samples": 5, "noise": "independent", "beta": 1.0, "init_log_var": -6.0}
_PLAIN: dict[str, dict[str, Any]] = {
    "imaml": {"lam": 1.0},
    "abml": _SAMPLED,
    "ibaml": _SAMPLED,
}
_PLAIN_RULE: dict[str, dict[str, Any]] = {
    "imaml": {"curvature": "energy", "damping": 0.0},
    "ibaml": {"curvature": "ggn", "damping": 0.0, "block": "all"},
}


def plain_learner(method: str, model: nn.Module, **options: Any) -> ibaml.MetaLearner:
    """A learner of plain options wherever none is given, so that what a test checks does not follow
    what is recommended: everything adapted, five small steps, five samples, β = λ = 1."""
    plain = {"adapt": "all", **_PLAIN.get(method, {})}
    if "solver" not in options:
        plain |= _DESCENT
    if "gradient" not in options:
        plain |= _PLAIN_RULE.get(method, {})
    return getattr(ibaml.methods, method)(model, **{**plain, **options})


def linear_model(features: int = 4) -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(features, 1, bias=False).to(F64)


def mlp_model(activation: type[nn.Module] = nn.Tanh, features: int = 3, ways: int = 3) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(features, 4), activation(), nn.Linear(4, ways)).to(F64)


def conv_model(smooth: bool = True, norm: bool = True, ways: int = 2) -> nn.Module:
    """A small conv net: batch norm, and smooth (or not) activation and pooling; 6×6 images."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 2, 3),
        nn.BatchNorm2d(2) if norm else nn.Identity(),
        nn.Tanh() if smooth else nn.ReLU(),
        nn.AvgPool2d(2) if smooth else nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(8, ways),
    ).to(F64)


def regression_batch(tasks: int = 2, features: int = 4, support: int = 6, query: int = 5):
    rng = torch.Generator().manual_seed(1)
    w = torch.randn(tasks, features, 1, generator=rng, dtype=F64)
    x = torch.randn(tasks, support + query, features, generator=rng, dtype=F64)
    y = x @ w + 0.1 * torch.randn(tasks, support + query, 1, generator=rng, dtype=F64)
    return TaskBatch(x[:, :support], y[:, :support], x[:, support:], y[:, support:])


def class_batch(
    shape: tuple[int, ...] = (3,),
    tasks: int = 2,
    ways: int = 3,
    shots: int = 2,
    query: int = 2,
    seed: int = 2,
) -> TaskBatch:
    """Classes are noisy points around random centers."""
    rng = torch.Generator().manual_seed(seed)
    centers = torch.randn(tasks, ways, 1, *shape, generator=rng, dtype=F64)
    noise = torch.randn(tasks, ways, shots + query, *shape, generator=rng, dtype=F64)
    x = centers + 0.5 * noise
    y = torch.arange(ways)[None, :, None].expand(tasks, ways, shots + query)
    return TaskBatch(
        x[:, :, :shots].flatten(1, 2),
        y[:, :, :shots].flatten(1, 2),
        x[:, :, shots:].flatten(1, 2),
        y[:, :, shots:].flatten(1, 2),
    )
