"""What does every function do in a network whose weight sets are folded into the channels?

A tensor of the network is (N, F·C, …): for every example, the channels of F folds one after the
other. In this layout a convolution with different weights for every fold is one grouped
convolution; one with shared weights is an ordinary convolution over N·F images, by a view; batch
norm over a fold's channels is ordinary batch norm; and functions that work channel by channel
(activations, pooling) need no change. The first layers see T folds, the tasks' inputs; from the
first layer with adapted weights on there are G = T·S.

Rules exist for the functions listed here. A network that calls any other cannot run this way.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode, resolve_name

from ibaml.execution.deferred import (
    DeferredNorm,
    defer_bias,
    defer_norm,
    defer_relu,
    deferred_bias,
    deferred_norm,
    force,
)
from ibaml.execution.grouped import Shape, convolve
from ibaml.execution.marks import folds_of, is_folded, is_own, mark_folds
from ibaml.execution.moments import listener_of
from ibaml.execution.normalize import channel_moments
from ibaml.execution.pool import max_pool

_RELU = {"torch.nn.functional.relu", "torch.relu", "torch.Tensor.relu"}
_BATCH_NORM = "torch.nn.functional.batch_norm"
_MAX_POOL = "torch.nn.functional.max_pool2d"

_ELEMENTWISE = {
    f"torch.nn.functional.{name}"
    for name in (
        "relu", "relu6", "leaky_relu", "elu", "selu", "celu", "gelu", "silu", "mish", "softplus",
        "sigmoid", "tanh", "hardtanh", "hardswish", "hardsigmoid", "logsigmoid", "softsign",
    )
} | {
    f"torch.{owner}{name}"
    for owner in ("", "Tensor.")
    for name in ("relu", "sigmoid", "tanh", "exp", "abs", "square", "neg", "clamp", "clamp_min")
}  # fmt: skip
_POOLING = {
    f"torch.nn.functional.{kind}_pool{n}d"
    for kind in ("max", "avg", "adaptive_avg", "adaptive_max")
    for n in (1, 2, 3)
}
_LOOKING = {"torch.Tensor.dim", "torch.Tensor.size", "torch.Tensor.shape.__get__"}
_BINARY = {
    f"torch.{owner}{name}"
    for owner in ("", "Tensor.")
    for name in (
        "add",
        "sub",
        "mul",
        "div",
        "true_divide",
        "__add__",
        "__radd__",
        "__mul__",
        "add_",
        "sub_",
        "mul_",
        "div_",
        "__iadd__",
        "__isub__",
        "__imul__",
        "__itruediv__",
    )
}


@cache
def _name(func: Callable[..., Any]) -> str:
    return resolve_name(func) or getattr(func, "__name__", str(func))


class Unfoldable(Exception):
    """The network calls a function for which there is no rule."""


class FoldMode(TorchFunctionMode):
    """Runs a module by the rules below."""

    def __init__(self, tasks: int, samples: int) -> None:
        super().__init__()
        self.tasks, self.samples = tasks, samples
        self.sets = tasks * samples
        self._without_listener: list[DeferredNorm] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = _name(func)
        if name in _LOOKING:
            return func(*args, **kwargs)
        if name in _RELU and len(args) == 1 and (norm := deferred_norm(args[0])):
            return defer_relu(norm, args[0], kwargs.get("inplace", False))
        if name not in (_MAX_POOL, _BATCH_NORM):
            args = [force(a) for a in args]
            kwargs = {key: force(a) for key, a in kwargs.items()}
        rule = _RULES.get(name)
        if rule is not None:
            return rule(self, *args, **kwargs)
        tensors = [a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)]
        if any(is_own(t) for t in tensors):
            raise Unfoldable(name)
        if name in _ELEMENTWISE and len(tensors) == 1:
            return mark_folds(func(*args, **kwargs), self.folds(tensors[0]))
        if name in _POOLING and len(tensors) == 1 and not kwargs.get("return_indices"):
            return mark_folds(func(*args, **kwargs), self.folds(tensors[0]))
        if name in _BINARY and len(tensors) == 1:
            return mark_folds(func(*args, **kwargs), self.folds(tensors[0]))
        if name in _BINARY and len(args) == len(tensors) == 2 and not kwargs:
            most = max(self.folds(t) for t in tensors)
            a, b = (self.spread(t, most) for t in tensors)
            if a.shape[:2] != b.shape[:2]:
                raise Unfoldable(name)
            return mark_folds(func(a, b), most)
        raise Unfoldable(name)

    def finish(self, y: Tensor) -> Tensor:
        """The values of what the network returned; runs everything that is still waiting."""
        for norm in self._without_listener:
            norm.finish()
        values: Tensor = force(y)
        return values

    def folds(self, x: Tensor) -> int:
        folds = folds_of(x)
        if not is_folded(x) or x.dim() < 2 or x.shape[1] % folds:
            raise Unfoldable("a tensor from outside the network")
        return folds

    def spread(self, x: Tensor, folds: int) -> Tensor:
        """x with G folds if it has T: every sample sees the values of its task."""
        if self.folds(x) == folds:
            return x
        wide = x.unflatten(1, (self.tasks, 1, -1)).expand(
            -1, -1, self.samples, *[-1] * (x.dim() - 1)
        )
        return mark_folds(wide.flatten(1, 3), folds)

    # --- rules ---

    def conv(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
    ) -> Tensor:
        rank = x.dim() - 2
        if isinstance(padding, str):
            raise Unfoldable(f"padding {padding!r}")

        def each(n: Any) -> tuple[int, ...]:
            return (n,) * rank if isinstance(n, int) else tuple(n)

        def shape(groups: int) -> Shape:
            return Shape(each(stride), each(padding), each(dilation), groups)

        folds = self.folds(x)
        if is_own(weight):
            if groups > 1:
                x, folds = self.spread(x, self.sets), self.sets
            y = convolve(x, weight.flatten(0, 1).to(x.dtype), shape(folds * groups))
            folds = self.sets
        else:
            y = convolve(_parted(x, folds), weight.to(x.dtype), shape(groups))
            y = _folded(y, folds)
        y = mark_folds(y, folds)
        if bias is not None:
            y, (flat,) = self._affine(y, (bias,))
            return defer_bias(y, flat)  # batch norm would remove it again
        return y

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if x.dim() != 2:
            raise Unfoldable("linear on more than vectors")
        folds = self.folds(x)
        x = mark_folds(x.to(weight.dtype), folds)  # the head keeps full precision
        if not is_own(weight):
            y = F.linear(_parted(x, folds), weight)
            return self._add_bias(mark_folds(_folded(y, folds), folds), bias)
        # (F, N, in) @ (F, in, sets of the fold × out)
        rows = x.unflatten(1, (folds, -1)).transpose(0, 1)
        y = rows @ weight.reshape(folds, -1, weight.shape[-1]).transpose(1, 2)
        return self._add_bias(mark_folds(y.transpose(0, 1).flatten(1), self.sets), bias)

    def _add_bias(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Add a linear layer's bias, which is shared or different for every weight set."""
        if bias is None:
            return x
        x, (flat,) = self._affine(x, (bias,))
        return mark_folds(x + flat.to(x.dtype), self.folds(x))

    def _affine(self, x: Tensor, weights: tuple[Tensor | None, ...]) -> tuple[Tensor, list[Any]]:
        """x and a norm's weights, one per channel of its folds."""
        if any(is_own(w) for w in weights):
            x = self.spread(x, self.sets)
        folds = self.folds(x)
        parts = [
            w if w is None else w.flatten() if is_own(w) else _repeated(w, folds) for w in weights
        ]
        return x, parts

    def batch_norm(
        self,
        x: Tensor,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Tensor:
        if training and running_mean is not None:
            raise Unfoldable("batch norm that writes running statistics")
        listener = listener_of(x)
        own = any(is_own(t) for t in (weight, bias))
        fits = training and weight is not None and bias is not None
        spreads = own and self.folds(x) != self.sets
        if not fits or spreads or deferred_bias(x) is None:
            x = force(x)
        if training and x.numel() == x.shape[1]:
            raise ValueError(f"batch norm of one value per channel has no statistics: {x.shape}")
        before = deferred_bias(x)
        x, (mean, var, w, b) = self._affine(x, (running_mean, running_var, weight, bias))
        folds = self.folds(x)
        if fits:
            b = b if before is None else b + 0 * before  # it only moves the mean
            norm = DeferredNorm(x, w, b, eps, listener, before, folds, torch.is_grad_enabled())
            if listener is not None:
                listener.expected = True
                self._without_listener.append(norm)
            return defer_norm(norm)
        y = F.batch_norm(x, mean, var, w, b, training, momentum, eps)
        if listener is not None:
            listener.expected = True
            listener(*channel_moments(x.detach()), folds)
        return mark_folds(y, folds)

    def max_pool(
        self,
        x: Tensor,
        kernel_size: Any,
        stride: Any = None,
        padding: Any = 0,
        dilation: Any = 1,
        ceil_mode: bool = False,
        return_indices: bool = False,
    ) -> Tensor:
        if return_indices:
            raise Unfoldable("max pooling with indices")
        window, step, border, gap = (
            (n, n) if isinstance(n, int) else tuple(n)
            for n in (kernel_size, stride or kernel_size, padding, dilation)
        )
        plain = x.dim() == 4 and window == step and border == (0, 0) and gap == (1, 1)
        norm = deferred_norm(x)
        if plain and not ceil_mode and window == (2, 2) and norm is not None and norm.relu:
            return mark_folds(norm.pooled(), norm.folds)
        x = force(x)
        if plain and not ceil_mode:
            return mark_folds(max_pool(x, window), self.folds(x))
        y = F.max_pool2d(x, kernel_size, stride, padding, dilation, ceil_mode)
        return mark_folds(y, self.folds(x))

    def group_norm(
        self,
        x: Tensor,
        num_groups: int,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        eps: float = 1e-5,
    ) -> Tensor:
        x, (w, b) = self._affine(x, (weight, bias))
        folds = self.folds(x)
        w, b = (t if t is None else t.to(x.dtype) for t in (w, b))
        return mark_folds(F.group_norm(x, num_groups * folds, w, b, eps), folds)

    def flatten(self, x: Tensor, start_dim: int = 0, end_dim: int = -1) -> Tensor:
        if start_dim != 1 or end_dim not in (-1, x.dim() - 1):
            raise Unfoldable("flatten of the examples")
        return mark_folds(x.flatten(1), self.folds(x))

    def reshape(self, x: Tensor, *shape: Any) -> Tensor:
        sizes = shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape
        if len(sizes) != 2 or sizes[0] != x.shape[0] or sizes[1] != -1:
            raise Unfoldable("a reshape other than flatten(1)")
        return self.flatten(x, 1)

    def mean(self, x: Tensor, dim: Any = None, keepdim: bool = False) -> Tensor:
        dims = [dim] if isinstance(dim, int) else list(dim or ())
        if not dims or any(d % x.dim() < 2 for d in dims):
            raise Unfoldable("a mean over examples or channels")
        return mark_folds(x.mean(dims, keepdim), self.folds(x))

    def dropout(
        self, x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> Tensor:
        if training:
            raise Unfoldable("dropout while training")
        return x


def _repeated(w: Tensor, folds: int) -> Tensor:
    return w if folds == 1 else w.repeat(folds)


def _parted(x: Tensor, folds: int) -> Tensor:
    """(N, F·C, …) as (N·F, C, …), a view."""
    return x if folds == 1 else x.unflatten(1, (folds, -1)).flatten(0, 1)


def _folded(x: Tensor, folds: int) -> Tensor:
    """(N·F, C, …) as (N, F·C, …), a view."""
    return x if folds == 1 else x.unflatten(0, (-1, folds)).flatten(1, 2)


_RULES: dict[str, Callable[..., Tensor]] = {
    **{f"torch.nn.functional.conv{n}d": FoldMode.conv for n in (1, 2, 3)},
    **{f"torch.conv{n}d": FoldMode.conv for n in (1, 2, 3)},
    "torch.nn.functional.linear": FoldMode.linear,
    _BATCH_NORM: FoldMode.batch_norm,
    "torch.nn.functional.group_norm": FoldMode.group_norm,
    "torch.nn.functional.dropout": FoldMode.dropout,
    _MAX_POOL: FoldMode.max_pool,
    "torch.flatten": FoldMode.flatten,
    "torch.Tensor.flatten": FoldMode.flatten,
    "torch.Tensor.view": FoldMode.reshape,
    "torch.Tensor.reshape": FoldMode.reshape,
    "torch.Tensor.mean": FoldMode.mean,
    "torch.mean": FoldMode.mean,
}
