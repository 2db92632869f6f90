"""How do weight sets run one after another, by the operations made for folds? Fast on a CPU.

One weight set already uses all of a CPU, so folding gains nothing. The operations do: activations
with channels last; batch norm, pooling and convolutions with our own second derivatives; no bias
before a norm. A function without such an operation runs unchanged, so every module can run this
way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ibaml.execution.call import call
from ibaml.execution.deferred import force
from ibaml.execution.fold_rules import FoldMode, Unfoldable
from ibaml.execution.strategy import Strategy


@dataclass(frozen=True)
class Single(Strategy):
    """One weight set after another, by our own operations."""

    name: ClassVar[str] = "single"

    def run(
        self,
        model: nn.Module,
        weights: Mapping[str, Tensor],
        constants: Mapping[str, Tensor | None],
        x: Tensor,
    ) -> Tensor:
        tasks, samples = next(iter(weights.values())).shape[:2]
        sets = {name: w.flatten(0, 1).unbind(0) for name, w in weights.items()}
        outputs = [
            self._one(model, {**constants, **{n: w[i] for n, w in sets.items()}}, x[i // samples])
            for i in range(tasks * samples)
        ]
        return torch.stack(outputs).unflatten(0, (tasks, samples))

    def features(
        self,
        model: nn.Module,
        constants: Mapping[str, Tensor | None],
        x: Tensor,
        read: Callable[[Tensor], Tensor],
    ) -> Tensor:
        return torch.stack([read(self._one(model, constants, part)) for part in x])

    def _one(self, model: nn.Module, tensors: Mapping[str, Tensor | None], x: Tensor) -> Tensor:
        """``model(x)`` with its parameters and buffers replaced by ``tensors``."""
        rules = _Rules()
        with rules:
            y = call(model, tensors, _channels_last(x) if x.dim() == 4 else x, self.tied)
        return rules.finish(y)


class _Rules(FoldMode):
    """The rules for folds, with a single fold; functions without a rule run unchanged."""

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
            args, kwargs = pytree.tree_map(force, (args, kwargs or {}))
            if func is Tensor.view and not isinstance(args[1], torch.dtype):
                func = Tensor.reshape  # a view may not exist with channels last
            return func(*args, **kwargs)


def _channels_last(x: Tensor) -> Tensor:
    x = x.contiguous(memory_format=torch.channels_last)
    _, channels, _, wide = x.shape
    # with a single channel both formats are the same, and torch assumes channels first: set it
    strides = (x.stride(0), 1, wide * channels, channels)
    return x.as_strided(x.shape, strides) if channels == 1 else x
