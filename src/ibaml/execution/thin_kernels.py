"""How do the two products of `thin` run as Triton kernels? Large tensors are accessed once."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_PIXELS = 128
_ROWS = 32


@triton.jit
def _shifts(
    x, image, group, groups, pixel, inside,
    inputs: tl.constexpr, deep: tl.constexpr, high: tl.constexpr, wide: tl.constexpr,
    rows: tl.constexpr, columns: tl.constexpr, up: tl.constexpr, left: tl.constexpr,
    out_wide: tl.constexpr,
):  # fmt: skip
    """What output pixels read, (inputs, pixels): each input is one channel at one shift."""
    k = tl.arange(0, deep)
    channel, shift = k // (rows * columns), k % (rows * columns)
    row = (pixel // out_wide)[None, :] + (shift // columns)[:, None] - up
    column = (pixel % out_wide)[None, :] + (shift % columns)[:, None] - left
    there = (row >= 0) & (row < high) & (column >= 0) & (column < wide)
    there = there & (k < inputs)[:, None] & inside[None, :]
    plane = (image * groups + group) * (inputs // (rows * columns)) + channel[:, None]
    return tl.load(x + plane.to(tl.int64) * (high * wide) + row * wide + column, there, 0)


@triton.jit
def _product(
    x, w, y, groups, outputs: tl.constexpr, size,
    inputs: tl.constexpr, deep: tl.constexpr, high: tl.constexpr, wide: tl.constexpr,
    rows: tl.constexpr, columns: tl.constexpr, up: tl.constexpr, left: tl.constexpr,
    out_wide: tl.constexpr, how: tl.constexpr, pixels: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    image, group = tl.program_id(0) // groups, tl.program_id(0) % groups
    pixel = tl.program_id(1) * pixels + tl.arange(0, pixels)
    inside = pixel < size
    patches = _shifts(
        x, image, group, groups, pixel, inside,
        inputs, deep, high, wide, rows, columns, up, left, out_wide,
    )  # fmt: skip
    k = tl.arange(0, deep)
    for first in range(0, outputs, block):
        output = first + tl.arange(0, block)
        valid = output < outputs
        at = (group * outputs + output)[:, None] * inputs + k[None, :]
        weights = tl.load(w + at, valid[:, None] & (k < inputs)[None, :], 0)
        product = tl.dot(weights, patches, input_precision=how)
        place = ((image * groups + group) * outputs + output).to(tl.int64)[:, None] * size
        in_output = valid[:, None] & inside[None, :]
        tl.store(y + place + pixel[None, :], product.to(y.dtype.element_ty), in_output)


@triton.jit
def _transposed(
    g, x, out, groups, outputs, size: tl.constexpr,
    inputs: tl.constexpr, deep: tl.constexpr, high: tl.constexpr, wide: tl.constexpr,
    rows: tl.constexpr, columns: tl.constexpr, up: tl.constexpr, left: tl.constexpr,
    out_wide: tl.constexpr, how: tl.constexpr, pixels: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    image, group = tl.program_id(0) // groups, tl.program_id(0) % groups
    output = tl.program_id(1) * block + tl.arange(0, block)
    valid = output < outputs
    k = tl.arange(0, deep)
    total = tl.zeros([block, deep], tl.float32)
    place = ((image * groups + group) * outputs + output).to(tl.int64)[:, None] * size
    for first in range(0, size, pixels):
        pixel = first + tl.arange(0, pixels)
        inside = pixel < size
        patches = _shifts(
            x, image, group, groups, pixel, inside,
            inputs, deep, high, wide, rows, columns, up, left, out_wide,
        )  # fmt: skip
        values = tl.load(g + place + pixel[None, :], valid[:, None] & inside[None, :], 0)
        total += tl.dot(values, tl.trans(patches), input_precision=how)
    at = ((image * groups + group) * outputs + output).to(tl.int64)[:, None] * inputs + k[None, :]
    tl.store(out + at, total, valid[:, None] & (k < inputs)[None, :])


def product(x: Tensor, weight: Tensor, padding: tuple[int, int], groups: int) -> Tensor:
    """conv(x, weight)"""
    images, outputs = x.shape[0], weight.shape[0] // groups
    high, wide = _out(x, weight.shape, padding)
    y = x.new_empty(images, weight.shape[0], high, wide)
    grid = (images * groups, triton.cdiv(high * wide, _PIXELS))
    shape = _shape(x, weight.shape, padding, wide)
    _product[grid](x, weight, y, groups, outputs, high * wide, *shape, _PIXELS, _ROWS)
    return y


def transposed(
    g: Tensor, x: Tensor, shape: torch.Size, padding: tuple[int, int], groups: int
) -> Tensor:
    """∂w of conv(x, w) for a gradient g: first a sum per image, then the sum of these."""
    images, outputs = x.shape[0], shape[0] // groups
    high, wide = _out(x, shape, padding)
    parts = g.new_empty((images, *shape), dtype=torch.float32)
    grid = (images * groups, triton.cdiv(outputs, _ROWS))
    _transposed[grid](
        g, x, parts, groups, outputs, high * wide, *_shape(x, shape, padding, wide), _PIXELS, _ROWS
    )
    return parts.sum(0).to(g.dtype)


def _out(x: Tensor, kernel: torch.Size, padding: tuple[int, int]) -> tuple[int, int]:
    high, wide = (x.shape[2 + d] + 2 * padding[d] - kernel[2 + d] + 1 for d in range(2))
    return high, wide


def _shape(
    x: Tensor, kernel: torch.Size, padding: tuple[int, int], out_wide: int
) -> tuple[Any, ...]:
    inputs = kernel[1] * kernel[2] * kernel[3]
    deep = max(16, triton.next_power_of_2(inputs))
    how = "tf32" if torch.backends.cudnn.allow_tf32 else "ieee"
    sizes = (x.shape[2], x.shape[3], kernel[2], kernel[3], *padding, out_wide)
    return inputs, deep, *sizes, how
