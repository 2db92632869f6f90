"""Which runs are measured, and how long?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ibaml.fields import chosen, setting

# what a name stands for, as settings of `ibaml train`
RUNS: dict[str, dict[str, Any]] = {
    "head": {},
    "all": {"adapt": "all"},
    "maml": {"method": "maml"},
    "fomaml": {"method": "fomaml"},
    "reptile": {"method": "reptile"},
    "imaml": {"method": "imaml"},
    "abml": {"method": "abml"},
    "imaml-all": {"method": "imaml", "adapt": "all"},
}
_WHAT, _HOW = "Which runs", "How they are measured"


@dataclass(frozen=True)
class SpeedOptions:
    """Runs of the shipped defaults, and the part of them that is timed."""

    data: str = setting(
        "photographs", "photographs (generated, 84×84), vectors (generated, 1,280 numbers), or "
        "what `ibaml train --data` takes.", _WHAT,
    )  # fmt: skip
    methods: tuple[str, ...] = setting(
        ("head", "all", "maml"), "Runs: head (`ibaml train` as it is), all (with --adapt all), "
        "imaml-all, or a method by its name.", _WHAT, choices=tuple(RUNS), shown="head,all,maml",
    )  # fmt: skip
    shots: tuple[int, ...] = setting((1, 5), "Support examples per class.", _WHAT, least=1)
    tasks: tuple[int, ...] = setting(
        (), "Tasks per meta-iteration; several numbers give several rows.", _WHAT, least=1,
        shown="that of `ibaml train`",
    )  # fmt: skip
    train_ways: int | None = setting(
        None, "Classes per training task.", _WHAT, least=2, shown="that of `ibaml train`"
    )
    images: int = setting(3000, "Number of generated photographs.", _WHAT, least=1300)
    skip: int | None = setting(
        None, "Iterations before the first that is timed.", _HOW, least=1, shown="200; CPU 5"
    )
    iterations: int | None = setting(
        None, "Iterations that are timed.", _HOW, least=1, shown="200; CPU 10"
    )
    alone: int | None = setting(
        None, "Meta-steps that are timed alone; 0: none.", _HOW, least=0, shown="60; CPU 6"
    )
    evaluate: int = setting(
        0, "Test tasks of an evaluation that is timed after each run (1000 in `ibaml evaluate`).",
        _HOW, least=0,
    )  # fmt: skip
    start: bool = setting(
        False, "Also time the command up to its first step, the first time and again.", _HOW
    )
    device: str = setting("auto", "Device: auto, cpu, cuda or cuda:N.", _HOW)
    threads: int | None = setting(None, "CPU threads.", _HOW, least=1, shown="torch's")

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> SpeedOptions:
        """Options as given, checked; several values may be one text with commas."""
        return cls(**chosen(cls, given))
