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
    """The micro-batch, and what to tell of it."""

    micro_batch: int
    notes: tuple[str, ...]


def fit_memory(
    learner: MetaLearner,
    tasks: TaskSource,
    settings: Settings,
    processes: Processes,
    resumed: str | None = None,
) -> Fit:
    """Estimate a meta-step's memory from one task and two; choose the micro-batch where none was
    given, and refuse what cannot fit.

    Args:
        resumed: the folder of a run that goes on, whose micro-batch stays the same.
    """
    device = next(learner.parameters()).device
    per_process = -(-settings.tasks // processes.world)  # the most that one process has
    free = free_bytes(device)
    requested = min(settings.micro_batch or per_process, per_process)
    per_task, fixed, fits = 1, 0, requested
    if free is not None:
        if device.type != "cuda":
            free //= processes.local_world
        one = meta_step_bytes(learner, tasks, settings, 1)
        two = meta_step_bytes(learner, tasks, settings, 2) if requested > 1 else 2 * one
        per_task = max(two - one, 1)
        fixed = max(one - per_task, 0)
        fits = int((0.9 * free - fixed) / per_task)
    fits = processes.least(fits, device)  # the same in all: sums are rounded alike
    if fits < 1 or (settings.micro_batch is not None and fits < requested):
        least = requested if fits >= 1 else 1
        need = f"{least} task(s) at once need about {_size(fixed + per_task * least)} and " + (
            "less" if free is None else _size(free)
        )
        if resumed is not None:
            raise TrainingError(
                f"{need} is free. The run goes through {requested} at a time: free some memory, "
                "or choose another number, whose sums are rounded differently (ibaml train "
                f"--resume {resumed} --micro-batch {max(fits, 1)})"
            )
        raise TrainingError(f"{need} is free: lower {what_to_lower(settings)}")
    chosen = min(requested, fits)
    notes = [f"{per_process} tasks go through {chosen} at a time"] if chosen < per_process else []
    if free is not None:
        notes.append(
            f"execution: {learner.strategy}; memory: about {_size(fixed + per_task * chosen)} for "
            f"{chosen} task(s) at once, {_size(free)} free"
        )
    return Fit(chosen, tuple(notes))


def meta_step_bytes(learner: MetaLearner, tasks: TaskSource, settings: Settings, count: int) -> int:
    """The peak of a meta-step over so many tasks, as it is measured."""
    learner.eval()  # no statistics
    batches = tasks.batches("train", range(count))

    def meta_gradient() -> None:
        for batch in batches:
            learner(batch, torch.Generator().manual_seed(0)).backward()

    try:
        for batch in batches:
            learner.runner_for(batch)  # done once, so it is not to be measured
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
