"""What is asked of a comparison of simple heads? On which tasks, and which heads?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ibaml.fields import chosen, setting

HEADS = {
    "centroid": "nearest centroid",
    "protonet": "protonet",
    "logistic": "logistic regression",
    "ridge": "ridge (R2-D2)",
    "gp": "GP on ±1 (DKT)",
    "one-vs-each": "one-vs-each GP",
    "lda": "LDA + centroid",
    "lda-logistic": "LDA + logistic",
    "plda": "PLDA",
}
_TASKS, _WHAT = "Which tasks", "What is compared"


@dataclass(frozen=True)
class HeadsOptions:
    """Which tasks, and which heads; ``heads`` is empty for all whose cost is bearable."""

    splits: str | None = setting(
        None, "JSON file of train, val and test classes.", _TASKS, shown="by a hash of the name"
    )
    ways: int = setting(10, "Classes per task.", _TASKS, least=2)
    shots: tuple[int, ...] = setting(
        (1, 2, 5, 10), "Examples per class; several numbers give several tables.", _TASKS,
        least=1, shown="1,2,5,10",
    )  # fmt: skip
    queries: int = setting(15, "Queries per class.", _TASKS, least=1)
    tasks: int = setting(500, "Test tasks.", _TASKS, least=1)
    val_tasks: int = setting(
        100, "Validation tasks, for hyper-parameters and temperatures.", _TASKS, least=1
    )
    heads: tuple[str, ...] = setting(
        (), f"Simple heads: {', '.join(HEADS)}.", _WHAT, choices=tuple(HEADS),
        shown="all; one-vs-each for small tasks",
    )  # fmt: skip
    samples: int = setting(
        10, "Monte-Carlo samples per prediction of a --run that draws.", _WHAT, least=1
    )
    device: str = setting("auto", "Device: auto, cpu, cuda or cuda:N.", _WHAT)

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> HeadsOptions:
        """Options as given, checked; several values may be one text with commas."""
        return cls(**chosen(cls, given))
