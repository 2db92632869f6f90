"""How are images augmented? By random flips, crops and colors, in batches, keyed by episode."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ibaml.tasks.sending import sent


@dataclass(frozen=True)
class Augment:
    """Augmentation of converted images (T, ways, n, C, H, W).

    Args:
        flip: mirror half of the images, left to right.
        crop: shift by up to this many pixels; the border is filled by reflection.
        color: change contrast by up to this share, and brightness and the cast of the channels by
            up to this many (and half as many) standard deviations of a normalized image.
    """

    flip: bool = True
    crop: int = 0
    color: float = 0.0

    def __post_init__(self) -> None:
        if self.crop < 0:
            raise ValueError(f"crop must be 0 or more pixels, got {self.crop}")
        if not 0 <= self.color < 1:
            raise ValueError(f"color must lie in [0, 1), got {self.color}")

    def __call__(self, x: Tensor, seeds: Sequence[int]) -> Tensor:
        """The images, augmented with the draws of each episode's seed."""
        per = x.shape[1] * x.shape[2]
        draws = torch.stack(
            [
                torch.rand(per, 5 + x.shape[3], generator=torch.Generator().manual_seed(s))
                for s in seeds
            ]
        )
        draws = sent(draws.flatten(0, 1), x.device)
        flat = x.flatten(0, 2)
        if self.flip:
            flat = torch.where(draws[:, 0, None, None, None] < 0.5, flat.flip(-1), flat)
        if self.crop:
            flat = self._shift(flat, draws[:, 1:3])
        if self.color:
            swing = self.color * (2 * draws[:, 3:, None, None] - 1)
            mean = flat.mean((1, 2, 3), keepdim=True)
            flat = (flat - mean) * (1 + swing[:, :1]) + mean + swing[:, 1:2] + swing[:, 2:] / 2
        return flat.to(x.dtype).view_as(x)

    def _shift(self, flat: Tensor, draws: Tensor) -> Tensor:
        height, width = flat.shape[-2:]
        if self.crop >= min(height, width):
            raise ValueError(f"crop of {self.crop} pixels is too much for {height}×{width} images")
        padded = F.pad(flat, [self.crop] * 4, mode="reflect")
        offset = (draws * (2 * self.crop + 1)).long().clamp(max=2 * self.crop)
        rows = offset[:, 0, None] + torch.arange(height, device=flat.device)
        columns = offset[:, 1, None] + torch.arange(width, device=flat.device)
        index = torch.arange(len(flat), device=flat.device)[:, None, None]
        # advanced indices around the channel slice put it last
        picked = padded[index, :, rows[:, :, None], columns[:, None, :]]
        return picked.permute(0, 3, 1, 2)
