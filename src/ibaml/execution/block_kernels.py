"""How do the passes of `block` run as Triton kernels? Each reads and writes its tensors once.

A tensor (N, C, H, W) is processed channel by channel: a program takes a range of the N·H·W values
(or windows) of one channel. For sums, every program writes a partial sum, and a second small kernel
adds them up, so that results do not depend on the order in which programs run.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ibaml.execution.block import OFF, Saved

_OFF = tl.constexpr(OFF)
_BLOCK = 1024
_LONG = 8  # blocks per program in a sum


@triton.jit
def _at(e, channel, channels, size: tl.constexpr):
    """The offset of value e of a channel."""
    return ((e // size) * channels + channel).to(tl.int64) * size + e % size


@triton.jit
def _window(e, channel, channels, high: tl.constexpr, wide: tl.constexpr):
    """The offset of the window of value e, the value's place in it, and whether it is in one."""
    rows: tl.constexpr = high // 2
    columns: tl.constexpr = wide // 2
    rest = e % (high * wide)
    row, column = rest // wide, rest % wide
    inside = (row < 2 * rows) & (column < 2 * columns)
    image = ((e // (high * wide)) * channels + channel).to(tl.int64)
    index = image * (rows * columns) + (row // 2) * columns + column // 2
    return index, (row % 2) * 2 + column % 2, inside


@triton.jit
def _sum_values(x, sums, channels, total, size: tl.constexpr, long: tl.constexpr, n: tl.constexpr):
    """Σ(x − x₀) and Σ(x − x₀)², x₀ the channel's first value."""
    channel, part = tl.program_id(0), tl.program_id(1)
    base = tl.load(x + channel.to(tl.int64) * size).to(tl.float32)
    one = tl.zeros([n], tl.float32)
    two = tl.zeros([n], tl.float32)
    for i in range(long):
        e = (part * long + i) * n + tl.arange(0, n)
        inside = e < total
        value = tl.load(x + _at(e, channel, channels, size), inside, 0).to(tl.float32) - base
        value = tl.where(inside, value, 0.0)
        one += value
        two += value * value
    place = sums + (part * 2) * channels + channel
    tl.store(place, tl.sum(one))
    tl.store(place + channels, tl.sum(two))


@triton.jit
def _finish_statistics(
    x, sums, mean, s, channels, parts: tl.constexpr, size: tl.constexpr, total, eps, n: tl.constexpr
):
    channel = tl.program_id(0) * n + tl.arange(0, n)
    inside = channel < channels
    one = tl.zeros([n], tl.float32)
    two = tl.zeros([n], tl.float32)
    for part in range(parts):
        place = sums + (part * 2) * channels + channel
        one += tl.load(place, inside, 0.0)
        two += tl.load(place + channels, inside, 0.0)
    base = tl.load(x + channel.to(tl.int64) * size, inside, 0).to(tl.float32)
    shift = one / total
    variance = two / total - shift * shift
    variance = tl.where(variance < 0, 0.0, variance)  # a NaN stays a NaN
    tl.store(mean + channel, base + shift, inside)
    tl.store(s + channel, 1 / tl.sqrt(variance + eps), inside)


@triton.jit
def _finish(sums, out, channels, parts: tl.constexpr, kinds: tl.constexpr, n: tl.constexpr):
    """Add up partial sums, (parts, kinds, channels) to (kinds, channels)."""
    channel = tl.program_id(0) * n + tl.arange(0, n)
    inside = channel < channels
    for kind in tl.static_range(kinds):
        total = tl.zeros([n], tl.float32)
        for part in range(parts):
            total += tl.load(sums + (part * kinds + kind) * channels + channel, inside, 0.0)
        tl.store(out + kind * channels + channel, total, inside)


@triton.jit
def _choose(
    x, weight, bias, mean, s, y, place, chosen, channels, total,
    high: tl.constexpr, wide: tl.constexpr, n: tl.constexpr,
):  # fmt: skip
    channel = tl.program_id(0)
    rows: tl.constexpr = high // 2
    columns: tl.constexpr = wide // 2
    e = tl.program_id(1) * n + tl.arange(0, n)
    inside = e < total
    image = ((e // (rows * columns)) * channels + channel).to(tl.int64)
    window = e % (rows * columns)
    corner = x + image * (high * wide) + (window // columns) * (2 * wide) + (window % columns) * 2
    m = tl.load(mean + channel)
    a = tl.load(weight + channel).to(tl.float32) * tl.load(s + channel)
    b = tl.load(bias + channel).to(tl.float32)
    best_x = tl.load(corner, inside, 0).to(tl.float32)
    best = (best_x - m) * a + b
    total_z = best
    where = tl.zeros([n], tl.int32)
    for k in tl.static_range(1, 4):
        value = tl.load(corner + (k // 2) * wide + k % 2, inside, 0).to(tl.float32)
        z = (value - m) * a + b
        more = z > best
        best = tl.where(more, z, best)
        best_x = tl.where(more, value, best_x)
        where = tl.where(more, k, where)
        total_z += z
    is_nan = total_z != total_z
    out = tl.where(is_nan, total_z, tl.where(best > 0, best, 0.0))
    index = image * (rows * columns) + window
    tl.store(y + index, out.to(y.dtype.element_ty), inside)
    tl.store(chosen + index, best_x.to(chosen.dtype.element_ty), inside)
    tl.store(place + index, tl.where(best > 0, where, _OFF).to(tl.uint8), inside)


@triton.jit
def _pooled_sums(
    g, place, chosen, mean, s, sums, channels, total,
    size: tl.constexpr, long: tl.constexpr, n: tl.constexpr,
):  # fmt: skip
    channel, part = tl.program_id(0), tl.program_id(1)
    m, scale = tl.load(mean + channel), tl.load(s + channel)
    one = tl.zeros([n], tl.float32)
    two = tl.zeros([n], tl.float32)
    for i in range(long):
        e = (part * long + i) * n + tl.arange(0, n)
        inside = e < total
        at = _at(e, channel, channels, size)
        on = inside & (tl.load(place + at, inside, _OFF) < _OFF)
        value = tl.load(g + at, on, 0).to(tl.float32)
        x = tl.load(chosen + at, on, 0).to(tl.float32)
        one += value
        two += tl.where(on, value * ((x - m) * scale), 0.0)
    index = sums + (part * 2) * channels + channel
    tl.store(index, tl.sum(one))
    tl.store(index + channels, tl.sum(two))


@triton.jit
def _first(
    g, place, x, weight, mean, s, sum_g, sum_gx, out, channels, total, count,
    high: tl.constexpr, wide: tl.constexpr, n: tl.constexpr,
):  # fmt: skip
    channel = tl.program_id(0)
    e = tl.program_id(1) * n + tl.arange(0, n)
    inside = e < total
    at = _at(e, channel, channels, high * wide)
    index, corner, within = _window(e, channel, channels, high, wide)
    within = within & inside
    m, scale = tl.load(mean + channel), tl.load(s + channel)
    ws = tl.load(weight + channel).to(tl.float32) * scale
    a, b = tl.load(sum_g + channel) / count, tl.load(sum_gx + channel) / count
    hit = within & (tl.load(place + index, within, _OFF).to(tl.int32) == corner)
    spread = tl.load(g + index, hit, 0).to(tl.float32)
    normal = (tl.load(x + at, inside, 0).to(tl.float32) - m) * scale
    tl.store(out + at, (ws * (spread - a - normal * b)).to(out.dtype.element_ty), inside)


@triton.jit
def _full_sums(
    p, g, place, x, mean, s, there, sums, channels, total,
    high: tl.constexpr, wide: tl.constexpr, long: tl.constexpr, n: tl.constexpr,
):  # fmt: skip
    channel, part = tl.program_id(0), tl.program_id(1)
    m, scale = tl.load(mean + channel), tl.load(s + channel)
    one = tl.zeros([n], tl.float32)
    two = tl.zeros([n], tl.float32)
    three = tl.zeros([n], tl.float32)
    for i in range(long):
        e = (part * long + i) * n + tl.arange(0, n)
        inside = e < total
        at = _at(e, channel, channels, high * wide)
        index, corner, within = _window(e, channel, channels, high, wide)
        within = within & inside
        raw = tl.load(p + at, inside, 0)
        value = raw.to(tl.float32)
        normal = (tl.load(x + at, inside, 0).to(tl.float32) - m) * scale
        hit = within & (tl.load(place + index, within, _OFF).to(tl.int32) == corner)
        tl.store(there + index, raw, hit)
        one += value
        two += tl.where(inside, value * normal, 0.0)
        three += value * tl.load(g + index, hit, 0).to(tl.float32)
    out = sums + (part * 3) * channels + channel
    tl.store(out, tl.sum(one))
    tl.store(out + channels, tl.sum(two))
    tl.store(out + 2 * channels, tl.sum(three))


@triton.jit
def _to_pooled(
    there, place, chosen, weight, mean, s, sum_p, sum_px, q, r, out, channels, total, count,
    size: tl.constexpr, n: tl.constexpr,
):  # fmt: skip
    channel = tl.program_id(0)
    e = tl.program_id(1) * n + tl.arange(0, n)
    inside = e < total
    at = _at(e, channel, channels, size)
    on = inside & (tl.load(place + at, inside, _OFF) < _OFF)
    m, scale = tl.load(mean + channel), tl.load(s + channel)
    ws = tl.load(weight + channel).to(tl.float32) * scale
    big_p, big_q = tl.load(sum_p + channel) / count, tl.load(sum_px + channel) / count
    slope, shift = tl.load(q + channel).to(tl.float32), tl.load(r + channel).to(tl.float32)
    normal = (tl.load(chosen + at, on, 0).to(tl.float32) - m) * scale
    value = tl.load(there + at, on, 0).to(tl.float32)
    gradient = ws * (value - big_p - normal * big_q) + slope * normal + shift
    tl.store(out + at, tl.where(on, gradient, 0.0).to(out.dtype.element_ty), inside)


@triton.jit
def _second(
    p, g, place, x, weight, mean, s, sum_g, sum_gx, sum_p, sum_px, bend, q, out,
    channels, total, count, high: tl.constexpr, wide: tl.constexpr, n: tl.constexpr,
):  # fmt: skip
    channel = tl.program_id(0)
    e = tl.program_id(1) * n + tl.arange(0, n)
    inside = e < total
    at = _at(e, channel, channels, high * wide)
    index, corner, within = _window(e, channel, channels, high, wide)
    within = within & inside
    m, scale = tl.load(mean + channel), tl.load(s + channel)
    ws = tl.load(weight + channel).to(tl.float32) * scale
    a, b = tl.load(sum_g + channel) / count, tl.load(sum_gx + channel) / count
    big_p, big_q = tl.load(sum_p + channel) / count, tl.load(sum_px + channel) / count
    k, slope = tl.load(bend + channel).to(tl.float32), tl.load(q + channel).to(tl.float32)
    hit = within & (tl.load(place + index, within, _OFF).to(tl.int32) == corner)
    spread = tl.load(g + index, hit, 0).to(tl.float32)
    normal = (tl.load(x + at, inside, 0).to(tl.float32) - m) * scale
    value = tl.load(p + at, inside, 0).to(tl.float32)
    back = spread - a - b * normal
    inner = k * normal + b * (value - big_p - big_q * normal) + big_q * back
    gradient = slope * scale * back - ws * scale * inner
    tl.store(out + at, gradient.to(out.dtype.element_ty), inside)


class Kernels:
    """The passes on an accelerator; see `block.Plain` for what each computes."""

    @staticmethod
    def statistics(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        images, channels, high, wide = x.shape
        total, size = images * high * wide, high * wide
        parts = _parts(total)
        sums = _sums(x, parts, 2)
        mean, s = _sums(x, 2)
        _sum_values[(channels, parts)](x, sums, channels, total, size, _LONG, _BLOCK)
        grid = (triton.cdiv(channels, 128),)
        _finish_statistics[grid](x, sums, mean, s, channels, parts, size, total, eps, 128)
        return mean, s

    @staticmethod
    def choose(
        x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, s: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        images, channels, high, wide = x.shape
        y = x.new_empty(images, channels, high // 2, wide // 2)
        place, chosen = torch.empty_like(y, dtype=torch.uint8), torch.empty_like(y)
        total = y.numel() // channels
        grid = (channels, triton.cdiv(total, _BLOCK))
        _choose[grid](
            x, weight, bias, mean, s, y, place, chosen, channels, total, high, wide, _BLOCK
        )
        return y, place, chosen

    @staticmethod
    def pooled_sums(g: Tensor, saved: Saved) -> tuple[Tensor, Tensor]:
        channels, size = g.shape[1], g.shape[2] * g.shape[3]
        total = g.numel() // channels
        parts = _parts(total)
        sums = _sums(g, parts, 2)
        _pooled_sums[(channels, parts)](
            g, saved.place, saved.chosen, saved.mean, saved.s, sums, channels, total, size, _LONG,
            _BLOCK,
        )  # fmt: skip
        sum_g, sum_gx = _added(sums)
        return sum_g, sum_gx

    @staticmethod
    def first(g: Tensor, saved: Saved, sum_g: Tensor, sum_gx: Tensor) -> Tensor:
        x = saved.x
        out = torch.empty_like(x)
        _first[_grid(x)](
            g, saved.place, x, saved.weight, saved.mean, saved.s, sum_g, sum_gx, out, *_sizes(x),
            _BLOCK,
        )  # fmt: skip
        return out

    @staticmethod
    def full_sums(p: Tensor, g: Tensor, saved: Saved) -> tuple[Tensor, ...]:
        x = saved.x
        _, channels, high, wide = x.shape
        there = torch.empty_like(saved.chosen)
        parts = _parts(saved.values)
        sums = _sums(x, parts, 3)
        _full_sums[(channels, parts)](
            p, g, saved.place, x, saved.mean, saved.s, there, sums,
            channels, saved.values, high, wide, _LONG, _BLOCK,
        )  # fmt: skip
        return *_added(sums), there

    @staticmethod
    def to_pooled(
        there: Tensor, saved: Saved, sum_p: Tensor, sum_px: Tensor, q: Tensor, r: Tensor
    ) -> Tensor:
        out = torch.empty_like(there)
        channels, size = there.shape[1], there.shape[2] * there.shape[3]
        total = there.numel() // channels
        _to_pooled[(channels, triton.cdiv(total, _BLOCK))](
            there, saved.place, saved.chosen, saved.weight, saved.mean, saved.s,
            sum_p, sum_px, q, r, out, channels, total, saved.values, size, _BLOCK,
        )  # fmt: skip
        return out

    @staticmethod
    def second(p: Tensor, g: Tensor, saved: Saved, *channel: Tensor) -> Tensor:
        x = saved.x
        out = torch.empty_like(x)
        _second[_grid(x)](
            p,
            g,
            saved.place,
            x,
            saved.weight,
            saved.mean,
            saved.s,
            *channel,
            out,
            *_sizes(x),
            _BLOCK,
        )
        return out


def _parts(total: int) -> int:
    return triton.cdiv(total, _LONG * _BLOCK)


def _sums(like: Tensor, *shape: int) -> Tensor:
    return like.new_empty((*shape, like.shape[1]), dtype=torch.float32)


def _added(sums: Tensor) -> Tensor:
    parts, kinds, channels = sums.shape
    if parts == 1:
        return sums[0]
    out = sums.new_empty(kinds, channels)
    _finish[(triton.cdiv(channels, 128),)](sums, out, channels, parts, kinds, 128)
    return out


def _grid(x: Tensor) -> tuple[int, int]:
    return x.shape[1], triton.cdiv(x.numel() // x.shape[1], _BLOCK)


def _sizes(x: Tensor) -> tuple[Any, ...]:
    """The sizes for a pass over all values: channels, values per channel (twice), height, width."""
    _, channels, high, wide = x.shape
    values = x.numel() // channels
    return channels, values, values, high, wide
