"""How is a run judged: by which tasks, and how are predictions made?"""

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
        norm_stats: None takes what a person gets from ``learner.adapt`` and, beside it, the
            literature's transductive statistics of the batch.
    """

    tasks: int = setting(1000, "Tasks to judge by.", _TASKS, least=1)
    split: str = setting("test", "train, val or test.", _TASKS)
    queries: int | None = setting(
        None, "Queries a class (or a task).", _TASKS, least=1,
        shown=f"{QUERIES}; a table: all other rows",
    )  # fmt: skip
    ways: int | None = setting(None, "Other ways than the run's (tied head).", _TASKS, least=2)
    shots: int | None = setting(None, "Other shots than the run's.", _TASKS, least=1)
    data: str | None = setting(None, "Another dataset than the run's.", _TASKS)
    root: str | None = setting(None, "Where that dataset's files lie.", _TASKS)
    steps: int | None = setting(
        None, "Other steps of adaptation than in training.", _HOW, least=0, shown="the run's"
    )
    samples: int = setting(10, "Monte-Carlo samples of a prediction.", _HOW, least=1)
    norm_stats: str | None = setting(
        None, "Batch norm's statistics: running, support, or batch (transductive).", _HOW,
        choices=NORM_STATS, shown="what learner.adapt uses, and batch beside it",
    )  # fmt: skip
    which: str = setting(
        "best", "best (on the validation tasks) or last weights.", _HOW, choices=("best", "last")
    )
    batch: int = setting(16, "Tasks at once in memory.", _HOW, least=1)
    device: str = setting("auto", "auto, cpu, cuda or cuda:N.", _HOW)

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Protocol:
        """A protocol from what was given, checked."""
        return cls(**chosen(cls, given))
