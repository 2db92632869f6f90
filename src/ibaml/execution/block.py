"""How are batch norm, ReLU and 2×2 max pooling one operation, differentiable twice?

Each of the three reads and writes the largest tensors of a convolutional network, and all they do
is pointwise except for sums over a channel. Here every derivative is one pass for the sums and one
for the values. With x̂ = (x − μ)·s, s = 1/√(var + ε), n values in a channel, and c the place of a
window's maximum (none where ReLU is off), a gradient g of the pooled output is nonzero at those
places only. With ĝ for g at full size, A = Σĝ/n and B = Σĝ·x̂/n,

    ∂x = w·s·(ĝ − A − x̂·B)        ∂w = Σĝ·x̂        ∂b = Σĝ

and for cotangents (p, q, r) of these three, with P = Σp/n, Q = Σp·x̂/n, K = Σp·ĝ/n − P·A − Q·B:

    to g    w·s·(p − P − x̂·Q) + q·x̂ + r, at the places c
    to w    n·s·K
    to x    −w·s²·(K·x̂ + B·(p − P − Q·x̂) + Q·(ĝ − A − B·x̂)) + q·s·(ĝ − A − B·x̂)

On an accelerator the passes are Triton kernels (`block_kernels`), elsewhere the plain operations
below. Tests compare the kernels with these.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ibaml.execution.native import is_native
from ibaml.execution.needed import needed_gradients
from ibaml.execution.twice import last_derivative

OFF = 4  # the place that marks a window whose maximum ReLU sets to zero


def norm_relu_pool(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """max_pool(relu(batch_norm(x)), 2) of x (N, C, H, W) with the statistics of the batch, and
    these: mean and biased variance of every channel."""
    y, mean, s = _Block.apply(x.contiguous(), weight.contiguous(), bias.contiguous(), eps)
    return y, (mean, (s.square().reciprocal() - eps).clamp(min=0))


class Saved(NamedTuple):
    """What the forward pass saves: the channel's statistics and weight, and for every window the
    place of its maximum (0 … 3, or OFF) and the input there."""

    x: Tensor
    weight: Tensor
    mean: Tensor
    s: Tensor
    place: Tensor
    chosen: Tensor

    @property
    def values(self) -> int:
        return self.x.numel() // self.x.shape[1]


class _Block(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        passes = passes_for(x)
        mean, s = passes.statistics(x, eps)
        y, place, chosen = passes.choose(x, weight, bias, mean, s)
        ctx.save_for_backward(*Saved(x, weight, mean, s, place, chosen))
        ctx.mark_non_differentiable(mean, s)
        return y, mean, s

    @staticmethod
    def backward(ctx: Any, g: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        saved = Saved(*ctx.saved_tensors)
        g = g.contiguous()
        gradients = _Back.apply(g, *saved) if torch.is_grad_enabled() else _backward(g, saved)
        return *gradients, None


def _backward(g: Tensor, saved: Saved) -> tuple[Tensor, Tensor, Tensor]:
    """(∂x, ∂w, ∂b)"""
    passes = passes_for(saved.x)
    sum_g, sum_gx = passes.pooled_sums(g, saved)
    return passes.first(g, saved, sum_g, sum_gx), sum_gx, sum_g


class _Back(torch.autograd.Function):
    """(∂x, ∂w, ∂b) as a function of g, x and w."""

    @staticmethod
    def forward(ctx: Any, g: Tensor, *saved: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        gradients = _backward(g, Saved(*saved))
        ctx.save_for_backward(g, *saved, gradients[1], gradients[2])
        ctx.set_materialize_grads(False)
        return gradients

    @staticmethod
    @last_derivative
    def backward(
        ctx: Any, p: Tensor | None, q: Tensor | None, r: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        g, *rest, sum_gx, sum_g = ctx.saved_tensors
        saved = Saved(*rest)
        need_g, need_x, need_w = needed_gradients(ctx, 3)
        zero = torch.zeros_like(sum_g)
        q, r = (zero if t is None else t.contiguous() for t in (q, r))
        p = torch.zeros_like(saved.x) if p is None else p.contiguous()
        passes = passes_for(saved.x)
        sum_p, sum_px, sum_pg, at_maxima = passes.full_sums(p, g, saved)
        to_g = passes.to_pooled(at_maxima, saved, sum_p, sum_px, q, r) if need_g else None
        to_x = to_w = None
        if need_x or need_w:
            k = (sum_pg - (sum_p * sum_g + sum_px * sum_gx) / saved.values) / saved.values
            if need_x:
                to_x = passes.second(p, g, saved, sum_g, sum_gx, sum_p, sum_px, k, q)
            if need_w:
                to_w = saved.values * saved.s * k
        return to_g, to_x, to_w, None, None, None, None


class Plain:
    """The passes in plain operations."""

    @staticmethod
    def statistics(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """μ and s of every channel."""
        _, mean, s = torch.native_batch_norm(x, None, None, None, None, True, 0.0, eps)
        return mean, s

    @staticmethod
    def choose(
        x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, s: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The pooled output, the places of the maxima, and x there."""
        z = (x - _wide(mean, x)) * _wide(weight * s, x) + _wide(bias, x)
        best, place = _windows(z).max(-1)
        chosen = _windows(x).gather(-1, place[..., None])[..., 0]
        place = torch.where(best > 0, place, OFF).to(torch.uint8)
        return best.relu().to(x.dtype), place, chosen

    @staticmethod
    def pooled_sums(g: Tensor, saved: Saved) -> tuple[Tensor, Tensor]:
        """Σĝ and Σĝ·x̂."""
        g = torch.where(saved.place < OFF, g, 0).to(saved.mean.dtype)
        normal = (saved.chosen - _wide(saved.mean, g)) * _wide(saved.s, g)
        return g.sum((0, 2, 3)), (g * normal).sum((0, 2, 3))

    @staticmethod
    def first(g: Tensor, saved: Saved, sum_g: Tensor, sum_gx: Tensor) -> Tensor:
        """∂x"""
        x, n = saved.x, saved.values
        normal = (x - _wide(saved.mean, x)) * _wide(saved.s, x)
        spread = _spread(g, saved)
        inner = spread - _wide(sum_g / n, x) - normal * _wide(sum_gx / n, x)
        return (_wide(saved.weight * saved.s, x) * inner).to(x.dtype)

    @staticmethod
    def full_sums(p: Tensor, g: Tensor, saved: Saved) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Σp, Σp·x̂, Σp·ĝ, and p at the places of the maxima."""
        x = saved.x
        normal = (x - _wide(saved.mean, x)) * _wide(saved.s, x)
        inside = saved.place.clamp(max=OFF - 1).long()
        at_maxima = _windows(p).gather(-1, inside[..., None])[..., 0]
        wide = p.to(saved.mean.dtype)
        products = torch.where(saved.place < OFF, at_maxima * g, 0).to(wide.dtype)
        sums = (t.sum((0, 2, 3)) for t in (wide, wide * normal, products))
        return *sums, at_maxima  # type: ignore[return-value]

    @staticmethod
    def to_pooled(
        at_maxima: Tensor, saved: Saved, sum_p: Tensor, sum_px: Tensor, q: Tensor, r: Tensor
    ) -> Tensor:
        """The cotangent of g."""
        n, like = saved.values, at_maxima
        normal = (saved.chosen - _wide(saved.mean, like)) * _wide(saved.s, like)
        inner = at_maxima - _wide(sum_p / n, like) - normal * _wide(sum_px / n, like)
        gradient = (
            _wide(saved.weight * saved.s, like) * inner + _wide(q, like) * normal + _wide(r, like)
        )
        return torch.where(saved.place < OFF, gradient, 0).to(at_maxima.dtype)

    @staticmethod
    def second(
        p: Tensor,
        g: Tensor,
        saved: Saved,
        sum_g: Tensor,
        sum_gx: Tensor,
        sum_p: Tensor,
        sum_px: Tensor,
        k: Tensor,
        q: Tensor,
    ) -> Tensor:
        """The cotangent of x."""
        x, n = saved.x, saved.values
        a, b, big_p, big_q = (_wide(t / n, x) for t in (sum_g, sum_gx, sum_p, sum_px))
        s, w = _wide(saved.s, x), _wide(saved.weight, x)
        normal = (x - _wide(saved.mean, x)) * s
        back = _spread(g, saved) - a - b * normal
        inner = _wide(k, x) * normal + b * (p - big_p - big_q * normal) + big_q * back
        return (_wide(q, x) * s * back - w * s * s * inner).to(x.dtype)


def passes_for(x: Tensor) -> Any:
    if is_native(x):
        from ibaml.execution.block_kernels import Kernels

        return Kernels
    return Plain


def _wide(channel: Tensor, like: Tensor) -> Tensor:
    return channel.view(1, -1, *[1] * (like.dim() - 2))


def _windows(x: Tensor) -> Tensor:
    """(N, C, H, W) as (N, C, H/2, W/2, 4); an odd last row or column is in no window."""
    high, wide = x.shape[2] // 2 * 2, x.shape[3] // 2 * 2
    parts = x[:, :, :high, :wide].unflatten(3, (-1, 2)).unflatten(2, (-1, 2))
    return parts.transpose(3, 4).flatten(-2)


def _spread(g: Tensor, saved: Saved) -> Tensor:
    """A pooled gradient at full size, with its values at the places of the maxima."""
    is_maximum = saved.place[..., None] == torch.arange(4, device=g.device, dtype=torch.uint8)
    parts = torch.where(is_maximum, g[..., None], 0).unflatten(-1, (2, 2)).transpose(3, 4)
    full = parts.flatten(4, 5).flatten(2, 3)
    high, wide = saved.x.shape[2] - full.shape[2], saved.x.shape[3] - full.shape[3]
    return torch.nn.functional.pad(full, (0, wide, 0, high))
