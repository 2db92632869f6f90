"""How many tasks fit into memory at once?"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ibaml.learner import MetaLearner
from ibaml.machine import free_bytes
from ibaml.tasks import TaskSource
from ibaml.training.faults import TrainingError, first_line, out_of_memory, what_to_lower
from ibaml.training.memory import peak_bytes
from ibaml.training.processes import Processes
from ibaml.training.settings import Settings


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
    """Estimate a meta-step's memory from one task and from two. Choose the micro-batch if none was
    given, and refuse one that does not fit.

    Args:
        resumed: the folder of a resumed run, which keeps its micro-batch.
    """
    device = next(learner.parameters()).device
    mine = -(-settings.tasks // processes.world)  # the most tasks that one process has
    free = free_bytes(device)
    wanted = min(settings.micro_batch or mine, mine)
    each, fixed, fits = 1, 0, wanted
    if free is not None:
        if device.type != "cuda":
            free //= processes.local_world
        one = meta_step_bytes(learner, tasks, settings, 1)
        two = meta_step_bytes(learner, tasks, settings, 2) if wanted > 1 else 2 * one
        each = max(two - one, 1)
        fixed = max(one - each, 0)
        fits = int((0.9 * free - fixed) / each)
    fits = processes.least(
        fits, device
    )  # the same in all processes, so that sums are rounded alike
    if fits < 1 or (settings.micro_batch is not None and fits < wanted):
        least = wanted if fits >= 1 else 1
        need = f"{least} task(s) at once need about {_size(fixed + each * least)} and " + (
            "less" if free is None else _size(free)
        )
        if resumed is not None:
            raise TrainingError(
                f"{need} is free. The run takes {wanted} tasks at a time: free some memory, or "
                "choose another number, which rounds sums differently (ibaml train "
                f"--resume {resumed} --micro-batch {max(fits, 1)})"
            )
        raise TrainingError(f"{need} is free: lower {what_to_lower(settings)}")
    chosen = min(wanted, fits)
    notes = [f"the {mine} tasks of an iteration run {chosen} at a time"] if chosen < mine else []
    if free is not None:
        notes.append(
            f"execution: {learner.strategy}; memory: about {_size(fixed + each * chosen)} for "
            f"{chosen} task(s) at once, {_size(free)} free"
        )
    return Fit(chosen, tuple(notes))


def meta_step_bytes(learner: MetaLearner, tasks: TaskSource, settings: Settings, count: int) -> int:
    """The measured peak memory of a meta-step over ``count`` tasks."""
    learner.eval()  # leaves running statistics alone
    batches = tasks.batches("train", range(count))

    def meta_gradient() -> None:
        for batch in batches:
            learner(batch, torch.Generator().manual_seed(0)).backward()

    try:
        for batch in batches:
            learner.examine(batch)  # happens once in a run, so it is not measured
        return peak_bytes(meta_gradient, next(learner.parameters()).device)
    except Exception as error:
        if not out_of_memory(error):
            raise
        raise TrainingError(
            f"{count} task(s) do not fit into memory ({first_line(error)}): lower "
            f"{what_to_lower(settings)}"
        ) from error
    finally:
        for p in learner.parameters():
            p.grad = None
        learner.train()


def _size(count: float) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"
