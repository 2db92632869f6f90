"""All weight sets at once in native kernels: tasks and samples are folded into the channels.

A tensor of the network is (N, F·C, …): example by example, the channels of F folds one after the
other. In this layout a convolution with weights of their own for every fold is one grouped
convolution; one with shared weights is an ordinary convolution over N·F images, by a view; batch
norm over a fold's channels is ordinary batch norm; and what works channel by channel (activations,
pooling) needs no change. The first layers see T folds, the tasks' inputs; the first one whose
weights are adapted makes them G = T·S.

Rules exist for the functions listed here. A network that calls any other is not run this way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, resolve_name

from ibaml.execution.block import norm_relu_pool
from ibaml.execution.call import call
from ibaml.execution.grouped import Shape, convolve
from ibaml.execution.native import is_native
from ibaml.execution.normalise import channel_moments, normalise
from ibaml.execution.pool import max_pool

_FOLDS = "_ibaml_folds"  # how many folds a tensor of the network holds
_OWN = "_ibaml_own"  # marks weights with a leading dimension of G sets
_TELL = "_ibaml_tell"  # whom batch norm tells the moments of what it sees

_LATER = "_ibaml_later"  # a batch norm that waits for what follows it
_NOW = "_ibaml_now"  # what stood for something, done
_BIAS = "_ibaml_bias"  # a convolution's bias that was not yet added

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


def tell_moments(x: Tensor, tell: Tell) -> None:
    """Let the batch norm that x goes into next tell the moments of its folds."""
    setattr(x, _TELL, tell)


def is_folded(x: Tensor) -> bool:
    return hasattr(x, _FOLDS)


def folds_of(x: Tensor) -> int:
    """How many folds a tensor of the network holds, 1 outside this strategy."""
    return int(getattr(x, _FOLDS, 1))


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
        self._untold: list[_Later] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = _name(func)
        if name in _LOOKING:
            return func(*args, **kwargs)
        if name in _RELU and len(args) == 1 and (later := _waits(args[0])):
            return _waiting(replace(later, relu=True), args[0], kwargs.get("inplace", False))
        if name not in (_MAX_POOL, _BATCH_NORM):
            args = [now(a) for a in args]
            kwargs = {key: now(a) for key, a in kwargs.items()}
        rule = _RULES.get(name)
        if rule is not None:
            return rule(self, *args, **kwargs)
        tensors = [a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)]
        if any(hasattr(t, _OWN) for t in tensors):
            raise Unfoldable(name)
        if name in _ELEMENTWISE and len(tensors) == 1:
            return _marked(func(*args, **kwargs), self.folds(tensors[0]))
        if name in _POOLING and len(tensors) == 1 and not kwargs.get("return_indices"):
            return _marked(func(*args, **kwargs), self.folds(tensors[0]))
        if name in _BINARY and len(tensors) == 1:
            return _marked(func(*args, **kwargs), self.folds(tensors[0]))
        if name in _BINARY and len(args) == len(tensors) == 2 and not kwargs:
            most = max(self.folds(t) for t in tensors)
            a, b = (self.spread(t, most) for t in tensors)
            if a.shape[:2] != b.shape[:2]:
                raise Unfoldable(name)
            return _marked(func(a, b), most)
        raise Unfoldable(name)

    def ended(self, y: Tensor) -> Tensor:
        """What the network returned, with nothing left to do."""
        for later in self._untold:
            if later.tell is not None and not later.tell.told:  # nobody read this norm
                later.done()
        found: Tensor = now(y)
        return found

    def folds(self, x: Tensor) -> int:
        found = getattr(x, _FOLDS, None)
        if found is None or x.dim() < 2 or x.shape[1] % found:
            raise Unfoldable("a tensor from outside the network")
        return int(found)

    def spread(self, x: Tensor, folds: int) -> Tensor:
        """x with G folds, where it has T: every sample sees its task's."""
        if self.folds(x) == folds:
            return x
        wide = x.unflatten(1, (self.tasks, 1, -1)).expand(
            -1, -1, self.samples, *[-1] * (x.dim() - 1)
        )
        return _marked(wide.flatten(1, 3), folds)

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
        if hasattr(weight, _OWN):
            if groups > 1:
                x, folds = self.spread(x, self.sets), self.sets
            y = convolve(x, weight.flatten(0, 1).to(x.dtype), shape(folds * groups))
            folds = self.sets
        else:
            y = convolve(_parted(x, folds), weight.to(x.dtype), shape(groups))
            y = _folded(y, folds)
        y = _marked(y, folds)
        if bias is not None:
            y, (flat,) = self._affine(y, (bias,))
            # batch norm takes it away again
            setattr(y, _BIAS, (flat, torch.is_grad_enabled()))
        return y

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if x.dim() != 2:
            raise Unfoldable("linear on more than vectors")
        folds = self.folds(x)
        x = _marked(x.to(weight.dtype), folds)  # the head in full precision
        if not hasattr(weight, _OWN):
            y = F.linear(_parted(x, folds), weight)
            return self._add_bias(_marked(_folded(y, folds), folds), bias)
        # (F, N, in) @ (F, in, sets of the fold × out)
        rows = x.unflatten(1, (folds, -1)).transpose(0, 1)
        y = rows @ weight.reshape(folds, -1, weight.shape[-1]).transpose(1, 2)
        return self._add_bias(_marked(y.transpose(0, 1).flatten(1), self.sets), bias)

    def _add_bias(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Add a linear layer's bias, shared or every set's own."""
        if bias is None:
            return x
        x, (flat,) = self._affine(x, (bias,))
        return _marked(x + flat.to(x.dtype), self.folds(x))

    def _affine(self, x: Tensor, weights: tuple[Tensor | None, ...]) -> tuple[Tensor, list[Any]]:
        """x and a norm's weights, one per channel of its folds."""
        if any(w is not None and hasattr(w, _OWN) for w in weights):
            x = self.spread(x, self.sets)
        folds = self.folds(x)
        found = [
            w if w is None else w.flatten() if hasattr(w, _OWN) else _repeated(w, folds)
            for w in weights
        ]
        return x, found

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
        tell: Tell | None = getattr(x, _TELL, None)
        own = any(t is not None and hasattr(t, _OWN) for t in (weight, bias))
        fits = training and weight is not None and bias is not None
        spreads = own and self.folds(x) != self.sets
        if not fits or spreads or hasattr(x, _LATER) or hasattr(x, _NOW):
            x = now(x)
        if training and x.numel() == x.shape[1]:
            raise ValueError(f"batch norm of one value per channel has no statistics: {x.shape}")
        shift, _ = getattr(x, _BIAS, (None, True))
        x, (mean, var, w, b) = self._affine(x, (running_mean, running_var, weight, bias))
        folds = self.folds(x)
        if fits:
            b = b if shift is None else b + 0 * shift  # it moves the mean, and nothing else
            later = _Later(x, w, b, eps, tell, shift, folds, torch.is_grad_enabled())
            if tell is not None:
                tell.taken = True
                self._untold.append(later)
            return _waiting(later, _marked(x.new_empty(()).expand(x.shape), folds))
        y = F.batch_norm(x, mean, var, w, b, training, momentum, eps)
        if tell is not None:
            tell.taken = True
            tell(*(m.unflatten(0, (folds, -1)) for m in channel_moments(x.detach())))
        return _marked(y, folds)

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
        later = _waits(x)
        if plain and not ceil_mode and window == (2, 2) and later is not None and later.relu:
            return _marked(later.pooled(), later.folds)
        x = now(x)
        if plain and not ceil_mode:
            return _marked(max_pool(x, window), self.folds(x))
        y = F.max_pool2d(x, kernel_size, stride, padding, dilation, ceil_mode)
        return _marked(y, self.folds(x))

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
        return _marked(F.group_norm(x, num_groups * folds, w, b, eps), folds)

    def flatten(self, x: Tensor, start_dim: int = 0, end_dim: int = -1) -> Tensor:
        if start_dim != 1 or end_dim not in (-1, x.dim() - 1):
            raise Unfoldable("flatten of the examples")
        return _marked(x.flatten(1), self.folds(x))

    def reshape(self, x: Tensor, *shape: Any) -> Tensor:
        sizes = shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape
        if len(sizes) != 2 or sizes[0] != x.shape[0] or sizes[1] != -1:
            raise Unfoldable("a reshape that is no flatten(1)")
        return self.flatten(x, 1)

    def mean(self, x: Tensor, dim: Any = None, keepdim: bool = False) -> Tensor:
        dims = [dim] if isinstance(dim, int) else list(dim or ())
        if not dims or any(d % x.dim() < 2 for d in dims):
            raise Unfoldable("a mean over examples or channels")
        return _marked(x.mean(dims, keepdim), self.folds(x))

    def dropout(
        self, x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> Tensor:
        if training:
            raise Unfoldable("dropout while training")
        return x


class Tell:
    """Whom batch norm tells the moments of its folds, (folds, channels)."""

    def __init__(self, hear: Callable[[Tensor, Tensor], None]) -> None:
        self._hear = hear
        self.taken = False  # a batch norm knows of it
        self.told = False

    def __call__(self, mean: Tensor, var: Tensor) -> None:
        self.told = True
        self._hear(mean, var)


@dataclass(frozen=True)
class _Later:
    """A batch norm, and a ReLU after it, that wait: where 2×2 max pooling follows, the three are
    one operation."""

    x: Tensor
    weight: Tensor
    bias: Tensor
    eps: float
    tell: Tell | None
    shift: Tensor | None  # what should have been added to x
    folds: int
    recorded: bool  # whether a graph was wanted where it stands in the network
    relu: bool = False

    def done(self) -> Tensor:
        with torch.set_grad_enabled(self.recorded):
            y, moments = normalise(self.x, self.weight, self.bias, self.eps)
            self._tell(moments)
            return y.relu() if self.relu else y

    def pooled(self) -> Tensor:
        with torch.set_grad_enabled(self.recorded):
            if _fuses(self.x):
                y, moments = norm_relu_pool(self.x, self.weight, self.bias, self.eps)
            else:  # ReLU and maxima commute, and there are fewer of these
                y, moments = normalise(self.x, self.weight, self.bias, self.eps)
                y = max_pool(y, (2, 2)).relu()
            self._tell(moments)
            return y

    def _tell(self, moments: tuple[Tensor, Tensor]) -> None:
        if self.tell is not None:
            mean, var = moments
            mean = mean if self.shift is None else mean + self.shift.detach()
            self.tell(*(m.unflatten(0, (self.folds, -1)) for m in (mean, var)))


def now(x: Any) -> Any:
    """x itself, where something of it is not yet done. (What is done once stays, and an operation
    in place changes what stays.)"""
    if hasattr(x, _NOW):
        return getattr(x, _NOW)
    later: _Later | None = getattr(x, _LATER, None)
    if later is not None:
        y = later.done()
    elif hasattr(x, _BIAS):
        bias, recorded = getattr(x, _BIAS)
        with torch.set_grad_enabled(recorded):
            y = x + bias.to(x.dtype).view(-1, *[1] * (x.dim() - 2))
    else:
        return x
    setattr(x, _NOW, _marked(y, folds_of(x)))
    return y


def _waits(x: Any) -> _Later | None:
    """The batch norm that x stands for, as long as nobody has used x."""
    return None if hasattr(x, _NOW) else getattr(x, _LATER, None)


def _waiting(later: _Later, stand_in: Tensor, in_place: bool = False) -> Tensor:
    """A tensor without values that stands for what is not yet done."""
    if not in_place:
        stand_in = _marked(stand_in.view(stand_in.shape), getattr(stand_in, _FOLDS))
    setattr(stand_in, _LATER, later)
    return stand_in


def _fuses(x: Tensor) -> bool:
    """Whether batch norm, ReLU and pooling are one operation here."""
    return x.dim() == 4 and min(x.shape[2:]) >= 2 and is_native(x)


def _marked(x: Tensor, folds: int) -> Tensor:
    setattr(x, _FOLDS, folds)
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


def run_fold(
    model: nn.Module,
    weights: Mapping[str, Tensor],
    constants: Mapping[str, Tensor | None],
    x: Tensor,
    tied: bool = True,
    precision: torch.dtype | None = None,
) -> Tensor:
    """As `run_loop`, with tasks × samples folded into the channels of native kernels.

    Args:
        precision: of activations and convolutions; norms' weights and linear layers stay as they
            are.
    """
    tasks, samples = next(iter(weights.values())).shape[:2]
    own = {}
    for name, w in weights.items():
        own[name] = w.flatten(0, 1)
        setattr(own[name], _OWN, True)
    mode = FoldMode(tasks, samples)
    inputs = x if precision is None else x.to(precision)
    y = mode.spread(run_mode(mode, model, {**constants, **own}, inputs, tied), mode.sets)
    return y.unflatten(1, (tasks, samples, -1)).movedim(0, 2).to(x.dtype)


def run_mode(
    mode: FoldMode,
    model: nn.Module,
    tensors: Mapping[str, Tensor | None],
    x: Tensor,
    tied: bool = True,
) -> Tensor:
    """The model on the tasks' inputs x (T, N, …), folded; its output is folded too."""
    if x.dim() < 3 or not x.is_floating_point():
        raise Unfoldable("inputs without a channel dimension")
    folded = fold_tasks(x)
    with mode:
        y = call(model, tensors, folded, tied)
    return mode.ended(y)


def fold_tasks(x: Tensor) -> Tensor:
    """(T, N, C, …) as (N, T·C, …)."""
    return _marked(x.transpose(0, 1).flatten(1, 2), x.shape[0])


def part_tasks(x: Tensor) -> Tensor:
    """(N, T·C, …) as (T, N, C, …)."""
    return x.unflatten(1, (folds_of(x), -1)).transpose(0, 1)


def folded_tasks(tasks: int) -> FoldMode:
    """The mode for networks whose weights are all shared."""
    return FoldMode(tasks, 1)
