"""How do processes that another library started learn together?

Lightning Fabric, Accelerate, Ray Train or a program of your own start the processes and make their
group. Tasks are split over it: weights are broadcast once, and gradients are summed over tasks in
every step. The learner is never wrapped.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ibaml.learner import MetaLearner


def broadcast(learner: MetaLearner, group: dist.ProcessGroup | None = None) -> None:
    """Give every process of the group the first one's weights; without a group nothing happens.

    Args:
        learner: the same learner, on each process's device.
        group: torch's process group; None is the one that all processes are in.
    """
    if not _has_group():
        return
    first = 0 if group is None else dist.get_global_rank(group, 0)
    with torch.no_grad():
        for tensor in learner.state_dict().values():
            dist.broadcast(tensor, first, group)


@contextmanager
def sum_gradients(learner: MetaLearner, group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """Call the learner once inside, and ``backward()``: every process gets the gradient of all.

    Behind the block the parameters hold the mean gradient over the tasks of all processes that took
    part (not the mean of the processes' means), and batch norm's running statistics have moved by
    all of them. So it does not matter how tasks are divided, and a process may have none. Gradients
    from before are dropped. With one process, or no group at all, nothing is sent.

    Tasks have the same noise as in a single process if every process passes a generator of the same
    seed and tasks keep their ``keys``.

    Args:
        learner: the same learner, on each process's device.
        group: torch's process group; None is the one that all processes are in.

    >>> import ibaml
    >>> learner = ibaml.methods.ibaml(ibaml.nn.mlp(1, 1), steps=5, samples=4)
    >>> batch = ibaml.tasks.Sinusoids().batch(seed=0, keys=range(8), support=5, query=10)
    >>> with ibaml.training.sum_gradients(learner):
    ...     learner(batch).backward()
    """
    parameters = list(learner.parameters())
    for p in parameters:
        p.grad = None
    calls: list[int] = []

    def count(_: Any, inputs: tuple[Any, ...], __: Any) -> None:
        calls.append(len(inputs[0]))

    hook = learner.register_forward_hook(count)
    try:
        with learner.one_meta_step() as statistics:
            yield
            if len(calls) > 1:
                raise RuntimeError(
                    f"the learner was called {len(calls)} times inside sum_gradients: call it "
                    "once, on one TaskBatch with all tasks of this process"
                )
            counted = parameters[0].new_zeros(())
            if calls:
                counted += calls[0] - learner.diagnostics.left_out.sum()
            for p in parameters:
                p.grad = torch.zeros_like(p) if p.grad is None else p.grad * counted
            gradients = [p.grad for p in parameters if p.grad is not None]
            if _has_group():
                _add_up([*gradients, counted, *statistics.tensors()], group)
            torch._foreach_div_(gradients, counted.clamp(min=1))
    finally:
        hook.remove()


def _has_group() -> bool:
    return dist.is_available() and dist.is_initialized()


@torch.no_grad()
def _add_up(tensors: list[Tensor], group: dist.ProcessGroup | None) -> None:
    """Sum tensors over the processes, in place and in one message."""
    flat = torch.cat([t.reshape(-1) for t in tensors])
    dist.all_reduce(flat, group=group)
    for t, part in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
        t.copy_(part.view_as(t))
