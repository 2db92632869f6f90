"""Which strategy does a network get? The requested one, or the fastest on this device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from ibaml.execution.call import is_tied
from ibaml.execution.fold import Fold
from ibaml.execution.head import find_head
from ibaml.execution.locks import held
from ibaml.execution.loop import Loop
from ibaml.execution.runner import Runner
from ibaml.execution.single import Single
from ibaml.execution.strategy import Strategy
from ibaml.execution.vmap import Vmap
from ibaml.words import EXECUTIONS, PRECISIONS, Execution, Precision

STRATEGIES: tuple[type[Strategy], ...] = (Loop, Single, Vmap, Fold)
_LARGE = 2000  # from this size on (five pictures of 20×20) our operations pay off on a CPU


def choose(
    model: nn.Module,
    execution: Execution = "auto",
    adapted: Sequence[str] = (),
    device: str = "cpu",
    precision: Precision = "full",
    size: int = 0,
) -> Runner:
    """How to run ``model``: as ``execution`` says. ``"auto"`` runs the head by itself if only the
    head is adapted, and everything else by the fastest strategy.

    Args:
        adapted: the names of the adapted weights.
        size: how many numbers a task's support inputs contain.
    """
    if execution not in EXECUTIONS:
        raise ValueError(f"execution must be one of {EXECUTIONS}, got {execution!r}")
    if precision not in PRECISIONS:
        raise ValueError(f'precision must be "full" or "bfloat16", got {precision!r}')
    asked = next((s for s in STRATEGIES if s.name == execution), None)
    if asked is not None and (why := asked.refusal(model)):
        raise ValueError(f'execution="{execution}" is refused for this model: {why}')
    with held(model):
        head = find_head(model, adapted) if asked is None else None
        tied = is_tied(model)
    if execution == "head" and head is None:
        raise ValueError(
            'execution="head" needs the adapted weights to be those of one nn.Linear: use '
            'adapt="head", or execution="auto"'
        )
    whole = (asked or fastest(model, device, size, _shares_first(model, adapted, head)))(tied)
    if precision == "bfloat16":
        whole = whole.with_precision(torch.bfloat16)
    recurrent = any(isinstance(m, nn.RNNBase) for m in model.modules())
    return Runner(whole, head, recurrent)


def fastest(model: nn.Module, device: str, size: int, shares_first: bool = False) -> type[Strategy]:
    """vmap for plain dense networks, where it is much faster; folds on an accelerator, and where
    the first layers are shared, which then run once for all weight sets. Else on a CPU, where
    grouped kernels are slow, one weight set after another, by our own operations if they pay off.
    """
    if not Vmap.refusal(model):
        return Vmap
    if device != "cpu" or (shares_first and size >= _LARGE):
        return Fold
    return Single if size >= _LARGE else Loop


def _shares_first(model: nn.Module, adapted: Sequence[str], head: str | None) -> bool:
    """Whether the first layer has no adapted weight, and no head runs by itself after it."""
    first = next((n for n, _ in model.named_parameters()), None)
    return bool(adapted) and head is None and first not in adapted
