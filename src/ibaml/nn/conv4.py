"""Conv4: the four-block convolutional network of the few-shot literature (and of the paper)."""

from __future__ import annotations

from itertools import pairwise

from torch import Tensor, nn

from ibaml.arguments import check_count
from ibaml.nn.normalize import Norm, norm_layer
from ibaml.nn.recipe import remember


class Conv4(nn.Module):
    """Four blocks of 3×3 convolution, norm, ReLU and 2×2 max-pooling, then a linear head."""

    def __init__(
        self, ways: int, channels: int, in_channels: int, image_size: int, norm: Norm
    ) -> None:
        super().__init__()
        for name, value in (("ways", ways), ("channels", channels), ("in_channels", in_channels)):
            check_count(name, value, 1)
        check_count("image_size", image_size, 1)
        if image_size < 16:
            raise ValueError(
                f"image_size must be 16 or more (four poolings halve it), got {image_size}"
            )
        widths = [in_channels, *[channels] * 4]
        self.blocks = nn.Sequential(
            *(
                nn.Sequential(
                    nn.Conv2d(a, b, 3, padding=1), norm_layer(norm, b), nn.ReLU(), nn.MaxPool2d(2)
                )
                for a, b in pairwise(widths)
            )
        )
        side = image_size // 16
        self.head = nn.Linear(channels * side * side, ways)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(x).flatten(1))


def conv4(
    ways: int,
    channels: int = 32,
    in_channels: int = 3,
    image_size: int = 84,
    norm: Norm = "batch",
) -> Conv4:
    """The paper's network: Conv4-32 on 84×84 color images, ``ways`` classes."""
    return remember(
        Conv4(ways, channels, in_channels, image_size, norm),
        "conv4", ways=ways, channels=channels, in_channels=in_channels, image_size=image_size,
        norm=norm,
    )  # fmt: skip


def for_inputs(
    shape: tuple[int, ...], outputs: int, *, regression: bool, channels: int, norm: Norm
) -> Conv4:
    """The network for images of this shape, as settings ask for it."""
    return conv4(outputs, channels, shape[0], shape[-1], norm)
