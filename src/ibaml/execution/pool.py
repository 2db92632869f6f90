"""How does max pooling over windows that do not overlap get derivatives in two passes?"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ibaml.execution.twice import last_derivative


def max_pool(x: Tensor, size: tuple[int, int]) -> Tensor:
    """The maxima of x (N, C, H, W) over windows of ``size`` side by side, differentiable twice."""
    y: Tensor = _Pool.apply(x, size)
    return y


class _Pool(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, size: tuple[int, int]) -> Tensor:
        y, index = torch.ops.aten.max_pool2d_with_indices(x, size, size)
        ctx.save_for_backward(index)
        ctx.size, ctx.shape = size, x.shape
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, None]:
        (index,) = ctx.saved_tensors
        return _Back.apply(g, index, ctx.size, ctx.shape), None


class _Back(torch.autograd.Function):
    """Put every gradient at the place of its maximum."""

    @staticmethod
    def forward(
        ctx: Any, g: Tensor, index: Tensor, size: tuple[int, int], shape: torch.Size
    ) -> Tensor:
        ctx.save_for_backward(index)
        return _put_on_a_device(g, index, size, shape) if g.is_cuda else _put(g, index, size, shape)

    @staticmethod
    @last_derivative
    def backward(ctx: Any, p: Tensor) -> tuple[Tensor, None, None, None]:
        (index,) = ctx.saved_tensors
        if index.is_contiguous():
            return p.flatten(-2).gather(-1, index.flatten(-2)).view_as(index), None, None, None
        places = index.movedim(1, -1)  # channels last
        picked = p.movedim(1, -1).flatten(1, 2).gather(1, places.flatten(1, 2))
        return picked.view(places.shape).movedim(-1, 1), None, None, None


def _put(g: Tensor, index: Tensor, size: tuple[int, int], shape: torch.Size) -> Tensor:
    first = index.is_contiguous()
    form = torch.contiguous_format if first else torch.channels_last
    like = torch.empty(shape, dtype=g.dtype, memory_format=form)  # only its shape is used
    g = g.contiguous(memory_format=form)
    return torch.ops.aten.max_pool2d_with_indices_backward(
        g, like, size, size, (0, 0), (1, 1), False, index
    )


def _put_on_a_device(g: Tensor, index: Tensor, size: tuple[int, int], shape: torch.Size) -> Tensor:
    """By comparisons: torch's own kernel adds up with atomics, or searches the windows."""
    high, wide = size
    rows, columns = g.shape[-2:]
    line = torch.arange(rows * high, device=g.device) * shape[-1]
    place = line[:, None] + torch.arange(columns * wide, device=g.device)
    place = place.view(rows, high, columns, wide)
    hit = index[..., :, None, :, None] == place
    x = torch.where(hit, g[..., :, None, :, None], 0.0).flatten(-4, -3).flatten(-2, -1)
    lower, right = shape[-2] - rows * high, shape[-1] - columns * wide
    return F.pad(x, (0, right, 0, lower)) if lower or right else x
