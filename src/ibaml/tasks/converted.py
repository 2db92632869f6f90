"""How do stored examples become what a network reads? Converted and normalized, on the device."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from ibaml.tasks.dataset import Dataset
from ibaml.tasks.sending import sent


@dataclass(frozen=True)
class Converted:
    """The examples of a dataset, by their rows. Images stay uint8 until they are picked.

    Args:
        normalize: subtract the training split's mean and divide by its deviation.
    """

    data: Dataset
    normalize: bool = True
    device: torch.device | str = "cpu"
    dtype: torch.dtype = torch.float32

    def __call__(self, rows: Tensor) -> Tensor:
        """Converted examples (T, n, …) of rows (T, n)."""
        scale, shift = self._affine
        raw = self.data.on(self.device)
        if raw.device.type != "cpu" or torch.device(self.device).type != "cpu":
            picked = raw.index_select(0, sent(rows.flatten(), raw.device))
            picked = picked.to(self.device, non_blocking=True).to(self.dtype)
            return picked.mul_(scale).add_(shift).unflatten(0, rows.shape)
        # one episode at a time fits into the processor's cache
        x = torch.empty(*rows.shape, *raw.shape[1:], dtype=self.dtype)
        for t in range(len(rows)):
            if raw.dtype == self.dtype:
                torch.index_select(raw, 0, rows[t], out=x[t])
            else:
                x[t].copy_(raw.index_select(0, rows[t]))
            x[t].mul_(scale).add_(shift)
        return x

    @cached_property
    def _affine(self) -> tuple[Tensor, Tensor]:
        """x·scale + shift turns raw examples into what the network reads."""
        unit = 1 / 255 if self.data.is_image else 1.0
        mean, std = self.data.moments
        if not self.normalize:
            mean, std = torch.zeros_like(mean), torch.ones_like(std)
        shape = (-1, 1, 1) if self.data.examples.ndim == 4 else (-1,)
        scale, shift = (unit / std).view(shape), (-mean / std).view(shape)
        return scale.to(self.device, self.dtype), shift.to(self.device, self.dtype)


def turned(x: Tensor, turns: np.ndarray) -> Tensor:
    """Images (T, ways, …, H, W), turned in place by each class's quarter turns (T, ways)."""
    for quarter in (1, 2, 3):
        tasks, ways = (torch.from_numpy(i) for i in np.nonzero(turns == quarter))
        if len(tasks):
            chosen = sent(tasks, x.device), sent(ways, x.device)
            x[chosen] = torch.rot90(x[chosen], quarter, (-2, -1))
    return x
