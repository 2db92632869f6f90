"""Synthetic families of tasks: sinusoids, and the paper's Bayesian linear regression."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ibaml.seeding import mix
from ibaml.tasks.batch import TaskBatch


@dataclass(frozen=True)
class Sinusoids:
    """The family y = a·sin(x + φ) of few-shot regression: a in [0.1, 5], φ in [0, π], x in [−5, 5].

    A task depends on its seed and its key alone.

    >>> Sinusoids().batch(seed=0, keys=range(8), support=5, query=10).support_x.shape
    torch.Size([8, 5, 1])
    """

    amplitude: tuple[float, float] = (0.1, 5.0)
    phase: tuple[float, float] = (0.0, math.pi)
    x_range: tuple[float, float] = (-5.0, 5.0)
    noise: float = 0.0

    def task(self, seed: int, key: int) -> tuple[float, float, torch.Generator]:
        """Amplitude and phase of one task, and the generator its points come from."""
        generator = torch.Generator().manual_seed(mix(seed, key))
        a, phi = torch.rand(2, generator=generator, dtype=torch.float64).tolist()
        low, high = self.amplitude
        first, last = self.phase
        return low + (high - low) * a, first + (last - first) * phi, generator

    def batch(
        self,
        seed: int,
        keys: Sequence[int],
        support: int,
        query: int,
        dtype: torch.dtype = torch.float32,
    ) -> TaskBatch:
        """One batch: ``support`` and ``query`` points for every key."""
        xs, ys = [], []
        low, high = self.x_range
        for key in keys:
            a, phi, generator = self.task(seed, key)
            x = low + (high - low) * torch.rand(support + query, 1, generator=generator)
            y = a * torch.sin(x + phi)
            y = y + self.noise * torch.randn(y.shape, generator=generator)
            xs.append(x)
            ys.append(y)
        x, y = torch.stack(xs).to(dtype), torch.stack(ys).to(dtype)
        return TaskBatch(
            x[:, :support], y[:, :support], x[:, support:], y[:, support:], keys=tuple(keys)
        )


@dataclass(frozen=True)
class LinearRegression:
    """The paper's synthetic family: y = ⟨w, x⟩ + noise with w ~ N(0, I) and support inputs of a
    given condition number.

    Args:
        dimension: d.
        noise: σ of the additive Gaussian noise.
        condition: largest over smallest singular value of the support inputs; one singular value is
            smaller by this factor, the others are equal.
        scale: the largest singular value of the support inputs.
    """

    dimension: int = 32
    noise: float = 0.01
    condition: float = 20.0
    scale: float = 1.0

    def __post_init__(self) -> None:
        if self.dimension < 1 or self.condition < 1 or self.noise < 0 or self.scale <= 0:
            raise ValueError(
                "dimension and condition must be 1 or more, noise 0 or more, scale positive; got "
                f"{self}"
            )

    def batch(
        self,
        seed: int,
        keys: Sequence[int],
        support: int = 32,
        query: int = 64,
        dtype: torch.dtype = torch.float64,
    ) -> TaskBatch:
        """One batch; a task depends on its seed and key alone."""
        if support < self.dimension:
            raise ValueError(f"support must be at least the dimension {self.dimension}")
        tasks = []
        for key in keys:
            rng = torch.Generator().manual_seed(mix(seed, key))
            raw = torch.randn(support, self.dimension, generator=rng, dtype=torch.float64)
            left, _, right = torch.linalg.svd(raw, full_matrices=False)
            values = torch.full((self.dimension,), self.scale, dtype=torch.float64)
            values[-1] = self.scale / self.condition if self.dimension > 1 else self.scale
            x = torch.cat(
                [
                    left @ torch.diag(values) @ right,
                    torch.randn(query, self.dimension, generator=rng, dtype=torch.float64),
                ]
            )
            w = torch.randn(self.dimension, 1, generator=rng, dtype=torch.float64)
            y = x @ w
            y = y + self.noise * torch.randn(y.shape, generator=rng, dtype=torch.float64)
            tasks.append((x.to(dtype), y.to(dtype)))
        x, y = (torch.stack(part) for part in zip(*tasks, strict=True))
        return TaskBatch(
            x[:, :support], y[:, :support], x[:, support:], y[:, support:], keys=tuple(keys)
        )
