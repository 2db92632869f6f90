"""Which operations wait for the next one? A convolution's bias, because batch norm removes it
again; and a batch norm with the ReLU after it, because with 2×2 max pooling they are one operation.

A waiting operation is noted on a tensor that stands for its result (`marks`). `now` runs it if the
values are needed after all.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ibaml.execution.block import norm_relu_pool
from ibaml.execution.marks import BIAS, DONE, NORM, folds_of, mark_folds
from ibaml.execution.moments import MomentsListener
from ibaml.execution.native import is_native
from ibaml.execution.normalize import normalize
from ibaml.execution.pool import max_pool


@dataclass(frozen=True)
class DeferredNorm:
    """A batch norm that waits, and perhaps a ReLU after it.

    Attributes:
        bias_before: a bias that was not yet added to x.
        recorded: whether autograd was recording when the network called the norm.
    """

    x: Tensor
    weight: Tensor
    bias: Tensor
    eps: float
    listener: MomentsListener | None
    bias_before: Tensor | None
    folds: int
    recorded: bool
    relu: bool = False

    def values(self) -> Tensor:
        with torch.set_grad_enabled(self.recorded):
            y, moments = normalize(self.x, self.weight, self.bias, self.eps)
            self._report(moments)
            return y.relu() if self.relu else y

    def pooled(self) -> Tensor:
        """The maxima of the values over 2×2 windows."""
        with torch.set_grad_enabled(self.recorded):
            if _is_one_operation(self.x):
                y, moments = norm_relu_pool(self.x, self.weight, self.bias, self.eps)
            else:  # ReLU and maxima commute, and there are fewer maxima
                y, moments = normalize(self.x, self.weight, self.bias, self.eps)
                y = max_pool(y, (2, 2)).relu()
            self._report(moments)
            return y

    def finish(self) -> None:
        """Report the moments to the listener if no operation has used this norm."""
        if self.listener is not None and not self.listener.received:
            self.values()

    def _report(self, moments: tuple[Tensor, Tensor]) -> None:
        if self.listener is not None:
            mean, var = moments
            mean = mean if self.bias_before is None else mean + self.bias_before.detach()
            self.listener(mean, var, self.folds)


def _is_one_operation(x: Tensor) -> bool:
    """Whether batch norm, ReLU and pooling are one operation here."""
    return x.dim() == 4 and min(x.shape[2:]) >= 2 and is_native(x)


def defer_bias(y: Tensor, bias: Tensor) -> Tensor:
    """y, noting that its bias is still to be added."""
    setattr(y, BIAS, (bias, torch.is_grad_enabled()))
    return y


def deferred_bias(x: Tensor) -> Tensor | None:
    """The bias still to be added to x; None if there is none or `now` has added it."""
    return None if hasattr(x, DONE) else getattr(x, BIAS, (None, True))[0]


def defer_norm(norm: DeferredNorm) -> Tensor:
    """A tensor without values that stands for the norm."""
    stand_in = mark_folds(norm.x.new_empty(()).expand(norm.x.shape), norm.folds)
    setattr(stand_in, NORM, norm)
    return stand_in


def defer_relu(norm: DeferredNorm, stand_in: Tensor, in_place: bool) -> Tensor:
    """A tensor without values that stands for the norm and a ReLU after it."""
    if not in_place:
        stand_in = mark_folds(stand_in.view(stand_in.shape), norm.folds)
    setattr(stand_in, NORM, replace(norm, relu=True))
    return stand_in


def deferred_norm(x: Any) -> DeferredNorm | None:
    """The batch norm that x stands for; None if there is none or `now` has run it."""
    return None if hasattr(x, DONE) else getattr(x, NORM, None)


def force(x: Any) -> Any:
    """The values of x; x itself if nothing is waiting. (The result is stored on x, and an operation
    in place changes the stored result.)"""
    if hasattr(x, DONE):
        return getattr(x, DONE)
    norm: DeferredNorm | None = getattr(x, NORM, None)
    if norm is not None:
        y = norm.values()
    elif hasattr(x, BIAS):
        bias, recorded = getattr(x, BIAS)
        with torch.set_grad_enabled(recorded):
            y = x + bias.to(x.dtype).view(-1, *[1] * (x.dim() - 2))
    else:
        return x
    setattr(x, DONE, mark_folds(y, folds_of(x)))
    return y
