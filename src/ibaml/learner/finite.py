"""Which tasks are left out of a meta-step, so that a failed one does not spoil the others?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from ibaml.gradient import GradientRule, Unrolled
from ibaml.metastep import MetaStep, Repair, guarded, reaches_outside, wants_gradients
from ibaml.tasks import TaskBatch


def may_look(rule: GradientRule, device: torch.device) -> bool:
    """Whether a meta-step may look at its values: always on a CPU. On another device looking
    means waiting, and only the unrolled gradient does that."""
    return isinstance(rule, Unrolled) or device.type == "cpu"


@dataclass(frozen=True)
class FiniteStep:
    """Meta-steps without the tasks whose loss or gradient is not finite.

    A mask cannot remove such a task from a graph (0 · NaN is NaN), so the step is built again
    without it. On an accelerator this would wait for the device at every step. There a solution
    that diverged is replaced by its start, so only data that is bad at the start already remains to
    be masked.

    Attributes:
        work: computes the meta-step of a batch.
        parameters: everything that is learned from it.
        may_look: whether values may be read on the host during the step.
    """

    work: Callable[[TaskBatch], MetaStep]
    parameters: Sequence[nn.Parameter]
    may_look: bool

    def __call__(self, batch: TaskBatch) -> MetaStep:
        step = self.work(batch)
        left_out = step.left_out
        if not self.may_look or not bool(left_out.any()):
            return self._with_finite_gradient(step, batch, torch.arange(len(batch)))
        if bool(left_out.all()):
            anchor = torch.stack([p.sum() for p in self.parameters]).sum()
            return replace(step, loss=torch.where(left_out.any(), float("nan"), anchor), passes=[])
        takes_part = ~left_out
        batch = batch.select(takes_part)
        again = self.work(batch)
        again = replace(
            again, left_out=left_out, record=step.record, rebuilt=(again.record, takes_part.clone())
        )
        return self._with_finite_gradient(again, batch, takes_part.nonzero()[:, 0].cpu())

    def _with_finite_gradient(self, step: MetaStep, batch: TaskBatch, where: Tensor) -> MetaStep:
        """The step, which also leaves out a task whose loss is finite but whose gradient is not;
        ``backward()`` finds those. ``where`` has the positions of the step's tasks in the batch."""
        if not step.loss.requires_grad or torch._C._are_functorch_transforms_active():
            return step
        if wants_gradients(batch) or reaches_outside(step.loss, list(self.parameters)):
            return step  # tensors from outside need the graph unchanged
        if not self.may_look:
            return guarded(step, None)

        def without(bad_tasks: Tensor) -> MetaStep | None:
            step.left_out[where[bad_tasks].to(step.left_out.device)] = True
            return None if bool(bad_tasks.all()) else self.work(batch.select(~bad_tasks))

        def alone(task: int) -> MetaStep:
            return self.work(batch.select([task]))

        return guarded(step, Repair(len(batch), alone, without))
