"""How many tasks are judged at once? As many as fit on an accelerator; what comes out differs by
rounding only, because a task's noise depends on its key."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ibaml.learner import MetaLearner
from ibaml.machine import free_bytes

ON_CPU = 16  # more is not faster there
MOST_HEADS, MOST = 128, 32  # by then the device is busy
_SHARE = 0.5  # of the free memory; the rest is for what grows faster than the tasks
_TRIAL = 2  # tasks whose memory is measured


def tasks_at_once(learner: MetaLearner, work: Callable[[int], object]) -> int:
    """How many tasks to judge at once.

    Args:
        work: judges so many tasks, to measure the memory that this takes.
    """
    device = learner.reference.device
    if device.type != "cuda":
        return ON_CPU
    work(1)  # makes what is made once: kernels, workspaces, a choice of strategy
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    work(_TRIAL)
    torch.cuda.synchronize(device)
    used = torch.cuda.max_memory_allocated(device) - before
    return fitting(used / _TRIAL, free_bytes(device), MOST_HEADS if learner.adapts_head else MOST)


def fitting(per_task: float, free: int | None, most: int) -> int:
    """The largest power of two up to ``most`` whose tasks fit into the free memory; at least one.
    (A power of two, so that a little more or less free memory seldom changes a rounding.)"""
    count = most
    while count > 1 and free is not None and count * per_task > _SHARE * free:
        count //= 2
    return count
