"""Which synthetic tasks are there? Sinusoids, and the paper's Bayesian linear regression."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from ibaml.seeding import mix
from ibaml.tasks.batch import TaskBatch

Spectrum = Literal["one-small", "half-small", "linear", "geometric"]
QueryInputs = Literal["gaussian", "aligned"]
SPECTRA: tuple[Spectrum, ...] = get_args(Spectrum)
QUERY_INPUTS: tuple[QueryInputs, ...] = get_args(QueryInputs)


@dataclass(frozen=True)
class Sinusoids:
    """The family y = a·sin(x + φ) of few-shot regression: a in [0.1, 5], φ in [0, π], x in [−5, 5].

    A task depends only on its seed and its key.

    >>> Sinusoids().batch(seed=0, keys=range(8), support=5, query=10).support_x.shape
    torch.Size([8, 5, 1])
    """

    amplitude: tuple[float, float] = (0.1, 5.0)
    phase: tuple[float, float] = (0.0, math.pi)
    x_range: tuple[float, float] = (-5.0, 5.0)
    noise: float = 0.0

    def task(self, seed: int, key: int) -> tuple[float, float, torch.Generator]:
        """Amplitude and phase of one task, and the generator that draws its points."""
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
        """One batch, with ``support`` and ``query`` points for every key."""
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
        condition: largest over smallest singular value of the support inputs.
        scale: the largest singular value of the support inputs.
        spectrum: the other singular values: ``"one-small"`` (one is smaller by the condition
            number, the others are equal), ``"half-small"``, or falling in ``"linear"`` or
            ``"geometric"`` steps.
        queries: query inputs are independent ``"gaussian"`` vectors, or ``"aligned"``: they have
            the support inputs' singular values and right singular vectors.
    """

    dimension: int = 32
    noise: float = 0.01
    condition: float = 20.0
    scale: float = 1.0
    spectrum: Spectrum = "one-small"
    queries: QueryInputs = "gaussian"

    def __post_init__(self) -> None:
        for name, known in (("spectrum", SPECTRA), ("queries", QUERY_INPUTS)):
            if getattr(self, name) not in known:
                raise ValueError(
                    f"{name} must be one of {', '.join(known)}; got {getattr(self, name)!r}"
                )
        if self.dimension < 1 or self.condition < 1 or self.noise < 0 or self.scale <= 0:
            raise ValueError(
                "dimension and condition must be 1 or more, noise 0 or more, scale positive; got "
                f"{self}"
            )

    def singular_values(self) -> Tensor:
        """The singular values of the support inputs, the largest first."""
        n, small = self.dimension, 1 / self.condition
        if self.spectrum == "linear":
            values = torch.linspace(1, small, n, dtype=torch.float64)
        elif self.spectrum == "geometric":
            values = small ** torch.linspace(0, 1, n, dtype=torch.float64)
        else:
            values = torch.ones(n, dtype=torch.float64)
            count = n // 2 if self.spectrum == "half-small" else 1
            values[n - count :] = small if n > 1 else 1
        return self.scale * values

    def batch(
        self,
        seed: int,
        keys: Sequence[int],
        support: int = 32,
        query: int = 64,
        dtype: torch.dtype = torch.float64,
    ) -> TaskBatch:
        """One batch. A task depends only on its seed and its key."""
        least = support if self.queries == "gaussian" else min(support, query)
        if least < self.dimension:
            raise ValueError(
                f"support must be at least the dimension {self.dimension}, and so must query where "
                "it is aligned"
            )
        values = self.singular_values()
        tasks = []
        for key in keys:
            rng = torch.Generator().manual_seed(mix(seed, key))
            raw = torch.randn(support, self.dimension, generator=rng, dtype=torch.float64)
            left, _, right = torch.linalg.svd(raw, full_matrices=False)
            queries = torch.randn(query, self.dimension, generator=rng, dtype=torch.float64)
            if self.queries == "aligned":
                queries = torch.linalg.svd(queries, full_matrices=False)[0] * values @ right
            x = torch.cat([left * values @ right, queries])
            w = torch.randn(self.dimension, 1, generator=rng, dtype=torch.float64)
            y = x @ w
            y = y + self.noise * torch.randn(y.shape, generator=rng, dtype=torch.float64)
            tasks.append((x.to(dtype), y.to(dtype)))
        x, y = (torch.stack(part) for part in zip(*tasks, strict=True))
        return TaskBatch(
            x[:, :support], y[:, :support], x[:, support:], y[:, support:], keys=tuple(keys)
        )
