"""Max pooling over windows that do not overlap, with derivatives in two passes."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable


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
    """Put every gradient where its maximum was."""

    @staticmethod
    def forward(
        ctx: Any, g: Tensor, index: Tensor, size: tuple[int, int], shape: torch.Size
    ) -> Tensor:
        ctx.save_for_backward(index)
        high, wide = size
        rows, columns = g.shape[-2:]
        line = torch.arange(rows * high, device=g.device) * shape[-1]
        place = line[:, None] + torch.arange(columns * wide, device=g.device)
        place = place.view(rows, high, columns, wide)
        hit = index[..., :, None, :, None] == place
        x = torch.where(hit, g[..., :, None, :, None], 0.0).flatten(-4, -3).flatten(-2, -1)
        lower, right = shape[-2] - rows * high, shape[-1] - columns * wide
        return F.pad(x, (0, right, 0, lower)) if lower or right else x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, p: Tensor) -> tuple[Tensor, None, None, None]:
        (index,) = ctx.saved_tensors
        found = p.flatten(-2).gather(-1, index.flatten(-2)).view_as(index)
        return found, None, None, None
