"""How many tasks fit into memory at once?"""

from __future__ import annotations

import gc
from dataclasses import dataclass

import torch

from ibaml.capture import WARM_UPS
from ibaml.learner import MetaLearner
from ibaml.machine import free_bytes
from ibaml.tasks import TaskSource
from ibaml.training.faults import (
    OutOfMemory,
    TrainingError,
    first_line,
    out_of_memory,
    what_to_lower,
)
from ibaml.training.memory import held_bytes
from ibaml.training.processes import Processes
from ibaml.training.settings import Settings

_SHARE = 0.9  # of the free memory is used


@dataclass(frozen=True)
class Fit:
    """The micro-batch, and notes for the person who runs it."""

    micro_batch: int
    notes: tuple[str, ...]


def fit_memory(
    learner: MetaLearner,
    tasks: TaskSource,
    settings: Settings,
    processes: Processes,
    resumed: str | None = None,
) -> Fit:
    """Estimate a meta-step's memory from one task and, unless as many of the first surely fit, from
    more. Choose the micro-batch if none was given, and refuse one that does not fit.

    Args:
        resumed: the folder of a resumed run, which keeps its micro-batch.
    """
    device = next(learner.parameters()).device
    per_process = -(-settings.tasks // processes.world)  # the most tasks that one process has
    free = free_bytes(device)
    requested = min(settings.micro_batch or per_process, per_process)
    per_task, fixed, fits, surely = 1, 0, requested, False
    if free is not None:
        if device.type != "cuda":
            free //= processes.local_world
        one = max(meta_step_bytes(learner, tasks, settings, 1), 1)
        # what is fixed is needed once, so as many of one are too many rather than too few
        surely = requested == 1 or one * requested <= _SHARE * free
        per_task, most = one, per_process
        if not surely:
            # an accelerator's memory is taken in large pieces, so two tasks say little about many
            count = max(2, int(_SHARE * free / one)) if device.type == "cuda" else 2
            per_task, most = _further(learner, tasks, settings, one, count)
        fixed = max(one - per_task, 0)
        fits = min(int((_SHARE * free - fixed) / per_task), most)
        if device.type == "cuda" and settings.micro_batch is None and fits < per_process:
            fits = recorded_at_once(fits, per_process)
    fits = processes.least(fits, device)  # the same in all, so that sums round alike
    if fits < 1 or (settings.micro_batch is not None and fits < requested):
        least = requested if fits >= 1 else 1
        need = f"{least} task(s) at once need about {_size(fixed + per_task * least)} and " + (
            "less" if free is None else _size(free)
        )
        if resumed is not None:
            raise TrainingError(
                f"{need} is free. The run takes {requested} tasks at a time: free some memory, "
                "or choose another number, which rounds sums differently (ibaml train "
                f"--resume {resumed} --micro-batch {max(fits, 1)})"
            )
        raise TrainingError(f"{need} is free: lower {what_to_lower(settings)}")
    chosen = min(requested, fits)
    notes = []
    if chosen < per_process:
        notes = [f"the {per_process} tasks of an iteration run {chosen} at a time"]
    if free is not None:
        notes.append(
            f"execution: {learner.strategy}; memory: {'at most' if surely else 'about'} "
            f"{_size(fixed + per_task * chosen)} for "
            f"{chosen} task(s) at once, {_size(free)} free"
        )
    return Fit(chosen, tuple(notes))


def recorded_at_once(fits: int, tasks: int) -> int:
    """The micro-batch of recorded meta-steps where so many tasks fit. The last tasks of an
    iteration, if they are fewer, are a recording of their own, kept beside the others'."""
    return max((n for n in range(1, fits + 1) if n + tasks % n <= fits), default=0)


def _further(
    learner: MetaLearner, tasks: TaskSource, settings: Settings, one: int, count: int
) -> tuple[int, int]:
    """The bytes of each further task, and the most tasks that may be tried: 1 if memory runs out
    with ``count``."""
    try:
        several = meta_step_bytes(learner, tasks, settings, count)
    except OutOfMemory:
        return one, 1
    return max((several - one) // (count - 1), 1), settings.tasks


def meta_step_bytes(learner: MetaLearner, tasks: TaskSource, settings: Settings, count: int) -> int:
    """The measured peak memory of a meta-step over ``count`` tasks, with its recording."""
    device = next(learner.parameters()).device
    learner.eval()  # leaves running statistics alone
    batches = tasks.batches("train", range(count))
    calls = WARM_UPS + 1 if device.type == "cuda" else 1  # the last is recorded, if any is

    def meta_gradient() -> None:
        for batch in batches * calls:
            learner(batch, torch.Generator().manual_seed(0)).backward()

    lacking = ""
    try:
        for batch in batches:
            learner.runner_for(batch)  # happens once in a run, so it is not measured
        return held_bytes(meta_gradient, device)
    except Exception as error:
        if not out_of_memory(error):
            raise
        lacking = first_line(error)
    finally:
        learner.train()
        if lacking or device.type == "cuda":
            release(learner)
        for p in learner.parameters():
            p.grad = None
    raise OutOfMemory(
        f"{count} task(s) do not fit into memory ({lacking}): lower {what_to_lower(settings)}"
    )


def release(learner: MetaLearner) -> None:
    """Give back the memory of a meta-step that failed, and of recorded ones."""
    for p in learner.parameters():
        p.grad = None
    learner.forget_recordings()
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def _size(count: float) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"
