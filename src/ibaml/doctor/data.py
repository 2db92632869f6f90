"""What is wrong with the data? Examples in two splits, queries in the support set, targets that
have nothing to do with their inputs."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ibaml.seeding import mix
from ibaml.tasks import Dataset, EpisodeTasks, Table, TableTasks, TaskBatch, TaskSource
from ibaml.tasks.inspect import inspect_dataset

Pairs = Counter[tuple[str, str]]  # how many examples two classes share

_PERMUTATIONS = 200
_FEW_NUMBERS = 4  # equal inputs of so few numbers are no surprise


@dataclass(frozen=True)
class Leak:
    """Equal examples (or rows of tables) in the training split and in another.

    Attributes:
        split: the other split.
        share: how much of it is in the training split too.
        pairs: classes (or tasks) that share examples, (in training, in the other split, how many),
            those that share most first.
    """

    split: str
    share: float
    pairs: tuple[tuple[str, str, int], ...] = ()


@dataclass(frozen=True)
class Association:
    """Whether targets go with inputs, within tasks.

    For every query, the target of its nearest support example is compared with those of the others.
    If targets have nothing to do with inputs, no order of the queries' targets is special, so the
    observed mean is one of its values under random orders.

    Attributes:
        z: how many deviations of random orders the observed mean is above theirs.
        share: how much nearer the target of the nearest example is, relative to the others'.
    """

    z: float
    share: float


def leaks(tasks: TaskSource) -> tuple[Leak, ...]:
    """Where validation and test data are in the training data too, byte by byte."""
    if isinstance(tasks, EpisodeTasks):
        return _leaking_examples(tasks.data)
    if isinstance(tasks, TableTasks):
        return _leaking_tasks(tasks.table)
    return ()


def _leaking_examples(data: Dataset) -> tuple[Leak, ...]:
    home = {c: split for split, members in data.splits.items() for c in members}
    found: dict[str, Pairs] = {}
    for first, second in inspect_dataset(data, 1).leaks:
        a, b = int(data.labels[first]), int(data.labels[second])
        if "train" in (home[a], home[b]):
            train, held = (a, b) if home[a] == "train" else (b, a)
            found.setdefault(home[held], Counter())[data.classes[train], data.classes[held]] += 1
    sizes = {split: sum(data.count(c) for c in data.splits[split]) for split in found}
    return _counted(found, sizes)


def _leaking_tasks(table: Table) -> tuple[Leak, ...]:
    """Tasks with the same rows, in whatever order."""

    def digests(split: str) -> dict[bytes, str]:
        by_content = {}
        for t in table.splits.get(split, ()):
            where = table.labels == t
            rows = np.column_stack([table.x[where], table.y[where]])
            content = np.ascontiguousarray(rows[np.lexsort(rows.T)]).tobytes()
            by_content[hashlib.blake2b(content, digest_size=16).digest()] = table.tasks[t]
        return by_content

    trained = digests("train")
    found: dict[str, Pairs] = {}
    for split in table.splits:
        held = {} if split == "train" else digests(split)
        if twice := {(trained[d], name): 1 for d, name in held.items() if d in trained}:
            found[split] = Counter(twice)
    return _counted(found, {split: len(table.splits[split]) for split in found})


def _counted(found: Mapping[str, Pairs], sizes: Mapping[str, int]) -> tuple[Leak, ...]:
    return tuple(
        Leak(
            split,
            sum(pairs.values()) / max(1, sizes[split]),
            tuple((a, b, n) for (a, b), n in pairs.most_common(5)),
        )
        for split, pairs in sorted(found.items())
    )


def repeated(batches: Sequence[TaskBatch]) -> float:
    """The share of the queries whose input is one of their task's support set."""
    if batches[0].support_x[0, 0].numel() <= _FEW_NUMBERS:
        return 0.0
    hits = [
        torch.tensor([
            [bool((s == q).flatten(1).all(1).any()) for q in queries]
            for s, queries in zip(batch.support_x, batch.query_x, strict=True)
        ])
        for batch in batches
    ]  # fmt: skip
    return float(torch.cat([h.flatten() for h in hits]).double().mean())


def association(batches: Sequence[TaskBatch]) -> Association:
    """Whether targets go with inputs in these tasks."""
    rng = np.random.default_rng(mix(0, 17))
    observed, random, scale = 0.0, np.zeros(_PERMUTATIONS), 0.0
    for batch in batches:
        for t in range(len(batch)):
            x, y = batch.support_x[t].flatten(1).double(), batch.query_x[t].flatten(1).double()
            nearest = torch.cdist(y, x).argmin(1).cpu().numpy()
            apart = _apart(batch.query_y[t], batch.support_y[t])
            mean = apart.mean(1)
            scale += mean.sum()
            orders = np.stack([rng.permutation(len(nearest)) for _ in range(_PERMUTATIONS)])
            observed += (mean - apart[np.arange(len(nearest)), nearest]).sum()
            random += (mean[orders] - apart[orders, nearest[None]]).sum(1)
    deviation = float(random.std())
    return Association(
        float(observed - random.mean()) / deviation if deviation else 0.0,
        float(observed / scale) if scale else 0.0,
    )


def _apart(queries: Tensor, support: Tensor) -> np.ndarray:
    """How far the targets of queries are from those of support examples, (M, N)."""
    if not queries.is_floating_point():
        return (queries[:, None] != support[None]).double().cpu().numpy()
    one, other = (y.double().reshape(len(y), -1) for y in (queries, support))
    return torch.cdist(one, other).cpu().numpy()
