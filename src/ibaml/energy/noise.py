"""Where does noise come from? From a seed and a task's key alone, never from the batch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import IntEnum

import torch
from torch import Tensor

from ibaml.seeding import mix
from ibaml.words import NoiseKind


class Stream(IntEnum):
    """What a draw is for: the streams of one task are independent."""

    ADAPT = 0
    META = 1
    PREDICT = 2


def draw_noise(
    seed: int | Tensor,
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
    """Standard normal noise (T, S, n). A task's noise does not depend on the batch or dtype. (A CPU
    and an accelerator draw different numbers, each by its fastest method.)

    Args:
        seed: a number, or the tasks' roots (`task_roots`), already on their device.
        kind: ``"antithetic"`` draws pairs (ε, −ε); an odd number of samples has one free draw.
            ``"outputs"`` does the same: where weights are drawn after all, it is in pairs.
    """
    free = samples if kind == "independent" else (samples + 1) // 2
    if isinstance(seed, Tensor) or (device is not None and device.type == "cuda"):
        roots = seed if isinstance(seed, Tensor) else task_roots(seed, keys, device)
        noise = normal(_scrambled(roots, 1 + stream + len(Stream) * step), free * size)
        noise = noise.unflatten(1, (free, size))
    else:
        seeds = [mix(seed, key, stream, step) for key in keys]
        drawn = [torch.randn(free, size, generator=torch.Generator().manual_seed(s)) for s in seeds]
        noise = torch.stack(drawn)
    noise = noise.to(device=device, dtype=dtype)
    if kind != "independent":
        noise = torch.stack([noise, -noise], 2).flatten(1, 2)[:, :samples]
    return noise


def task_roots(seed: int, keys: Sequence[int], device: torch.device | None) -> Tensor:
    """One number per task, (T,), from which all its noise on an accelerator is drawn."""
    roots = torch.tensor([mix(seed, key) for key in keys])
    if device is None or device.type != "cuda":
        return roots
    return roots.pin_memory().to(device, non_blocking=True)  # the copy need not wait


def _scrambled(roots: Tensor, number: int) -> Tensor:
    """Seeds from the roots that are unrelated for different numbers (splitmix64)."""

    def shifted(x: Tensor, by: int) -> Tensor:  # without the sign
        return (x >> by) & ((1 << (64 - by)) - 1)

    x = roots + _signed(number * 0x9E3779B97F4A7C15)
    x = (x ^ shifted(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ shifted(x, 27)) * _signed(0x94D049BB133111EB)
    return x ^ shifted(x, 31)


def _signed(number: int) -> int:
    """The 64-bit integer with the number's lowest bits."""
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)


def normal(seeds: Tensor, count: int) -> Tensor:
    """``count`` standard normal numbers for each of the seeds (T,), float64, on their device.

    A counter-based generator (Widynski's Squares) and the Box–Muller transform, in elementwise
    operations for all tasks together, on the device and without waiting for it.
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
