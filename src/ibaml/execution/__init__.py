"""How many weight sets run through one network, and with which batch-norm statistics."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
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
Run = Callable[[nn.Module, Mapping[str, Tensor], Mapping[str, Tensor | None], Tensor], Tensor]


def choose(model: nn.Module, strategy: Strategy = "auto") -> Run:
    """The function that runs weight sets (T, S, …) through ``model`` on inputs (T, N, …).

    ``"auto"`` takes vmap for plain dense networks, where it is much faster, and the loop elsewhere.
    """
    run = _strategy(model, strategy)
    recurrent = any(isinstance(m, nn.RNNBase) for m in model.modules())

    @wraps(run)
    def guarded(
        model: nn.Module,
        weights: Mapping[str, Tensor],
        constants: Mapping[str, Tensor | None],
        x: Tensor,
    ) -> Tensor:
        with twice_differentiable(recurrent):
            return run(model, weights, constants, x)

    return guarded


def _strategy(model: nn.Module, strategy: Strategy) -> Run:
    unsafe = unsafe_layers(model)
    if strategy == "auto":
        return run_loop if unsafe else run_vmap
    if strategy == "loop":
        return run_loop
    if strategy == "vmap":
        if unsafe:
            raise ValueError(
                'execution="vmap" is refused for this model: second derivatives under vmap are '
                f'not known to be right for {", ".join(unsafe)}; use execution="loop"'
            )
        return run_vmap
    raise ValueError(f'execution must be "auto", "loop" or "vmap", got {strategy!r}')


__all__ = [
    "NORM_STATS",
    "Buffers",
    "Moments",
    "NormStats",
    "Plan",
    "Run",
    "Strategy",
    "choose",
    "has_running",
    "norm_buffers",
    "norm_layers",
    "run_loop",
    "run_vmap",
    "support_buffers",
    "unsafe_layers",
    "update_running",
    "watch_moments",
]
