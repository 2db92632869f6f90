"""What does a run's folder say? How far it is, how validation went, how fast it was, and whether
its data are in two splits."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

import torch

from ibaml.doctor.data import Leak, leaks
from ibaml.learner import MetaLearner
from ibaml.tasks import TaskSource
from ibaml.training.run import Run
from ibaml.training.watch import read_log

_TIMED = 3  # meta-steps, of which the fastest counts


@dataclass(frozen=True)
class RunFacts:
    """What a run's folder and its data say.

    Attributes:
        step, iterations: of the weights that are judged, and how many the run is to have.
        trained: how many iterations the log has.
        validation: the nll at every validation, (iteration, nll).
        left_out: the share of the training tasks that were left out, over the logged iterations.
        unsolved: the mean share of unsolved linear systems in them; None if there are none.
        rate: training tasks a second as logged, medians; None if the log is too short.
        own_rate: tasks a second of the meta-step alone, on this machine now.
        leaks: validation and test data that are in the training data too.
    """

    step: int
    iterations: int
    trained: int
    validation: tuple[tuple[int, float], ...]
    left_out: float
    unsolved: float | None
    rate: float | None
    own_rate: float | None
    leaks: tuple[Leak, ...]


def run_facts(run: Run, learner: MetaLearner, step: int, source: TaskSource) -> RunFacts:
    """The facts of a run whose weights of iteration ``step`` are in the learner."""
    lines = read_log(run.path / "log.jsonl")
    steps = [line for line in lines if "tasks" in line and "left_out" in line]
    curve = [(int(line["step"]), _number(line["val_nll"])) for line in lines if "val_nll" in line]
    total = sum(_number(line["tasks"], 0.0) for line in steps)
    unsolved = [_number(line["unsolved"], 0.0) for line in steps if "unsolved" in line]
    return RunFacts(
        step=step,
        iterations=run.settings.iterations,
        trained=max((int(line.get("step", 0)) for line in lines), default=0),
        validation=tuple(curve),
        left_out=sum(_number(line["left_out"], 0.0) for line in steps) / total if total else 0.0,
        unsolved=sum(unsolved) / len(unsolved) if unsolved else None,
        rate=_logged_rate(lines, run.settings.tasks),
        own_rate=own_rate(learner, source, run.settings.tasks) if run.settings.iterations else None,
        leaks=leaks(source),
    )


def own_rate(learner: MetaLearner, source: TaskSource, tasks: int) -> float:
    """Tasks a second of the meta-step with its gradient, the tasks being in memory already."""
    learner = learner.replace().eval()
    batches = source.batches("train", range(tasks))
    spent = []
    for _ in range(1 + _TIMED):  # the first warms up
        began = time.perf_counter()
        for batch in batches:
            loss = learner(batch, torch.Generator().manual_seed(0))
            torch.autograd.grad(loss, list(learner.parameters()), allow_unused=True)
        if loss.is_cuda:
            torch.cuda.synchronize(loss.device)
        spent.append(time.perf_counter() - began)
    return tasks / max(min(spent[1:]), 1e-9)


def _logged_rate(lines: list[dict[str, Any]], tasks: int) -> float | None:
    """Tasks a second between lines of the log that no validation and no restart lie between."""
    rates = []
    for one, other in pairwise(lines):
        if "loss" in one and "loss" in other:
            steps = other["step"] - one["step"]
            seconds = _number(other.get("seconds")) - _number(one.get("seconds"))
            if steps > 0 and seconds > 0:
                rates.append(steps * tasks / seconds)
    return median(rates) if rates else None


def _number(value: Any, otherwise: float = math.nan) -> float:
    """A number of a log that somebody else may have written."""
    fine = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if fine else otherwise
