"""One weight set after another, by the operations made for folds: what a CPU is fast at.

Kernels of a CPU are busy with one weight set already, so nothing is gained by folding. What is
gained is in the operations: activations with channels last, batch norm, pooling and convolutions
with second derivatives of their own, and no bias before a norm. What has no such operation runs as
it stands, so that every module can be run this way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ibaml.execution.call import call
from ibaml.execution.fold import FoldMode, Unfoldable, now


class _Single(FoldMode):
    def __init__(self) -> None:
        super().__init__(1, 1)

    def folds(self, x: Tensor) -> int:
        return 1

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        try:
            return super().__torch_function__(func, types, args, kwargs)
        except Unfoldable:
            args, kwargs = pytree.tree_map(now, (args, kwargs or {}))
            if func is Tensor.view and not isinstance(args[1], torch.dtype):
                func = Tensor.reshape  # what channels last cannot view
            return func(*args, **kwargs)


def run_one(
    model: nn.Module, tensors: Mapping[str, Tensor | None], x: Tensor, tied: bool = True
) -> Tensor:
    """``model(x)`` with its parameters and buffers replaced by ``tensors``."""
    mode = _Single()
    with mode:
        y = call(model, tensors, _channels_last(x) if x.dim() == 4 else x, tied)
    return mode.ended(y)


def _channels_last(x: Tensor) -> Tensor:
    x = x.contiguous(memory_format=torch.channels_last)
    _, channels, _, wide = x.shape
    # of a single channel nobody can say where it lies, and torch takes it for first: say it
    strides = (x.stride(0), 1, wide * channels, channels)
    return x.as_strided(x.shape, strides) if channels == 1 else x


def run_single(
    model: nn.Module,
    weights: Mapping[str, Tensor],
    constants: Mapping[str, Tensor | None],
    x: Tensor,
    tied: bool = True,
) -> Tensor:
    """As `run_loop`."""
    tasks, samples = next(iter(weights.values())).shape[:2]
    sets = {name: w.flatten(0, 1).unbind(0) for name, w in weights.items()}
    found = [
        run_one(
            model, {**constants, **{name: w[i] for name, w in sets.items()}}, x[i // samples], tied
        )
        for i in range(tasks * samples)
    ]
    return torch.stack(found).unflatten(0, (tasks, samples))
