"""How do all weight sets run at once in native kernels? Tasks and samples are folded into the
channels, and the network runs by the rules for this layout (`fold_rules`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from ibaml.execution.call import call
from ibaml.execution.fold_rules import FoldMode, Unfoldable
from ibaml.execution.marks import folds_of, mark_folds, mark_own
from ibaml.execution.strategy import Strategy


@dataclass(frozen=True)
class Fold(Strategy):
    """Tasks × samples folded into the channels of native kernels.

    Attributes:
        precision: the dtype of activations and convolutions, None for that of the weights; norms'
            weights and linear layers keep theirs.
    """

    name: ClassVar[str] = "fold"
    precision: torch.dtype | None = None

    def with_precision(self, precision: torch.dtype | None) -> Fold:
        return replace(self, precision=precision)

    def run(
        self,
        model: nn.Module,
        weights: Mapping[str, Tensor],
        constants: Mapping[str, Tensor | None],
        x: Tensor,
    ) -> Tensor:
        tasks, samples = next(iter(weights.values())).shape[:2]
        own = {name: mark_own(w.flatten(0, 1)) for name, w in weights.items()}
        rules = FoldMode(tasks, samples)
        y = rules.spread(self._folded(rules, model, {**constants, **own}, x), rules.sets)
        return y.unflatten(1, (tasks, samples, -1)).movedim(0, 2).to(x.dtype)

    def features(
        self,
        model: nn.Module,
        constants: Mapping[str, Tensor | None],
        x: Tensor,
        read: Callable[[Tensor], Tensor],
    ) -> Tensor:
        features = read(self._folded(FoldMode(len(x), samples=1), model, constants, x))
        return _part_tasks(features).to(x.dtype)

    def calls(self, sets: int) -> int:
        return 1

    def _folded(
        self, rules: FoldMode, model: nn.Module, tensors: Mapping[str, Tensor | None], x: Tensor
    ) -> Tensor:
        """The model on the tasks' inputs x (T, N, …), folded; its output is folded too."""
        x = x if self.precision is None else x.to(self.precision)
        if x.dim() < 3 or not x.is_floating_point():
            raise Unfoldable("inputs without a channel dimension")
        folded = _fold_tasks(x)
        with rules:
            y = call(model, tensors, folded, self.tied)
        return rules.finish(y)


def _fold_tasks(x: Tensor) -> Tensor:
    """(T, N, C, …) as (N, T·C, …)."""
    return mark_folds(x.transpose(0, 1).flatten(1, 2), x.shape[0])


def _part_tasks(x: Tensor) -> Tensor:
    """(N, T·C, …) as (T, N, C, …)."""
    return x.unflatten(1, (folds_of(x), -1)).transpose(0, 1)
