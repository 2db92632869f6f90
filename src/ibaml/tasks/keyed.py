"""Which tasks have these keys? Training and evaluation ask this of every kind of data.

Training tasks depend on the run's seed. Validation and test tasks do not, so that all runs are
judged on the same ones.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple, Protocol

import numpy as np
import torch

from ibaml.tasks.augment import Augment
from ibaml.tasks.batch import TaskBatch
from ibaml.tasks.dataset import Dataset
from ibaml.tasks.episodes import Episodes
from ibaml.tasks.errors import DataError
from ibaml.tasks.synthetic import Sinusoids
from ibaml.tasks.table import Table


class Target(NamedTuple):
    """What regression predicts: its name, and its own units in one standardized unit."""

    name: str
    unit: float


class TaskSource(Protocol):
    """A source of tasks: the same key always gives the same task."""

    @property
    def name(self) -> str: ...

    @property
    def digest(self) -> str:
        """A digest of the data, so that a run can say what it was trained on."""

    @property
    def example_shape(self) -> tuple[int, ...]:
        """The shape of one input."""

    @property
    def ways(self) -> int | None:
        """Classes of a task; None for regression."""

    @property
    def target(self) -> Target | None:
        """What is predicted, if it has a name and units."""

    def batches(self, split: str, keys: Sequence[int]) -> list[TaskBatch]:
        """The tasks of these keys, with tasks of the same size in one batch. Task ``key`` is a pure
        function of (seed, split, key)."""

    def groups(self, split: str, keys: Sequence[int]) -> tuple[str, ...] | None:
        """The name of the group that each key's task is drawn from (a country in a table), if keys
        may share one; None if every key gives a task of its own."""


def _seed(split: str, seed: int) -> int:
    return seed if split == "train" else 0


@dataclass(frozen=True)
class EpisodeTasks:
    """W-way episodes from a dataset. ``train_ways``, ``train_shots``, ``rotations`` and ``augment``
    apply to training only. A training task of more classes has fewer queries of each, about as many
    in all."""

    data: Dataset
    ways: int = 5
    shots: int = 1
    queries: int = 15
    train_ways: int | None = None
    train_shots: int | None = None
    seed: int = 0
    rotations: bool = False
    augment: Augment | None = None
    device: torch.device | str = "cpu"
    dtype: torch.dtype = torch.float32

    target = None

    @property
    def name(self) -> str:
        return self.data.name

    @cached_property
    def digest(self) -> str:
        """A digest of the content, not of its place: classes, splits, labels, and examples (a large
        dataset's at even steps)."""
        data = self.data
        stride = 1 + data.examples.nbytes // 64_000_000
        described = (data.examples.shape, str(data.examples.dtype), data.classes, dict(data.splits))
        hashed = hashlib.sha256(repr(described).encode())
        hashed.update(np.ascontiguousarray(data.labels).tobytes())
        if data.embed is not None and data.digest:  # vectors made again differ by rounding
            hashed.update(data.digest.encode())
        else:
            hashed.update(np.ascontiguousarray(data.examples[::stride]).tobytes())
        return hashed.hexdigest()

    @property
    def example_shape(self) -> tuple[int, ...]:
        return tuple(self.data.examples.shape[1:])

    @cached_property
    def _made(self) -> dict[str, Episodes]:
        return {}

    def episodes(self, split: str) -> Episodes:
        if split not in self._made:
            train = split == "train"
            ways = (self.train_ways or self.ways) if train else self.ways
            self._made[split] = Episodes(
                self.data,
                split,
                ways,
                (self.train_shots or self.shots) if train else self.shots,
                max(1, self.queries * self.ways // ways),
                seed=_seed(split, self.seed),
                rotations=self.rotations and train,
                augment=self.augment if train else None,
                device=self.device,
                dtype=self.dtype,
            )
        return self._made[split]

    def batches(self, split: str, keys: Sequence[int]) -> list[TaskBatch]:
        return [self.episodes(split).batch(keys)]

    def groups(self, split: str, keys: Sequence[int]) -> None:
        return None


@dataclass(frozen=True)
class SinusoidTasks:
    """Sinusoids with ``shots`` examples each."""

    family: Sinusoids = field(default_factory=Sinusoids)
    shots: int = 5
    queries: int = 15
    train_shots: int | None = None
    seed: int = 0
    device: torch.device | str = "cpu"
    dtype: torch.dtype = torch.float32

    name = "sinusoids"
    example_shape = (1,)
    ways = None
    target = None

    @property
    def digest(self) -> str:
        return hashlib.sha256(repr(self.family).encode()).hexdigest()

    def batches(self, split: str, keys: Sequence[int]) -> list[TaskBatch]:
        # every split draws from its own seeds
        families = {"train": 3 * _seed(split, self.seed) + 3, "val": 1, "test": 2}
        if split not in families:
            raise DataError(f"sinusoids have no split {split!r}: train, val or test")
        seed = families[split]
        shots = (self.train_shots or self.shots) if split == "train" else self.shots
        batch = self.family.batch(seed, keys, shots, self.queries, self.dtype)
        return [batch.to(self.device)]

    def groups(self, split: str, keys: Sequence[int]) -> None:
        return None


@dataclass(frozen=True)
class TableTasks:
    """Regression tasks of a table: ``shots`` rows to learn from, the others to test on. They are
    random, or with ``first_rows`` the first ones in the order of the first feature."""

    table: Table
    shots: int = 5
    train_shots: int | None = None
    first_rows: bool = False
    seed: int = 0
    device: torch.device | str = "cpu"
    dtype: torch.dtype = torch.float32

    ways = None

    @property
    def name(self) -> str:
        return self.table.name

    @property
    def digest(self) -> str:
        content = self.table.x.tobytes() + self.table.y.tobytes()
        return hashlib.sha256(content + repr(self.table.tasks).encode()).hexdigest()

    @property
    def example_shape(self) -> tuple[int, ...]:
        return (self.table.x.shape[1],)

    @property
    def target(self) -> Target:
        return Target(self.table.target, float(self.table.spread[-1]))

    def _shots(self, split: str) -> int:
        return (self.train_shots or self.shots) if split == "train" else self.shots

    def batches(self, split: str, keys: Sequence[int]) -> list[TaskBatch]:
        batches = self.table.batches(
            split,
            keys,
            self._shots(split),
            first_rows=self.first_rows,
            seed=_seed(split, self.seed),
            dtype=self.dtype,
        )
        return [batch.to(self.device) for batch in batches]

    def groups(self, split: str, keys: Sequence[int]) -> tuple[str, ...]:
        return self.table.drawn(split, keys, self._shots(split), seed=_seed(split, self.seed))


def has_tasks(source: TaskSource, split: str) -> bool:
    """Whether a split has a task to draw (a small dataset may have too few classes in it)."""
    try:
        return bool(source.batches(split, [0]))
    except DataError:
        return False
