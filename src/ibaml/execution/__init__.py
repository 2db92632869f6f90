"""How many weight sets run through one network, and with which batch-norm statistics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn

from ibaml.execution.call import twice_differentiable
from ibaml.execution.loop import run_loop
from ibaml.execution.norm import (
    NORM_STATS,
    Buffers,
    Moments,
    NormStats,
    Plan,
    has_running,
    norm_buffers,
    norm_layers,
    support_buffers,
    update_running,
    watch_moments,
)
from ibaml.execution.vmap import run_vmap, unsafe_layers

Strategy = Literal["auto", "loop", "vmap"]
_STRATEGIES = {"loop": run_loop, "vmap": run_vmap}


@dataclass(frozen=True)
class Runner:
    """Runs weight sets (T, S, …) through a model on inputs (T, N, …), twice differentiable."""

    strategy: str
    recurrent: bool

    def __call__(
        self,
        model: nn.Module,
        weights: Mapping[str, Tensor],
        constants: Mapping[str, Tensor | None],
        x: Tensor,
    ) -> Tensor:
        with twice_differentiable(self.recurrent):
            return _STRATEGIES[self.strategy](model, weights, constants, x)


def choose(model: nn.Module, strategy: Strategy = "auto") -> Runner:
    """How to run ``model``: ``"auto"`` takes vmap for plain dense networks, where it is much
    faster, and the loop elsewhere."""
    if strategy not in ("auto", *_STRATEGIES):
        raise ValueError(f'execution must be "auto", "loop" or "vmap", got {strategy!r}')
    unsafe = unsafe_layers(model)
    if strategy == "vmap" and unsafe:
        raise ValueError(
            'execution="vmap" is refused for this model: second derivatives under vmap are not '
            f'known to be right for {", ".join(unsafe)}; use execution="loop"'
        )
    chosen = ("loop" if unsafe else "vmap") if strategy == "auto" else strategy
    return Runner(chosen, any(isinstance(m, nn.RNNBase) for m in model.modules()))


__all__ = [
    "NORM_STATS",
    "Buffers",
    "Moments",
    "NormStats",
    "Plan",
    "Runner",
    "Strategy",
    "choose",
    "has_running",
    "norm_buffers",
    "norm_layers",
    "support_buffers",
    "update_running",
    "watch_moments",
]
