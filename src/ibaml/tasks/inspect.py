"""What is wrong with a dataset before one trains on it: small classes, duplicates, leaks."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np

from ibaml.tasks.dataset import Dataset


@dataclass(frozen=True)
class Findings:
    """What `inspect_dataset` found; all empty is a clean dataset.

    Attributes:
        small: classes with fewer examples than an episode needs, with their counts.
        duplicates: pairs of equal examples in one split (their rows).
        leaks: pairs of equal examples in different splits.
        unassigned: classes in no split.
    """

    small: tuple[tuple[str, int], ...]
    duplicates: tuple[tuple[int, int], ...]
    leaks: tuple[tuple[int, int], ...]
    unassigned: tuple[str, ...]

    @property
    def serious(self) -> bool:
        return bool(self.leaks)


def inspect_dataset(data: Dataset, need: int) -> Findings:
    """Look for what spoils episodes that need ``need`` examples of a class."""
    home = {c: split for split, members in data.splits.items() for c in members}
    small = tuple(
        (data.classes[c], data.count(c)) for c in range(len(data.classes)) if data.count(c) < need
    )
    first: dict[bytes, int] = {}
    duplicates, leaks = [], []
    for row in range(len(data.examples)):
        content = np.ascontiguousarray(data.examples[row]).tobytes()
        digest = hashlib.blake2b(content, digest_size=16).digest()
        if digest not in first:
            first[digest] = row
            continue
        pair = (first[digest], row)
        splits = [home.get(int(data.labels[r])) for r in pair]
        if splits[0] == splits[1]:
            duplicates.append(pair)
        elif None not in splits:
            leaks.append(pair)
    unassigned = tuple(c for i, c in enumerate(data.classes) if i not in home)
    return Findings(small, tuple(duplicates), tuple(leaks), unassigned)
