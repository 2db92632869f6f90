"""How are the K steps of the solver differentiated (MAML, ABML)? Exactly, step by step."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ibaml.arguments import check_flag
from ibaml.energy import Energy, detached
from ibaml.gradient.base import Record
from ibaml.solve import Descent, Progress, Solver


@dataclass(frozen=True)
class Unrolled:
    """Backpropagate through every step; time and memory grow with K.

    Args:
        recompute: keep only the iterates at every √K-th step and recompute the steps between them
            in the backward pass: memory grows with √K, time by one more forward pass.
    """

    recompute: bool = False

    def __post_init__(self) -> None:
        check_flag("recompute", self.recompute)

    def __call__(
        self,
        energy: Energy,
        start: Tensor,
        solver: Solver,
        record: Record,
        *,
        rate: Tensor | None = None,
        examine: bool = True,
    ) -> Tensor:
        if not isinstance(solver, Descent):
            raise ValueError(
                f"{type(solver).__name__} cannot be unrolled (its line search has no derivative): "
                "use GradientDescent, NaturalDescent or Adam, or the implicit rule"
            )
        if not torch.is_grad_enabled():
            record.solution = solver.solve(detached(energy), start, rate=rate, examine=examine)
            return record.solution.value
        progress = solver.begin(start)
        if not self.recompute:
            progress = solver.advance(energy, progress, solver.steps, rate=rate, create_graph=True)
        else:
            stride = max(1, math.isqrt(solver.steps))
            for first in range(0, solver.steps, stride):
                until = min(first + stride, solver.steps)
                progress = _segment(solver, energy, progress, first, until, rate)
        solution = solver.finish(detached(energy), start, progress, examine)
        record.solution = replace(solution, value=solution.value.detach())
        return solution.value


def _segment(
    solver: Descent,
    energy: Energy,
    progress: Progress,
    first: int,
    until: int,
    rate: Tensor | None,
) -> Progress:
    results: list[Progress] = []
    inputs = (progress.v, *progress.memory, *(() if rate is None else (rate,)), *energy.theta)
    v, *memory = _Segment.apply(
        (solver, detached(energy), progress, first, until, rate is not None, results), *inputs
    )
    return replace(results[0], v=v, memory=tuple(memory))


class _Segment(torch.autograd.Function):
    """A few steps without a graph; the backward pass takes them again with one."""

    @staticmethod
    def forward(ctx: Any, job: tuple[Any, ...], *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.job = job
        ctx.save_for_backward(*inputs)
        done = _Segment._run(job, inputs, create_graph=False)
        job[-1].append(replace(done, v=done.v.detach(), memory=()))
        return (done.v, *done.memory)

    @staticmethod
    def _run(job: tuple[Any, ...], inputs: Iterable[Tensor], create_graph: bool) -> Progress:
        solver, energy, progress, first, until, learned, _ = job
        tensors = list(inputs)
        v, memory = tensors[0], tuple(tensors[1 : 1 + len(progress.memory)])
        rest = tensors[1 + len(memory) :]
        rate = rest.pop(0) if learned else None
        return solver.advance(
            energy.bind(tuple(rest)),
            replace(progress, v=v, memory=memory),
            until,
            first,
            rate=rate,
            create_graph=create_graph,
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        inputs = [t.detach().requires_grad_() for t in ctx.saved_tensors]
        with torch.enable_grad():
            done = _Segment._run(ctx.job, inputs, create_graph=True)
            outputs = (done.v, *done.memory)
        wanted = [t for t, need in zip(inputs, ctx.needs_input_grad[1:], strict=True) if need]
        gradients = iter(torch.autograd.grad(outputs, wanted, cotangents, allow_unused=True))
        return None, *(next(gradients) if need else None for need in ctx.needs_input_grad[1:])
