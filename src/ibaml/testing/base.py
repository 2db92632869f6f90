"""What do the suites share? Fixed random numbers, small problems, and a comparison with a label."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from ibaml.energy import NoiseKind, TaskEnergy
from ibaml.gradient import FirstOrder
from ibaml.learner import MetaLearner
from ibaml.solve import GradientDescent
from ibaml.tasks import TaskBatch
from ibaml.weights import Belief

F64 = torch.float64
TASKS = 3


def normal(*shape: int, seed: int) -> Tensor:
    rng = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=rng, dtype=F64)


def number(values: Tensor) -> int:
    """How many of the values are finite."""
    return int(values.isfinite().sum())


def close(actual: Tensor, expected: Tensor, what: str, tolerance: float = 1e-8) -> None:
    """Fail for a difference above the tolerance, relative to the largest entry (or to 1)."""
    assert actual.shape == expected.shape, (
        f"{what}: shape {tuple(actual.shape)} instead of {tuple(expected.shape)}"
    )
    error = float((actual.detach() - expected.detach()).abs().max()) if actual.numel() else 0.0
    scale = max(1.0, float(expected.detach().abs().max()) if expected.numel() else 0.0)
    assert error <= tolerance * scale, f"{what}: off by {error:.2g}"


def regression(belief: Belief, noise: NoiseKind = "independent") -> MetaLearner:
    """A smooth regression learner with four weights, in double precision."""
    torch.manual_seed(0)
    model = nn.Linear(3, 1).double()
    return MetaLearner(
        model, belief, GradientDescent(1), FirstOrder(), samples=6, noise=noise, beta=0.5,
        init_log_var=-1.0,
    )  # fmt: skip


def batch() -> TaskBatch:
    x, noise = normal(TASKS, 9, 3, seed=20), normal(TASKS, 9, 1, seed=21)
    y = x @ normal(TASKS, 3, 1, seed=22) + 0.2 * noise
    return TaskBatch(x[:, :6], y[:, :6], x[:, 6:], y[:, 6:])


def problem(belief: Belief, noise: NoiseKind = "independent") -> tuple[TaskEnergy, Tensor]:
    """The energy of three tasks with the belief, and their start."""
    energy, _ = regression(belief, noise).problem(batch(), 0)
    return energy, belief.start(energy.meta.prior, TASKS).detach()


def one_task(energy: TaskEnergy, t: int) -> TaskEnergy:
    one = slice(t, t + 1)
    return replace(energy, x=energy.x[one], y=energy.y[one], noise=energy.noise[one])
