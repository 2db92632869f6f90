"""ResNet-12: the residual network of the few-shot literature."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch.nn.functional as F
from torch import Tensor, nn

from ibaml.arguments import check_count, check_counts
from ibaml.nn.normalize import Norm, norm_layer
from ibaml.nn.recipe import remember


class _Block(nn.Module):
    """Three 3×3 convolutions with a projected shortcut, then 2×2 max-pooling."""

    def __init__(self, before: int, after: int, norm: Norm) -> None:
        super().__init__()
        widths = [before, after, after, after]
        self.convs = nn.ModuleList(
            nn.Conv2d(a, b, 3, padding=1, bias=False) for a, b in pairwise(widths)
        )
        self.norms = nn.ModuleList(norm_layer(norm, after) for _ in range(3))
        self.shortcut = nn.Sequential(
            nn.Conv2d(before, after, 1, bias=False), norm_layer(norm, after)
        )

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for i, (conv, norm) in enumerate(zip(self.convs, self.norms, strict=True)):
            y = norm(conv(y))
            if i < 2:
                y = F.leaky_relu(y, 0.1)
        return F.max_pool2d(F.leaky_relu(y + self.shortcut(x), 0.1), 2)


class ResNet12(nn.Module):
    """Four residual blocks, the mean over the image, a linear head."""

    def __init__(self, ways: int, in_channels: int, widths: Sequence[int], norm: Norm) -> None:
        super().__init__()
        check_count("ways", ways, 1)
        check_count("in_channels", in_channels, 1)
        check_counts("widths", widths)
        if len(widths) != 4:
            raise ValueError(f"widths needs four entries, one per block, got {list(widths)}")
        sizes = [in_channels, *widths]
        self.blocks = nn.Sequential(*(_Block(a, b, norm) for a, b in pairwise(sizes)))
        self.head = nn.Linear(widths[-1], ways)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(x).mean((-2, -1)))


def resnet12(
    ways: int,
    in_channels: int = 3,
    widths: Sequence[int] = (64, 128, 256, 512),
    norm: Norm = "batch",
) -> ResNet12:
    """ResNet-12 (about 8 million weights with the default widths; 64, 160, 320, 640 is the wide
    one, 12 million)."""
    return remember(
        ResNet12(ways, in_channels, widths, norm),
        "resnet12", ways=ways, in_channels=in_channels, widths=list(widths), norm=norm,
    )  # fmt: skip


def for_inputs(
    shape: tuple[int, ...], outputs: int, *, regression: bool, channels: int, norm: Norm
) -> ResNet12:
    """The network for images of this shape, as settings ask for it."""
    return resnet12(outputs, shape[0], [channels * 2**i for i in range(4)], norm)
