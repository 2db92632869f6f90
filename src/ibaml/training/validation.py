"""How good are the weights on the validation tasks, over all processes?"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from ibaml.energy import Categorical
from ibaml.evaluation import Scores
from ibaml.evaluation.at_once import ON_CPU
from ibaml.evaluation.predict import batch_for, fit_temperature, score_tasks
from ibaml.learner import MetaLearner
from ibaml.tasks import TaskSource
from ibaml.training.faults import TrainingError, first_line, out_of_memory, what_to_lower
from ibaml.training.fitting import release
from ibaml.training.processes import Processes
from ibaml.training.settings import Settings


@torch.no_grad()
def validation_scores(
    learner: MetaLearner,
    tasks: TaskSource,
    settings: Settings,
    processes: Processes,
    on_message: Callable[[str], None],
    at_once: int,
) -> dict[str, float]:
    """The nll, and accuracy or RMSE, over ``val_tasks`` tasks, ``at_once`` at a time. A fitted
    temperature is fitted on these tasks."""
    keys = processes.share(range(settings.val_tasks))
    second = "rmse" if settings.regression else "accuracy"
    sums = {"nll": 0.0, "tasks": 0.0, second: 0.0}
    for row in _rows(learner, tasks, settings, processes, keys, on_message, at_once):
        sums["nll"] += row["nll"]
        sums[second] += row["mse" if second == "rmse" else "accuracy"]
        sums["tasks"] += 1
    device = next(learner.parameters()).device
    values = torch.tensor(list(sums.values()), dtype=torch.float64, device=device)
    processes.add_up([values])
    totals = dict(zip(sums, values.tolist(), strict=True))
    count = totals.pop("tasks")
    result = {name: value / count for name, value in totals.items()}
    if second == "rmse":
        result["rmse"] = result["rmse"] ** 0.5
    if isinstance(learner.likelihood, Categorical):
        result["temperature"] = learner.likelihood.temperature
    return result


def validated_at_once(learner: MetaLearner, tasks: TaskSource, settings: Settings) -> int:
    """How many validation tasks to judge at once: as many as fit, which a CPU does not measure."""
    if learner.reference.device.type == "cpu":
        return min(settings.micro_batch or ON_CPU, ON_CPU)
    try:
        return batch_for(learner, tasks, "val")
    except Exception as error:
        if not out_of_memory(error):
            raise
    release(learner)
    return 1


def _rows(
    learner: MetaLearner,
    tasks: TaskSource,
    settings: Settings,
    processes: Processes,
    keys: Sequence[int],
    on_message: Callable[[str], None],
    at_once: int,
) -> list[dict[str, int | float]]:
    """The scores of this process's tasks, one row each."""
    likelihood = learner.likelihood
    fits = isinstance(likelihood, Categorical) and likelihood.log_fit is not None
    if not keys and not fits:
        return []
    scores: Scores | None
    while True:
        try:
            if fits:
                add_up = processes.add_up
                scores = fit_temperature(learner, tasks, "val", keys, batch=at_once, add_up=add_up)
            else:
                scores = score_tasks(learner, tasks, "val", keys, batch=at_once)
            return [] if scores is None else scores.rows()
        except FloatingPointError as error:  # later steps may recover; else `patience` ends it
            on_message(f"validation: {error}")
            return [{"nll": math.nan, "mse": math.nan, "accuracy": math.nan}]
        except Exception as error:
            if not out_of_memory(error):
                raise
            lacking = first_line(error)
        # processes that fit a temperature together have to go on together
        if at_once == 1 or (fits and processes.world > 1):
            raise TrainingError(
                f"out of memory in validation ({lacking}): lower {what_to_lower(settings)}"
            )
        release(learner)
        before, at_once = at_once, (at_once + 1) // 2
        on_message(
            f"validation: out of memory with {before} task(s) at once ({lacking}); again with "
            f"{at_once}"
        )
