"""How is a run judged? On which tasks, and with which predictions?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ibaml.fields import chosen, setting
from ibaml.kinds import QUERIES
from ibaml.words import NORM_STATS

_TASKS, _HOW = "Which tasks", "How predictions are made"


@dataclass(frozen=True)
class Protocol:
    """How a run is judged: which tasks, and how predictions are made.

    Attributes:
        norm_stats: None evaluates twice: with the statistics that ``learner.adapt`` uses, and with
            the literature's transductive statistics of the batch.
    """

    tasks: int = setting(1000, "Number of tasks.", _TASKS, least=1)
    split: str = setting("test", "Split: train, val or test.", _TASKS)
    queries: int | None = setting(
        None, "Queries per class (regression: per task).", _TASKS, least=1,
        shown=f"{QUERIES}; a table: all other rows",
    )  # fmt: skip
    ways: int | None = setting(
        None, "Classes per task, if other than the run's (needs --tie-head).", _TASKS, least=2
    )
    shots: int | None = setting(None, "Shots, if other than the run's.", _TASKS, least=1)
    first_rows: bool | None = setting(
        None, "Table: learn from first rows, or (--no-first-rows) from random ones.", _TASKS,
        shown="as in training",
    )  # fmt: skip
    data: str | None = setting(None, "Dataset, if other than the run's.", _TASKS)
    root: str | None = setting(None, "Folder of that dataset's files.", _TASKS)
    steps: int | None = setting(None, "Steps of adaptation.", _HOW, least=0, shown="the run's")
    samples: int = setting(10, "Monte-Carlo samples per prediction.", _HOW, least=1)
    norm_stats: str | None = setting(
        None, "Batch norm's statistics: running, support, or batch (transductive).", _HOW,
        choices=NORM_STATS, shown="what learner.adapt uses, and batch beside it",
    )  # fmt: skip
    which: str = setting(
        "best", "Weights: best (on the validation tasks) or last.", _HOW, choices=("best", "last")
    )
    batch: int | None = setting(
        None, "Tasks in memory at once.", _HOW, least=1, shown="as many as fit; CPU 16"
    )
    device: str = setting("auto", "Device: auto, cpu, cuda or cuda:N.", _HOW)

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Protocol:
        """A protocol from the given options, checked."""
        return cls(**chosen(cls, given))
