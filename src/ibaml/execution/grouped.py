"""How does a convolution get a second derivative from native kernels too?

Torch's own double backward computes more than is asked for, and runs the groups of a grouped
convolution one by one. Here all derivatives up to the second are grouped convolutions:

    y = conv(x, w)                 ∂x = dgrad(g, w)            ∂w = wgrad(x, g)
    and for cotangents (p, q) of (∂x, ∂w):
    ∂g = conv(p, w) + conv(x, q)   ∂x = dgrad(g, q)            ∂w = wgrad(p, g)
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ibaml.execution.locks import Everywhere
from ibaml.execution.native import is_native
from ibaml.execution.needed import needed_gradients
from ibaml.execution.thin import is_thin, thin
from ibaml.execution.twice import last_derivative


class Shape(NamedTuple):
    """The settings of a convolution."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int


def convolve(x: Tensor, weight: Tensor, shape: Shape) -> Tensor:
    """conv(x, weight), without a bias, differentiable twice."""
    plain = set(shape.stride) == {1} and set(shape.dilation) == {1}
    if plain and is_thin(x, weight) and is_native(x):
        high, wide = shape.padding
        return thin(x, weight, (high, wide), shape.groups)
    y: Tensor = _Convolve.apply(x, weight, shape)
    return y


def _forward(x: Tensor, weight: Tensor, s: Shape) -> Tensor:
    none = [0] * len(s.stride)
    with _fastest() if x.is_cuda else nullcontext():
        if x.is_cuda and _is_faster_transposed(x, weight, s):
            return convolve_transposed(x, weight, s)
        return torch.ops.aten.convolution(
            x, weight, None, s.stride, s.padding, s.dilation, False, none, s.groups
        )


def _is_faster_transposed(x: Tensor, weight: Tensor, s: Shape) -> bool:
    """Whether cuDNN is faster with the transposed form: for groups of several channels its forward
    kernels are slow, but those for the input's gradient are fast (an H200: 1.4 to 5 times)."""
    plain = set(s.stride) == {1} and set(s.dilation) == {1}
    padding_fits = all(p <= k - 1 for p, k in zip(s.padding, weight.shape[2:], strict=True))
    return (
        s.groups > 1
        and weight.shape[1] >= 8
        and plain
        and padding_fits
        and x.dtype == torch.float32
    )


def convolve_transposed(x: Tensor, weight: Tensor, s: Shape) -> Tensor:
    """conv(x, w) as a transposed convolution with w flipped."""
    rank = len(s.stride)
    kernel = weight.shape[2:]
    w = weight.unflatten(0, (s.groups, -1)).transpose(1, 2).flatten(0, 1)
    w = w.flip(tuple(range(2, 2 + rank)))
    padding = [k - 1 - p for k, p in zip(kernel, s.padding, strict=True)]
    none = [0] * rank
    return torch.ops.aten.convolution(
        x, w, None, s.stride, padding, s.dilation, True, none, s.groups
    )


@contextmanager
def _trials() -> Iterator[None]:
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = True
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before


# let cuDNN time its kernels on every new shape: by its own heuristics it runs the groups of a
# convolution one by one
_fastest = Everywhere(_trials)


def _backward(
    g: Tensor, x: Tensor, weight: Tensor, s: Shape, wanted: tuple[bool, bool]
) -> tuple[Tensor | None, Tensor | None]:
    none = [0] * len(s.stride)
    with _fastest() if x.is_cuda else nullcontext():
        gradients = torch.ops.aten.convolution_backward(
            g, x, weight, None, s.stride, s.padding, s.dilation, False, none, s.groups,
            (*wanted, False),
        )  # fmt: skip
    return gradients[0], gradients[1]


class _Convolve(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, shape: Shape) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.shape = shape
        return _forward(x, weight, shape)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        need_x, need_w = needed_gradients(ctx, 2)
        if not (need_x or need_w):
            return None, None, None
        if torch.is_grad_enabled():
            gradients = _Back.apply(g, x, weight, ctx.shape, (need_x, need_w))
        else:
            gradients = _backward(g, x, weight, ctx.shape, (need_x, need_w))
        return gradients[0] if need_x else None, gradients[1] if need_w else None, None


class _Back(torch.autograd.Function):
    """(∂x, ∂w) as a function of g, x and w."""

    @staticmethod
    def forward(
        ctx: Any, g: Tensor, x: Tensor, weight: Tensor, shape: Shape, wanted: tuple[bool, bool]
    ) -> tuple[Tensor | None, Tensor | None]:
        ctx.save_for_backward(g, x, weight)
        ctx.shape = shape
        ctx.set_materialize_grads(False)
        return _backward(g, x, weight, shape, wanted)

    @staticmethod
    @last_derivative
    def backward(ctx: Any, p: Tensor | None, q: Tensor | None) -> tuple[Tensor | None, ...]:
        g, x, weight = ctx.saved_tensors
        need_g, need_x, need_w = needed_gradients(ctx, 3)
        shape = ctx.shape
        to_g: Tensor | None = None
        if need_g:
            if p is not None and q is not None and shape.groups == 1:
                to_g = _forward(torch.cat([p, x], 1), torch.cat([weight, q], 1), shape)
            elif p is not None:
                to_g = _forward(p, weight, shape)
            if q is not None and (p is None or shape.groups > 1):
                more = _forward(x, q, shape)
                to_g = more if to_g is None else to_g + more
        need_x, need_w = need_x and q is not None, need_w and p is not None
        to_x = to_w = None
        if need_x or need_w:  # dgrad(g, q) reads no input, and wgrad(p, g) no weight
            to_x, to_w = _backward(
                g, x if p is None else p, weight if q is None else q, shape, (need_x, need_w)
            )
        return to_g, to_x, to_w, None, None
