"""Common random numbers: noise that depends on a seed and a task's key, never on the batch."""

from __future__ import annotations

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
    """Standard normal noise (T, S, n), the same for a task whatever the batch, device or dtype.

    ``"antithetic"`` draws pairs (ε, −ε); an odd number of samples has one free draw.
    """
    free = samples if kind == "independent" else (samples + 1) // 2
    rows = []
    for key in keys:
        generator = torch.Generator().manual_seed(mix(seed, key, stream, step))
        rows.append(torch.randn(free, size, generator=generator))
    noise = torch.stack(rows)
    if kind == "antithetic":
        noise = torch.stack([noise, -noise], 2).flatten(1, 2)[:, :samples]
    if device is not None and device.type == "cuda":
        noise = noise.pin_memory()  # so that the copy need not wait for the device
    return noise.to(device=device, dtype=dtype, non_blocking=True)
