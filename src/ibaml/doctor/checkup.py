"""What does the doctor say of a learner, or of a run? Figures, findings, one verdict."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ibaml.doctor.facts import RunFacts, run_facts
from ibaml.doctor.measure import Measured, measure
from ibaml.doctor.readings import Case
from ibaml.doctor.verdict import Finding, findings, over_thresholds
from ibaml.execution import NormStats
from ibaml.files import write_whole
from ibaml.learner import MetaLearner
from ibaml.machine import pick_device
from ibaml.tasks import TaskBatch, TaskSource
from ibaml.tasks.keyed import has_tasks
from ibaml.tasks.sources.decode import Progress
from ibaml.training.build import build_learner, build_network, open_tasks
from ibaml.training.run import Run
from ibaml.training.start import load_run

FILE = "doctor.json"
TASKS = 32
HEALTHY = "Healthy: no fault was found."
_UNSEEN = 10**9  # keys of training tasks that no run comes to


@dataclass(frozen=True)
class Checkup:
    """The result of an examination.

    Attributes:
        measured: all figures of the learner on the tasks.
        facts: those of the run, if it was one.
        split: which tasks: ``"val"``, ``"train"`` (where there are none for validation), or
            ``"given"``.
        findings: what is wrong, the cause of the rest first; empty if nothing is.
        readings: of every fault looked for, what was read over its threshold: below 1 is fine.
    """

    measured: Measured
    facts: RunFacts | None
    split: str
    findings: tuple[Finding, ...]
    readings: dict[str, float]

    @property
    def healthy(self) -> bool:
        return not self.findings

    @property
    def fault(self) -> str | None:
        """The name of the fault that the verdict is about; None if there is none."""
        return self.findings[0].fault if self.findings else None

    @property
    def verdict(self) -> str:
        """One sentence: what is wrong and what to change."""
        if not self.findings:
            return HEALTHY
        first = self.findings[0]
        sentence = f"{first.sentence}: {first.change}."
        return sentence[0].upper() + sentence[1:] if sentence[0].isascii() else sentence

    @property
    def command(self) -> str:
        """The command line that makes the change; empty where there is none."""
        return self.findings[0].command if self.findings else ""

    def to_dict(self) -> dict[str, Any]:
        """Everything as numbers, texts, lists and dictionaries, for JSON. What is not finite is
        None."""
        plain: dict[str, Any] = _plain(
            {
                "format": 1,
                "verdict": self.verdict,
                "fault": self.fault,
                "change": self.findings[0].change if self.findings else "",
                "command": self.command,
                **asdict(self),
            }
        )
        return plain

    def write(self, path: Path) -> Path:
        """Write `to_dict` as JSON, whole or not at all."""
        write_whole(path, json.dumps(self.to_dict(), indent=2) + "\n")
        return path


def check(
    learner: MetaLearner, batch: TaskBatch, *, norm_stats: NormStats | None = None
) -> Checkup:
    """Examine a learner on a batch of tasks, best tasks that it was not trained on. The learner is
    not changed; nothing is trained.

    Args:
        batch: 16 tasks or more make the figures sure; queries are used too.
        norm_stats: batch norm's statistics in predictions, see `MetaLearner.adapt`.

    >>> ibaml.check(learner, batch).verdict                                       # doctest: +SKIP
    'Healthy: no fault was found.'
    """
    if not isinstance(batch, TaskBatch):
        raise TypeError(f"a TaskBatch is needed, got {type(batch).__name__}")
    if len(batch) < 2:
        raise ValueError("check needs two tasks or more: intervals are over tasks")
    measured = measure(learner, [batch], norm_stats=norm_stats)
    case = Case(measured)
    return Checkup(measured, None, "given", findings(case), over_thresholds(case))


def examine(
    run: Run,
    *,
    tasks: int = TASKS,
    norm_stats: NormStats | None = None,
    which: str = "best",
    device: str = "auto",
    on_measure: Callable[[str], None] = lambda what: None,
    progress: Progress | None = None,
) -> Checkup:
    """Examine a run on validation tasks (training tasks it has not seen, if it has none). Test
    tasks are not looked at; test *data* only to see whether they are in the training data too.

    Args:
        norm_stats: the statistics that predictions are to use; None is what `adapt` uses.
        which: the run's ``"best"`` or ``"last"`` weights. A run without any is judged at its start.
        on_measure: called with what is measured next.
    """
    if tasks < 2:
        raise ValueError(f"tasks must be 2 or more (intervals are over tasks), got {tasks}")
    source = open_tasks(run.settings, pick_device(device), progress)
    learner, step = _learner(run, which, source, device)
    split = "val" if has_tasks(source, "val") else "train"
    keys = range(tasks) if split == "val" else range(_UNSEEN, _UNSEEN + tasks)
    measured = measure(
        learner, source.batches(split, keys), norm_stats=norm_stats, progress=on_measure
    )
    on_measure("the run")
    facts = run_facts(run, learner, step, source)
    case = Case(measured, facts, run.settings, str(run.path))
    return Checkup(measured, facts, split, findings(case), over_thresholds(case))


def _learner(run: Run, which: str, source: TaskSource, device: str) -> tuple[MetaLearner, int]:
    """The run's learner, at its start if it ended before it saved anything."""
    if run.best.exists() or run.saved():
        return load_run(run, which, pick_device(device))
    network = build_network(run.settings, source.example_shape)
    return build_learner(run.settings, network).eval().to(pick_device(device)), 0


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(name): _plain(one) for name, one in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_plain(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
