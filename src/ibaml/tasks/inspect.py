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
    rows_of: dict[bytes, list[int]] = {}
    for row in range(len(data.examples)):
        content = np.ascontiguousarray(data.examples[row]).tobytes()
        rows_of.setdefault(hashlib.blake2b(content, digest_size=16).digest(), []).append(row)
    duplicates, leaks = [], []
    for rows in rows_of.values():
        first: dict[str | None, int] = {}
        for row in rows:
            split = home.get(int(data.labels[row]))
            if split in first:
                duplicates.append((first[split], row))
                continue
            first[split] = row
        assigned = [row for split, row in first.items() if split is not None]
        leaks += [(assigned[0], row) for row in assigned[1:]]
    unassigned = tuple(c for i, c in enumerate(data.classes) if i not in home)
    return Findings(small, tuple(duplicates), tuple(leaks), unassigned)
