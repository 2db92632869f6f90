"""How does a first layer with few channels run fast? y = conv(x, w) for constant inputs x.

Native kernels are made for many channels. Here the layer is a product of w with shifted copies of
x, and so are its derivatives, because y is linear in w. Two Triton kernels read the shifts from x
itself.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_INPUTS = 64  # at most this many inputs per output


def is_thin(x: Tensor, weight: Tensor) -> bool:
    """Whether a convolution with stride 1 and dilation 1 is such a layer."""
    return x.dim() == 4 and not x.requires_grad and weight[0].numel() <= _INPUTS


def thin(x: Tensor, weight: Tensor, padding: tuple[int, int], groups: int) -> Tensor:
    """conv(x, weight) for x (N, groups·C, H, W), differentiable twice in the weights, by the
    kernels."""
    y: Tensor = _Forward.apply(weight, x.contiguous(), padding, groups)
    return y


def plain_thin(x: Tensor, weight: Tensor, padding: tuple[int, int], groups: int) -> Tensor:
    """The same in plain operations; tests compare the kernels with it."""
    kernel = weight.shape[2:]
    images = x.shape[0]
    wide = F.pad(x, (padding[1], padding[1], padding[0], padding[0]))
    high, broad = (wide.shape[2 + d] - kernel[d] + 1 for d in range(2))
    shifted = [
        wide[:, :, i : i + high, j : j + broad] for i in range(kernel[0]) for j in range(kernel[1])
    ]
    columns = torch.stack(shifted, 2).view(images * groups, -1, high * broad)
    rows = weight.reshape(groups, -1, columns.shape[1])
    rows = rows.expand(images, -1, -1, -1).reshape(images * groups, -1, columns.shape[1])
    return torch.bmm(rows, columns).view(images, -1, high, broad)


class _Forward(torch.autograd.Function):
    """y, linear in w."""

    @staticmethod
    def forward(
        ctx: Any, weight: Tensor, x: Tensor, padding: tuple[int, int], groups: int
    ) -> Tensor:
        from ibaml.execution.thin_kernels import product

        ctx.save_for_backward(x)
        ctx.how = (weight.shape, padding, groups)
        return product(x, weight.contiguous(), padding, groups)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        return _Transposed.apply(g, x, *ctx.how), None, None, None


class _Transposed(torch.autograd.Function):
    """∂w, linear in g."""

    @staticmethod
    def forward(
        ctx: Any, g: Tensor, x: Tensor, shape: torch.Size, padding: tuple[int, int], groups: int
    ) -> Tensor:
        from ibaml.execution.thin_kernels import transposed

        ctx.save_for_backward(x)
        ctx.how = (padding, groups)
        return transposed(g.contiguous(), x, shape, padding, groups)

    @staticmethod
    def backward(ctx: Any, q: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        return _Forward.apply(q, x, *ctx.how), None, None, None, None
