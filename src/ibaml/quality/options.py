"""What is compared, on which tasks, and for how long?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ibaml.fields import chosen, setting
from ibaml.quality.arms import ARMS, USUAL
from ibaml.words import BACKBONES, NORM_STATS

_WHAT, _TRAIN, _JUDGE, _RUN = "What is compared", "Training", "Judging", "Run"
QUICK: dict[str, Any] = {
    "arms": ("ours", "point", "maml", "protonet", "r2d2"), "shots": (1,), "seeds": 1,
    "channels": 8, "image_size": 28, "queries": 5, "train_tasks": 800, "tasks": 8,
    "validations": 5, "val_tasks": 60, "test_tasks": 200, "tune": False,
}  # fmt: skip


def _each_once(names: Sequence[str]) -> str | None:
    return None if len(set(names)) == len(names) else "must name each once"


@dataclass(frozen=True)
class QualityOptions:
    """A comparison of methods on one dataset."""

    arms: tuple[str, ...] = setting(
        USUAL, f"Methods: {', '.join(ARMS)}. Differences are to the first.", _WHAT,
        choices=tuple(ARMS), check=_each_once, shown=",".join(USUAL),
    )  # fmt: skip
    shots: tuple[int, ...] = setting(
        (1, 5), "Examples per class; several numbers give several tables.", _WHAT, least=1,
        shown="1,5",
    )  # fmt: skip
    ways: int = setting(5, "Classes per task.", _WHAT, least=2)
    seeds: int = setting(3, "Seeds of iBaML and point; the others have one.", _WHAT, least=1)
    tune: bool = setting(
        True, "Choose each method's settings from a small list, by the nll of validation classes.",
        _WHAT,
    )  # fmt: skip
    root: str | None = setting(None, "As for `ibaml train`.", _WHAT)
    splits: str | None = setting(None, "As for `ibaml train`.", _WHAT)
    image_size: int | None = setting(None, "As for `ibaml train`.", _WHAT, least=4)
    model: str | None = setting(None, "As for `ibaml train`.", _TRAIN, choices=tuple(BACKBONES))
    channels: int | None = setting(None, "As for `ibaml train`.", _TRAIN, least=1)
    train_tasks: int = setting(
        32_000, "Training tasks, the same number for every method.", _TRAIN, least=1
    )
    tasks: int = setting(16, "Tasks per meta-iteration.", _TRAIN, least=1)
    queries: int = setting(15, "Queries per class in training.", _TRAIN, least=1)
    pretrain: int = setting(0, "Epochs of pre-training, shared by all methods.", _TRAIN, least=0)
    augment: bool = setting(False, "Flip and shift training images.", _TRAIN)
    rotations: bool = setting(False, "Quarter turns of training classes as new ones.", _TRAIN)
    ema: float | None = setting(None, "As for `ibaml train`.", _TRAIN, above=0, most=1, shown="off")
    weight_decay: float = setting(0.0, "As for `ibaml train`.", _TRAIN, least=0)
    validations: int = setting(20, "Points of the learning curves.", _JUDGE, least=1)
    val_tasks: int = setting(
        300, "Validation tasks that choose settings and temperatures.", _JUDGE, least=1
    )
    test_tasks: int = setting(1000, "Test tasks.", _JUDGE, least=2)
    test_queries: int = setting(15, "Queries per class in the test.", _JUDGE, least=1)
    norm_stats: str | None = setting(
        None, "Batch norm's statistics in validation and test.", _JUDGE, choices=NORM_STATS,
        shown="running, and support where layers are adapted",
    )  # fmt: skip
    minutes: float | None = setting(
        None, "Stop after so many, inside a run too; the same command goes on.", _RUN, above=0
    )
    quick: bool = setting(False, "A small comparison, for minutes on two cores.", _RUN)
    device: str = setting("auto", "Device: auto, cpu, cuda or cuda:N.", _RUN)
    precision: str = setting("full", "As for `ibaml train`.", _RUN, choices=("full", "bfloat16"))
    threads: int | None = setting(None, "CPU threads.", _RUN, least=1, shown="torch's")

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> QualityOptions:
        """Options as given, checked; several values may be one text with commas. What ``quick``
        makes small may still be given."""
        found = chosen(cls, given)
        return cls(**{**(QUICK if found.get("quick") else {}), **found})
