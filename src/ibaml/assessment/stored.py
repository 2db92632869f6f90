"""What is kept of an assessment, so that nobody judges the same tasks again to look at them?

summary.json names the protocols; scores.npz has the scores of each, as ``NUMBER/FIELD``. Both may
come from anybody.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from ibaml import untrusted
from ibaml.assessment.protocol import Protocol
from ibaml.evaluation import ClassScores, RegressionScores, Scores
from ibaml.files import write_whole
from ibaml.tasks.errors import DataError
from ibaml.tasks.npz import read_npz

SUMMARY, SCORES = "summary.json", "scores.npz"
_MOST = 8  # protocols in a file: batch norm has three kinds of statistics


@dataclass(frozen=True)
class Stored:
    """An assessment as its files tell it.

    Attributes:
        iteration: of the weights that were judged.
        data: the name of the data.
        target: what regression predicts, if it has a name.
        diverged: the number of tasks whose adaptation diverged, by protocol.
    """

    protocol: Protocol
    iteration: int
    data: str
    target: str | None
    scores: dict[str, Scores]
    diverged: dict[str, int]


def write_scores(scores: Mapping[str, Scores], folder: Path) -> Path:
    """Write scores.npz: numbers to seven digits, truth and keys as they are."""
    arrays: dict[str, Any] = {}
    for at, one in enumerate(scores.values()):
        for field in fields(one):
            if (value := getattr(one, field.name)) is not None:
                array = np.asarray(value)
                if array.dtype.kind == "f":
                    array = array.astype(np.float32)
                arrays[f"{at}/{field.name}"] = array
    content = io.BytesIO()
    np.savez_compressed(content, **arrays)
    write_whole(folder / SCORES, content.getvalue())
    return folder / SCORES


def read_assessment(folder: Path) -> Stored | None:
    """What `write_assessment` wrote into a folder; None if there is nothing.

    Raises:
        ValueError: the files do not belong together, or are damaged; the message names the file.
    """
    summary, stored = folder / SUMMARY, folder / SCORES
    if not summary.exists():
        return None
    if not stored.exists():
        raise DataError(f"{folder} was written before scores were kept: evaluate again")
    try:
        facts = untrusted.parsed_json(untrusted.content(summary, untrusted.DOCUMENT))
        names = [str(name) for name in facts["results"]]
        target = facts.get("target")
        protocol = Protocol.of(facts["protocol"])
        scores = {name: _scores(stored, at) for at, name in enumerate(names[:_MOST])}
        if not scores or any(s.keys != tuple(range(protocol.tasks)) for s in scores.values()):
            raise ValueError(f"it is not of the tasks 0 to {protocol.tasks - 1}")
        return Stored(
            protocol,
            int(facts["iteration"]),
            str(facts.get("data", "")),
            None if target is None else str(target),
            scores,
            {str(n): int(count) for n, count in facts["diverged"].items()},
        )
    except untrusted.Refused as error:
        raise DataError(f"{summary} {error}") from error
    except (KeyError, TypeError, AttributeError, ValueError, OverflowError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(
            f"{folder}: {SUMMARY} and {SCORES} are damaged, or not of one assessment ("
            f"{untrusted.first_line(error)}): evaluate again"
        ) from error


def _scores(file: Path, at: int) -> Scores:
    """The scores of one protocol."""
    kinds: tuple[type[ClassScores] | type[RegressionScores], ...] = (ClassScores, RegressionScores)
    for kind in kinds:
        names = [field.name for field in fields(kind)]
        found = read_npz(file, [f"{at}/{name}" for name in names])
        arrays: dict[str, Any] = {name.split("/")[1]: array for name, array in found.items()}
        if set(names) - set(arrays) <= {"groups"}:
            keys = tuple(int(key) for key in arrays.pop("keys"))
            groups = arrays.pop("groups", None)
            named = None if groups is None else tuple(str(name) for name in groups)
            scores = kind(keys=keys, groups=named, **arrays)
            scores.pooled()  # refuses a confidence that is none
            return scores
    raise DataError(f"{file} lacks scores of protocol {at}: evaluate again")
