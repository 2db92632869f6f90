"""Common random numbers: noise that depends on a seed and a task's key, never on the batch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import IntEnum
from typing import Literal

import torch
from torch import Tensor

from ibaml.seeding import mix

NoiseKind = Literal["independent", "antithetic"]
NOISE_KINDS: tuple[NoiseKind, ...] = ("independent", "antithetic")


class Stream(IntEnum):
    """What a draw is for: streams of one task never share a number."""

    ADAPT = 0
    META = 1
    PREDICT = 2


def draw_noise(
    seed: int,
    keys: Sequence[int],
    stream: Stream,
    samples: int,
    size: int,
    kind: NoiseKind = "independent",
    *,
    step: int = 0,
    device: torch.device | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Standard normal noise (T, S, n), the same for a task whatever the batch or dtype. (A CPU and
    an accelerator draw different numbers, each the way it is fast at.)

    ``"antithetic"`` draws pairs (ε, −ε); an odd number of samples has one free draw.
    """
    free = samples if kind == "independent" else (samples + 1) // 2
    seeds = [mix(seed, key, stream, step) for key in keys]
    if device is None or device.type != "cuda":
        drawn = [torch.randn(free, size, generator=torch.Generator().manual_seed(s)) for s in seeds]
        noise = torch.stack(drawn)
    else:
        pinned = torch.tensor(seeds).pin_memory()  # so that the copy need not wait for the device
        noise = normal(pinned.to(device, non_blocking=True), free * size)
        noise = noise.unflatten(1, (free, size))
    noise = noise.to(device=device, dtype=dtype)
    if kind == "antithetic":
        noise = torch.stack([noise, -noise], 2).flatten(1, 2)[:, :samples]
    return noise


def normal(seeds: Tensor, count: int) -> Tensor:
    """``count`` standard normal numbers for each of the seeds (T,), float64, on their device.

    A counter-based generator (Widynski's Squares) and Box and Muller's transform, in elementwise
    operations for all tasks together, on the device and without waiting.
    """
    key = (seeds | 1)[:, None]
    pairs = (count + 1) // 2
    counter = torch.arange(2 * pairs, device=seeds.device)[None]
    uniform = (_squares(counter, key).double() + 0.5) * 2.0**-32
    radius = (-2 * uniform[:, :pairs].log()).sqrt_()
    angle = uniform[:, pairs:] * (2 * math.pi)
    return torch.cat([radius * angle.cos(), radius * angle.sin()], 1)[:, :count]


def _squares(counter: Tensor, key: Tensor) -> Tensor:
    """32 random bits for every counter and (odd) key."""

    def swapped(x: Tensor) -> Tensor:
        return ((x >> 32) & 0xFFFFFFFF) | (x << 32)

    y = counter * key
    z = y + key
    x = swapped(y * y + y)
    x = swapped(x * x + z)
    x = swapped(x * x + y)
    return ((x * x + z) >> 32) & 0xFFFFFFFF
