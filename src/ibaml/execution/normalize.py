"""How does batch norm with the batch's statistics get a second derivative in three passes?

With x̂ = (x − μ)·s, s = 1/√(var + ε), M the mean over a channel, n its values, and a gradient g:

    ∂x = w·s·(g − M(g) − x̂·M(g·x̂))        ∂w = n·M(g·x̂)        ∂b = n·M(g)

For cotangents (p, q, r) of these three, with A = M(g), B = M(g·x̂), P = M(p), Q = M(p·x̂) and
K = M(p·g) − P·A − Q·B:

    to g    w·s·(p − P − x̂·Q) + q·x̂ + r          (the first term is ∂x once more, at p)
    to w    n·s·K
    to x    −w·s²·(K·x̂ + B·(p − P − Q·x̂) + Q·(g − A − B·x̂)) + q·s·(g − A − B·x̂)

Torch's own formula is a longer chain of elementwise kernels over the activations.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ibaml.execution.needed import needed_gradients
from ibaml.execution.twice import last_derivative

_CACHED = 1 << 18  # numbers


def normalize(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Batch norm of x (N, C, …) with its own statistics, differentiable twice, and these: mean and
    biased variance of every channel."""
    y, mean, s = _Normalize.apply(x, weight, bias, eps)
    return y, (mean, (s.square().reciprocal() - eps).clamp(min=0))


def _forward(x: Tensor, w: Tensor, b: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """(y, μ, s)"""
    if not _is_last(x):
        return torch.native_batch_norm(x, w, b, None, None, True, 0.0, eps)
    rows = _rows(x)
    mean = rows.sum(0) / len(rows)
    var = _summed(lambda part: (part - mean).square_(), rows) / len(rows)
    y, _, _ = torch.native_batch_norm(x, w, b, mean, var, False, 0.0, eps)
    return y, mean, (var + eps).rsqrt()


def _backward(
    g: Tensor, x: Tensor, w: Tensor, mean: Tensor, s: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """(∂x, ∂w, ∂b)"""
    if not _is_last(x):
        return torch.ops.aten.native_batch_norm_backward(
            g, x, w, None, None, mean, s, True, eps, (True, True, True)
        )
    rows = _rows(g)
    sum_g = rows.sum(0)
    center = sum_g / len(rows)  # centering does not change Σg·x̂, and rounds better
    sum_gx = s * _summed(lambda part, seen: (seen - mean).mul_(part - center), rows, _rows(x))
    on_x = -w * s * s * sum_gx / len(rows)
    rest = -w * s * sum_g / len(rows) - on_x * mean
    wide = (-1, 1, 1)
    on_input = torch.addcmul(rest.view(wide), x, on_x.view(wide)).addcmul_(g, (w * s).view(wide))
    return on_input, sum_gx, sum_g


def _is_last(x: Tensor) -> bool:
    """Whether x has channels last on a CPU. There torch adds up a channel one value at a time: over
    half a million values this is 1e-4 off in float32."""
    return not x.is_cuda and _format(x) == torch.channels_last


def _format(x: Tensor) -> torch.memory_format:
    """The memory format of x: channels first or last."""
    last = x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last)
    return torch.channels_last if last and not x.is_contiguous() else torch.contiguous_format


def _rows(x: Tensor) -> Tensor:
    """x (N, C, H, W), channels last, as (N·H·W, C), a view."""
    return x.movedim(1, -1).flatten(0, -2)


def _summed(work: Callable[..., Tensor], *rows: Tensor) -> Tensor:
    """The sum over rows of ``work``'s results, in parts that fit into a cache."""
    part = max(1, _CACHED // rows[0].shape[1])
    parts = zip(*(r.split(part) for r in rows), strict=True)
    return torch.stack([work(*some).sum(0) for some in parts]).sum(0)


def _products(a: Tensor, b: Tensor) -> Tensor:
    """Σ a·b over every channel."""
    if _is_last(a):
        return _summed(torch.mul, _rows(a), _rows(b))
    wider = torch.float32 if a.dtype == torch.bfloat16 else a.dtype
    return (a * b).sum([d for d in range(a.dim()) if d != 1], dtype=wider)


class _Normalize(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        y, mean, s = _forward(x, weight, bias, eps)
        ctx.save_for_backward(x, weight, mean, s)
        ctx.eps = eps
        ctx.mark_non_differentiable(mean, s)
        return y, mean, s

    @staticmethod
    def backward(ctx: Any, g: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, s = ctx.saved_tensors
        g = g.contiguous(memory_format=_format(x))
        if torch.is_grad_enabled():
            gradients = _Back.apply(g, x, weight, mean, s, ctx.eps)
        else:
            gradients = _backward(g, x, weight, mean, s, ctx.eps)
        return *gradients, None


class _Back(torch.autograd.Function):
    """(∂x, ∂w, ∂b) as a function of g, x and w."""

    @staticmethod
    def forward(
        ctx: Any, g: Tensor, x: Tensor, w: Tensor, mean: Tensor, s: Tensor, eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        gradients = _backward(g, x, w, mean, s, eps)
        ctx.save_for_backward(g, x, w, mean, s, gradients[1], gradients[2])
        ctx.eps = eps
        ctx.set_materialize_grads(False)
        return gradients

    @staticmethod
    @last_derivative
    def backward(
        ctx: Any, p: Tensor | None, q: Tensor | None, r: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        g, x, w, mean, s, sum_gx, sum_g = ctx.saved_tensors
        need_g, need_x, need_w = needed_gradients(ctx, 3)
        n = x.numel() // x.shape[1]
        wide = (-1, *[1] * (x.dim() - 2))

        def per(channel: Tensor) -> Tensor:
            return channel.to(x.dtype).view(wide)

        a, b = sum_g / n, sum_gx / n
        zero = torch.zeros_like(w)
        big_p, big_q, k = zero, zero, zero
        to_g: Tensor | None = None
        if p is not None:
            p = p.contiguous(memory_format=_format(x))
            to_g, sum_px, sum_p = _backward(p, x, w, mean, s, ctx.eps)
            big_p, big_q = sum_p / n, sum_px / n
            if need_x or need_w:
                inner = _products(p, g).to(w.dtype)
                k = inner / n - big_p * a - big_q * b
        slope = zero if q is None else q
        if need_g and (q is not None or r is not None):
            # q·x̂ + r is affine in x
            shift = (zero if r is None else r) - slope * s * mean
            more = torch.addcmul(per(shift), x, per(slope * s))
            to_g = more if to_g is None else to_g.add_(more)
        to_x: Tensor | None = None
        if need_x and (p is not None or q is not None):
            ws = w * s * s
            on_x = (-ws * (k - 2 * b * big_q) - slope * s * b) * s
            on_g = slope * s - ws * big_q
            rest = ws * (b * big_p + big_q * a) - slope * s * a - on_x * mean
            to_x = torch.addcmul(per(rest), x, per(on_x)).addcmul_(g, per(on_g))
            if p is not None:
                to_x = to_x.addcmul_(p, per(-ws * b))
        to_w = n * s * k if need_w and p is not None else None
        return to_g if need_g else None, to_x, to_w, None, None, None


def channel_moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and biased variance of every channel of x (N, C, …). Norms of the centered values are
    two to three times faster on a CPU than `torch.var_mean` over several dimensions."""
    inner = tuple(range(2, x.dim()))
    mean = x.mean((0, *inner))
    centered = x - mean.view(-1, *[1] * len(inner))
    squares = torch.linalg.vector_norm(centered, dim=(0, *inner)).square()
    return mean, squares / (x.numel() // x.shape[1])
