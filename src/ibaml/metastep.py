"""What a meta-step gives: a loss, its gradient where that is known already, and what happened.

A loss whose gradient is known is an ordinary scalar: ``backward()`` hands the gradient out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ibaml.execution import Moments
from ibaml.gradient import Record
from ibaml.linalg import LinearSolution, Reason


@dataclass(frozen=True)
class MetaStep:
    """The mean meta-loss of the tasks that took part, and what happened."""

    loss: Tensor
    left_out: Tensor
    record: Record
    passes: list[Moments]
    rebuilt: Record | None = None  # of a second pass, made without the tasks left out

    @property
    def linear(self) -> LinearSolution | None:
        """The linear solve of every task, once there was one; one left out has solved nothing."""
        if self.rebuilt is None or self.rebuilt.linear is None:
            return None if self.rebuilt is not None else self.record.linear
        found = self.rebuilt.linear
        whole = _unsolved(found, len(self.left_out))
        for f in fields(found):
            getattr(whole, f.name)[~self.left_out] = getattr(found, f.name)
        return whole


def with_gradient(
    step: MetaStep, flat: Tensor, present: Sequence[bool], parameters: Sequence[Tensor]
) -> MetaStep:
    """The step with a loss whose gradient is known.

    Args:
        flat: the gradients of the parameters that have one, in one vector.
        present: which of the parameters have one.
    """
    return replace(step, loss=_Known.apply(step.loss, flat, present, *parameters))


class _Known(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, loss: Tensor, flat: Tensor, present: Sequence[bool], *parameters: Tensor
    ) -> Tensor:
        ctx.save_for_backward(flat)
        ctx.present = present
        ctx.like = [(p.shape, p.dtype) for p in parameters]
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError("a replayed loss cannot be differentiated twice: use capture=False")
        (flat,) = ctx.saved_tensors
        shapes = [s for (s, _), here in zip(ctx.like, ctx.present, strict=True) if here]
        parts = iter((flat * upstream).split([math.prod(s) for s in shapes]))
        found = [
            next(parts).view(shape).to(dtype) if here else None
            for (shape, dtype), here in zip(ctx.like, ctx.present, strict=True)
        ]
        return None, None, None, *found


def _unsolved(like: LinearSolution, tasks: int) -> LinearSolution:
    return LinearSolution(
        value=like.value.new_zeros(tasks, like.value.shape[-1]),
        steps=like.steps.new_zeros(tasks),
        residual=like.residual.new_full((tasks,), float("nan")),
        reason=like.reason.new_full((tasks,), Reason.NONFINITE),
    )


def each(change: Callable[[Tensor], Tensor], found: Any) -> Any:
    """The same structure with every tensor changed."""
    if isinstance(found, Tensor):
        return change(found)
    if is_dataclass(found) and not isinstance(found, type):
        return type(found)(**{f.name: each(change, getattr(found, f.name)) for f in fields(found)})
    if isinstance(found, dict):
        return {key: each(change, value) for key, value in found.items()}
    if isinstance(found, list | tuple):
        return type(found)(each(change, value) for value in found)
    return found
