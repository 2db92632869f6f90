"""How many weight sets run through one network, and with which batch-norm statistics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from ibaml.execution.call import is_tied, twice_differentiable
from ibaml.execution.fold import Unfoldable, run_fold
from ibaml.execution.head import find_head, run_features, run_head
from ibaml.execution.loop import run_loop
from ibaml.execution.norm import (
    Buffers,
    Moments,
    Plan,
    Statistics,
    norm_buffers,
    norm_layers,
    plan_norms,
    support_statistics,
    watch_moments,
    watched,
)
from ibaml.execution.single import run_single
from ibaml.execution.turn import held, training
from ibaml.execution.vmap import run_vmap, unsafe_layers
from ibaml.words import NORM_STATS, STRATEGIES, NormStats, Precision, Strategy

_WHOLE = {"loop": run_loop, "single": run_single, "vmap": run_vmap, "fold": run_fold}
_LARGE = 2000  # inputs of a task (five pictures of 20×20) from which our operations pay on a CPU


@dataclass(frozen=True)
class Runner:
    """Runs weight sets (T, S, …) through a model on inputs (T, N, …), twice differentiable.

    Attributes:
        whole: how the whole network runs, ``"loop"``, ``"single"``, ``"vmap"`` or ``"fold"``.
        head: the layer that owns every adapted weight, where the layers before it may run once a
            task instead of once a weight set.
        precision: of activations and convolutions in folds, None for that of the weights.
    """

    whole: str
    head: str | None
    recurrent: bool
    precision: torch.dtype | None = None
    tied: bool = True  # whether tensors with several names are looked for

    @property
    def strategy(self) -> str:
        way = self.whole if self.head is None else f"head, {self.whole} before it"
        return way if self.precision is None else f"{way}, {str(self.precision)[6:]}"

    def calls(self, sets: int) -> int:
        """How often the network is called for so many weight sets."""
        return 1 if self.whole in ("fold", "vmap") else sets

    def plain(self) -> Runner:
        """The loop, the oracle of every other way."""
        return replace(self, whole="loop", head=None, precision=None)

    def __call__(
        self,
        model: nn.Module,
        weights: Mapping[str, Tensor],
        constants: Mapping[str, Tensor | None],
        x: Tensor,
    ) -> Tensor:
        with held(model), watched(model), twice_differentiable(self.recurrent):
            if self.whole == "fold":
                return run_fold(model, weights, constants, x, self.tied, self.precision)
            return _WHOLE[self.whole](model, weights, constants, x, self.tied)

    def features(
        self, model: nn.Module, constants: Mapping[str, Tensor | None], x: Tensor
    ) -> Tensor | None:
        """What the head reads, None where there is no such head."""
        if self.head is None:
            return None
        with held(model), watched(model), twice_differentiable(self.recurrent):
            return run_features(
                model, self.head, constants, x, self.whole, self.precision, self.tied
            )

    def from_features(
        self,
        weights: Mapping[str, Tensor],
        constants: Mapping[str, Tensor | None],
        features: Tensor,
    ) -> Tensor:
        assert self.head is not None
        return run_head(self.head, weights, constants, features)


def choose(
    model: nn.Module,
    strategy: Strategy = "auto",
    adapted: Sequence[str] = (),
    device: str = "cpu",
    precision: Precision = "full",
    size: int = 0,
) -> Runner:
    """How to run ``model``.

    ``"auto"`` takes the head by itself where only it is adapted; vmap for plain dense networks,
    where it is much faster; folds on an accelerator; and on a CPU, where grouped kernels are slow,
    one weight set after another, by operations of our own where they pay.

    Args:
        size: how many numbers a task's support inputs are.
    """
    if strategy not in STRATEGIES:
        raise ValueError(f"execution must be one of {STRATEGIES}, got {strategy!r}")
    unsafe = unsafe_layers(model)
    if strategy == "vmap" and unsafe:
        raise ValueError(
            'execution="vmap" is refused for this model: second derivatives under vmap are not '
            f'known to be right for {", ".join(unsafe)}; use execution="loop"'
        )
    with held(model):
        head = find_head(model, adapted) if strategy in ("auto", "head") else None
        tied = is_tied(model)
    if strategy == "head" and head is None:
        raise ValueError(
            'execution="head" needs the adapted weights to be those of one nn.Linear: use '
            'adapt="head", or execution="auto"'
        )
    if strategy in _WHOLE:
        whole: str = strategy
    elif not unsafe:
        whole = "vmap"
    else:
        whole = "fold" if device != "cpu" else "single" if size >= _LARGE else "loop"
    if precision not in ("full", "bfloat16"):
        raise ValueError(f'precision must be "full" or "bfloat16", got {precision!r}')
    rough = torch.bfloat16 if precision == "bfloat16" and whole == "fold" else None
    recurrent = any(isinstance(m, nn.RNNBase) for m in model.modules())
    return Runner(whole, head, recurrent, rough, tied)


__all__ = [
    "NORM_STATS",
    "STRATEGIES",
    "Buffers",
    "Moments",
    "NormStats",
    "Plan",
    "Precision",
    "Runner",
    "Statistics",
    "Strategy",
    "Unfoldable",
    "choose",
    "held",
    "norm_buffers",
    "norm_layers",
    "plan_norms",
    "support_statistics",
    "training",
    "watch_moments",
]
