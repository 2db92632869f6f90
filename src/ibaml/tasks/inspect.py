"""What is wrong with a dataset? Small classes, duplicates and leaks, found before training."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
import torch

from ibaml.tasks.dataset import Dataset
from ibaml.tasks.episodes import Episodes


@dataclass(frozen=True)
class Findings:
    """What `inspect_dataset` found; a clean dataset leaves all of it empty.

    Attributes:
        small: classes with fewer examples than an episode needs, with their counts.
        duplicates: pairs of equal examples in one split, as rows.
        leaks: pairs of equal examples in different splits, as rows.
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
    """Look for what spoils episodes that need ``need`` examples per class."""
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


def nearest_centroid(
    data: Dataset, split: str, ways: int, shots: int, queries: int = 15, episodes: int = 400
) -> np.ndarray:
    """Accuracy of the nearest class centroid on raw examples, one number for each of the episodes
    0 … episodes − 1. Any learner must beat it. Above chance, labels and images belong together."""
    drawn = Episodes(data, split, ways, shots, queries, normalize=False)
    right = []
    for first in range(0, episodes, 20):
        batch = drawn.batch(range(first, min(first + 20, episodes)))
        centers = batch.support_x.unflatten(1, (ways, shots)).mean(2).flatten(2)
        guesses = torch.cdist(batch.query_x.flatten(2), centers).argmin(-1)
        right.append((guesses == batch.query_y).double().mean(1))
    return torch.cat(right).numpy()
