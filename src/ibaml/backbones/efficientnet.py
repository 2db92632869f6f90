"""What does EfficientNet-Lite compute? Pooled features of pictures, for prediction alone.

Tan and Le, "EfficientNet" (2019), in its Lite form: no squeeze-and-excitation, ReLU6, and a stem
and head of fixed width. The batch norms of the published weights are folded into the convolutions:
the same function in less time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F

# of each stage: repeats, kernel, stride of its first block, expansion, channels
_STAGES = (
    (1, 3, 1, 1, 16),
    (2, 3, 2, 6, 24),
    (2, 5, 2, 6, 40),
    (3, 3, 2, 6, 80),
    (3, 5, 1, 6, 112),
    (4, 5, 2, 6, 192),
    (1, 3, 1, 6, 320),
)
_STEM, _HEAD = 32, 1280
_EPS = 1e-3  # of the batch norms


class EfficientNetLite(nn.Module):
    """Pictures (n, 3, side, side) to features (n, 1280).

    Args:
        width: multiplies the channels (1 for lite0, 1.1 for lite2).
        depth: multiplies the blocks of the inner stages (1 for lite0, 1.2 for lite2).
    """

    def __init__(self, width: float = 1.0, depth: float = 1.0) -> None:
        super().__init__()
        self.stem = Conv(3, _STEM, 3, stride=2)
        blocks: list[nn.Module] = []
        channels = _STEM
        for number, (repeats, kernel, stride, expansion, out) in enumerate(_STAGES):
            inner = 0 < number < len(_STAGES) - 1
            for i in range(math.ceil(depth * repeats) if inner else repeats):
                wide = _rounded(out * width)
                blocks.append(Block(channels, wide, kernel, 1 if i else stride, expansion))
                channels = wide
        self.blocks = nn.Sequential(*blocks)
        self.head = Conv(channels, _HEAD, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(x))).mean((2, 3))

    @torch.no_grad()
    def load_published(self, tensors: Mapping[str, Tensor]) -> None:
        """Take the weights of a published file, with its batch norms folded in; a `KeyError` or
        `ValueError` if they are not this network's."""
        for conv, theirs, norm in self._published():
            weight = tensors[f"{theirs}.weight"].double()
            gamma, beta, mean, var = (
                tensors[f"{norm}.{n}"].double()
                for n in ("weight", "bias", "running_mean", "running_var")
            )
            if weight.shape != conv.weight.shape or gamma.shape != conv.bias.shape:
                raise ValueError(f"{theirs} has shape {tuple(weight.shape)}")
            scale = gamma / (var + _EPS).sqrt()
            conv.weight.copy_(weight * scale.view(-1, 1, 1, 1))
            conv.bias.copy_(beta - mean * scale)

    def _published(self) -> Iterator[tuple[Conv, str, str]]:
        """Every convolution, with the names of it and of its norm in the published files."""
        yield self.stem, "_conv_stem", "_bn0"
        for i, block in enumerate(self.blocks):
            assert isinstance(block, Block)
            own = f"_blocks.{i}"
            if block.expand is not None:
                yield block.expand, f"{own}._expand_conv", f"{own}._bn0"
            yield block.depthwise, f"{own}._depthwise_conv", f"{own}._bn1"
            yield block.project, f"{own}._project_conv", f"{own}._bn2"
        yield self.head, "_conv_head", "_bn1"


class Conv(nn.Module):
    """A convolution with a bias, padded as TensorFlow's "same" (more on the right and below), and
    ReLU6 unless ``linear``."""

    def __init__(
        self, inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1,
        linear: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(outputs, inputs // groups, kernel, kernel))
        self.bias = nn.Parameter(torch.zeros(outputs))
        self.stride, self.groups, self.linear = stride, groups, linear

    def forward(self, x: Tensor) -> Tensor:
        kernel = self.weight.shape[-1]
        pads = [max(kernel - (n % self.stride or self.stride), 0) for n in x.shape[2:]]
        symmetric = tuple(p // 2 for p in pads)
        if any(p % 2 for p in pads):
            (top, left), (down, right) = symmetric, (p - p // 2 for p in pads)
            x, symmetric = F.pad(x, (left, right, top, down)), (0, 0)
        x = F.conv2d(x, self.weight, self.bias, self.stride, symmetric, groups=self.groups)
        return x if self.linear else F.relu6(x, inplace=not x.requires_grad)


class Block(nn.Module):
    """An inverted residual: expand, filter each channel, project."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int, expansion: int) -> None:
        super().__init__()
        wide = inputs * expansion
        self.expand = Conv(inputs, wide, 1) if expansion > 1 else None
        self.depthwise = Conv(wide, wide, kernel, stride, groups=wide)
        self.project = Conv(wide, outputs, 1, linear=True)
        self.residual = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        y = x if self.expand is None else self.expand(x)
        y = self.project(self.depthwise(y))
        return x + y if self.residual else y


def _rounded(channels: float) -> int:
    """The nearest multiple of 8, less than 10 % below."""
    rounded = max(8, int(channels + 4) // 8 * 8)
    return rounded + 8 if rounded < 0.9 * channels else rounded
