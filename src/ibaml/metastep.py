"""What does a meta-step return? A loss, its gradient if that is known already, and what happened.

The loss is an ordinary scalar, also if its gradient was computed before or is checked on the way:
``backward()`` passes the gradient on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ibaml.energy import TaskEnergy
from ibaml.execution import Moments
from ibaml.gradient import Record
from ibaml.linalg import LinearSolution, Reason
from ibaml.tasks import TaskBatch


@dataclass(frozen=True)
class Reads:
    """The learner's tensors that a meta-loss depends on: the originals, and the views that the
    graph reads, so that the gradient of a meta-step can be checked before it is passed on."""

    outer: tuple[Tensor, ...] = ()
    inner: tuple[Tensor, ...] = ()

    @classmethod
    def through(
        cls, support: TaskEnergy, query: TaskEnergy, rate: Tensor | None
    ) -> tuple[Reads, TaskEnergy, TaskEnergy, Tensor | None]:
        """Both energies and the step sizes, which read views of all tensors they depend on."""
        outside = support.meta.outside
        outer = (*support.theta, *outside.values(), *(() if rate is None else (rate,)))
        reads = cls(outer, tuple(t.view_as(t) for t in outer))
        inner = iter(reads.inner)
        theta = tuple(next(inner) for _ in support.theta)
        outside = {name: next(inner) for name in outside}
        query = query.bind(theta)
        query = replace(query, meta=replace(query.meta, outside=outside))
        return reads, support.bind(theta), query, None if rate is None else next(inner)


@dataclass(frozen=True)
class MetaStep:
    """The mean meta-loss of the tasks that took part, and what happened."""

    loss: Tensor
    left_out: Tensor
    record: Record
    passes: list[Moments]
    rebuilt: tuple[Record, Tensor] | None = None  # of a second pass, and which tasks took part
    reads: Reads = field(default_factory=Reads)

    @classmethod
    def of(cls, losses: Tensor, record: Record, passes: list[Moments], reads: Reads) -> MetaStep:
        """The mean of the tasks' losses (T,), leaving out tasks that diverged or are not finite."""
        left_out = ~losses.detach().isfinite()
        if record.solution is not None:
            left_out = left_out | record.solution.diverged
        total = torch.where(left_out, torch.zeros_like(losses), losses).sum()
        count = (~left_out).sum()
        loss = torch.where(count > 0, total / count.clamp(min=1), float("nan"))
        return cls(loss, left_out.clone(), record, passes, reads=reads)

    @property
    def linear(self) -> LinearSolution | None:
        """The linear solve of every task, once there was one; NaN residuals for tasks left out."""
        if self.rebuilt is None:
            return self.record.linear
        record, takes_part = self.rebuilt
        solution = record.linear
        if solution is None:
            return None
        whole = _unsolved(solution, len(self.left_out))
        for f in fields(solution):
            getattr(whole, f.name)[takes_part] = getattr(solution, f.name)
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
        shapes = [s for (s, _), is_present in zip(ctx.like, ctx.present, strict=True) if is_present]
        parts = iter((flat * upstream).split([math.prod(s) for s in shapes]))
        gradients = [
            next(parts).view(shape).to(dtype) if is_present else None
            for (shape, dtype), is_present in zip(ctx.like, ctx.present, strict=True)
        ]
        return None, None, None, *gradients


@dataclass(frozen=True)
class Repair:
    """How a meta-step whose gradient is not finite is done again.

    Attributes:
        tasks: how many there are.
        alone: the meta-step of one task.
        without: the meta-step without the bad tasks, given as a mask (tasks,); None if no task is
            left.
    """

    tasks: int
    alone: Callable[[int], MetaStep]
    without: Callable[[Tensor], MetaStep | None]


def guarded(step: MetaStep, repair: Repair | None) -> MetaStep:
    """The step with a loss that checks its gradient in ``backward()``: tasks whose part is not
    finite are left out. If values may not be read (``repair`` is None: it would wait for the
    device), a gradient that is not finite becomes zero, and all tasks count as left out."""
    return replace(step, loss=_Guarded.apply(step, repair, *step.reads.outer))


class _Guarded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, step: MetaStep, repair: Repair | None, *outer: Tensor) -> Tensor:
        ctx.step, ctx.repair = step, repair
        return step.loss.detach().clone()

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.step is None:
            raise RuntimeError(
                "backward through the same loss a second time: the first needs retain_graph=True"
            )
        step, repair = ctx.step, ctx.repair
        positions = [i for i, need in enumerate(ctx.needs_input_grad[2:]) if need]
        create_graph = torch.is_grad_enabled()
        keep = create_graph or torch._C._autograd._get_current_graph_task_keep_graph()

        def gradient(of: MetaStep, keep: bool = False) -> tuple[Tensor | None, ...]:
            inner = [of.reads.inner[i] for i in positions]
            return torch.autograd.grad(
                of.loss, inner, upstream, keep, create_graph, allow_unused=True
            )

        def finite_without_scale() -> bool:
            """Whether the gradient is finite without the loss scale (amp) it is multiplied by."""
            assert repair is not None
            whole = repair.without(torch.zeros(repair.tasks, dtype=torch.bool))
            assert whole is not None
            inner = [whole.reads.inner[i] for i in positions]
            return _all_finite(whole, torch.autograd.grad(whole.loss, inner, allow_unused=True))

        gradients = gradient(step, keep)
        if repair is None:
            gradients, all_finite = zero_unless_finite(gradients, step)
            step.left_out.logical_or_(~all_finite)
        elif not _all_finite(step, gradients):
            with torch.enable_grad():
                scaled = not bool((upstream == 1).all())
                if not (scaled and finite_without_scale()):
                    alone = (repair.alone(t) for t in range(repair.tasks))
                    bad_tasks = [not _all_finite(one, gradient(one)) for one in alone]
                    again = repair.without(torch.tensor(bad_tasks))
                    if again is not None:
                        gradients = gradient(again)
                    else:
                        gradients = tuple(
                            None if g is None else torch.zeros_like(g) for g in gradients
                        )
        given = dict(zip(positions, gradients, strict=True))
        if not keep:  # a loss that outlives its graph must not keep the tasks alive
            ctx.step = ctx.repair = None
        return None, None, *(given.get(i) for i in range(len(step.reads.outer)))


def _all_finite(step: MetaStep, gradients: Sequence[Tensor | None]) -> bool:
    """Whether the gradient of a meta-step and of every task in it is finite (a linear solver
    replaces values that are not finite by zero, so its record is read too)."""
    finite = all(bool(g.isfinite().all()) for g in gradients if g is not None)
    return finite and bool(linear_solve_succeeded(step))


def linear_solve_succeeded(step: MetaStep) -> Tensor:
    """Whether every value was finite in all tasks' linear systems."""
    record = step.record if step.rebuilt is None else step.rebuilt[0]
    if record.linear is None:
        return torch.ones((), dtype=torch.bool, device=step.left_out.device)
    return (record.linear.reason != Reason.NONFINITE).all()


def zero_unless_finite(
    gradients: Sequence[Tensor | None], step: MetaStep
) -> tuple[tuple[Tensor | None, ...], Tensor]:
    """The gradients of a meta-step, or zeros if they are not finite; and a tensor that says which,
    so that nothing waits for the device."""
    finite = [g.isfinite().all() for g in gradients if g is not None]
    all_finite = torch.stack([linear_solve_succeeded(step), *finite]).all()
    return tuple(
        None if g is None else torch.where(all_finite, g, 0.0) for g in gradients
    ), all_finite


def _unsolved(like: LinearSolution, tasks: int) -> LinearSolution:
    return LinearSolution(
        value=like.value.new_zeros(tasks, like.value.shape[-1]),
        steps=like.steps.new_zeros(tasks),
        residual=like.residual.new_full((tasks,), float("nan")),
        reason=like.reason.new_full((tasks,), Reason.NONFINITE),
    )


def map_tensors(change: Callable[[Tensor], Tensor], structure: Any) -> Any:
    """The same structure with every tensor changed."""
    if isinstance(structure, Tensor):
        return change(structure)
    if is_dataclass(structure) and not isinstance(structure, type):
        return type(structure)(
            **{f.name: map_tensors(change, getattr(structure, f.name)) for f in fields(structure)}
        )
    if isinstance(structure, dict):
        return {key: map_tensors(change, value) for key, value in structure.items()}
    if isinstance(structure, list | tuple):
        return type(structure)(map_tensors(change, value) for value in structure)
    return structure


def reaches_outside(loss: Tensor, leaves: list[Tensor]) -> bool:
    """Whether the loss also depends on other tensors that require gradients (a likelihood may close
    over some)."""
    known = {id(t) for t in leaves}
    seen: set[Any] = set()
    nodes = [loss.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable") and id(node.variable) not in known:
            return True
        nodes += [following for following, _ in node.next_functions]
    return False


def wants_gradients(batch: TaskBatch) -> bool:
    """Whether any tensor of the tasks requires a gradient."""
    tensors = (batch.support_x, batch.support_y, batch.query_x, batch.query_y)
    return any(t.requires_grad for t in tensors)
