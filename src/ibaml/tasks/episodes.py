"""How is an episode drawn? W classes, S shots and Q queries, as a pure function of its key."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count

import numpy as np
import torch
from torch import Tensor

from ibaml.seeding import mix
from ibaml.tasks.augment import Augment
from ibaml.tasks.batch import TaskBatch
from ibaml.tasks.converted import Converted, turned
from ibaml.tasks.dataset import Dataset
from ibaml.tasks.errors import DataError
from ibaml.tasks.numbers import Numbers, sample_rows


@dataclass(frozen=True)
class Episodes:
    """W-way S-shot episodes with Q queries a class, from the classes of one split.

    Episode ``key`` depends only on (seed, split, key), not on the batch size, the number of
    processes, or a resume. The order of labels is part of the draw. Images stay uint8 until they
    are gathered; they are converted, normalized and augmented in batches on ``device``.

    Args:
        rotations: count every class turned by 90, 180 and 270 degrees as a class of its own.
        normalize: subtract the training split's mean and divide by its deviation.
        augment: random flips, crops, colors (of support and query images alike).

    >>> batch = Episodes(data, "train", ways=5, shots=1).batch(range(8))   # doctest: +SKIP
    """

    data: Dataset
    split: str = "train"
    ways: int = 5
    shots: int = 1
    queries: int = 15
    seed: int = 0
    rotations: bool = False
    normalize: bool = True
    augment: Augment | None = None
    device: torch.device | str = "cpu"
    dtype: torch.dtype = torch.float32
    _classes: tuple[int, ...] = field(init=False, repr=False, default=())

    def __post_init__(self) -> None:
        for name, least in (("ways", 1), ("shots", 1), ("queries", 1)):
            if getattr(self, name) < least:
                raise DataError(f"{name} must be {least} or more, got {getattr(self, name)}")
        if not self.dtype.is_floating_point:
            raise DataError(f"dtype must be floating, got {self.dtype}")
        if (self.rotations or self.augment) and not self.data.is_image:
            raise DataError("rotations and augmentation are for images")
        need = self.shots + self.queries
        members = self.data.members(self.split)
        enough = tuple(c for c in members if self.data.count(c) >= need)
        object.__setattr__(self, "_classes", enough)
        if self.classes < self.ways:
            small = len(members) - len(enough)
            sizes = ", ".join(f"{len(c)} {split}" for split, c in self.data.splits.items())
            raise DataError(
                f"{self.data.name}, split {self.split!r}: {self.ways}-way episodes of "
                f"{self.shots} + {self.queries} examples need {self.ways} classes of {need}, and "
                f"there are {self.classes} ({small} classes are smaller): lower ways, shots or "
                f"queries, or choose the classes of each split with --splits FILE (now {sizes}). "
                "To tell classes apart from a few examples, without training: ibaml predict"
            )

    @property
    def classes(self) -> int:
        """Number of classes that episodes draw from; classes too small for one are left out."""
        return len(self._classes) * (4 if self.rotations else 1)

    def draw(self, key: int) -> tuple[np.ndarray, np.ndarray]:
        """Rows (ways, shots + queries) of an episode in the dataset, and each class's quarter
        turns (ways,)."""
        numbers = Numbers(mix(self.seed, *self.split.encode(), key))
        chosen = numbers.sample(self.classes, self.ways)
        need = self.shots + self.queries
        rows = np.empty((self.ways, need), dtype=np.int64)
        for i, c in enumerate(chosen):
            member = self._classes[c % len(self._classes)]
            rows[i] = self.data.starts[member] + numbers.sample(self.data.count(member), need)
        return rows, chosen // len(self._classes)

    def draws(self, keys: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """`draw` of every key at once: rows (T, ways, shots + queries) and turns (T, ways)."""
        tasks, need = len(keys), self.shots + self.queries
        count = self.ways * (1 + need)
        raw = np.stack([Numbers(mix(self.seed, *self.split.encode(), k)).raw(count) for k in keys])
        chosen = sample_rows(raw[:, : self.ways], np.full(tasks, self.classes))
        members = np.asarray(self._classes)[chosen % len(self._classes)].ravel()
        starts = self.data.starts
        rows = sample_rows(
            raw[:, self.ways :].reshape(-1, need), starts[members + 1] - starts[members]
        )
        rows += starts[members][:, None]
        return rows.reshape(tasks, self.ways, need), chosen // len(self._classes)

    def batch(self, keys: Sequence[int]) -> TaskBatch:
        """The episodes of these keys as one batch."""
        keys = [int(k) for k in keys]
        if not keys:
            raise DataError("a batch needs at least one key")
        rows, turns = self.draws(keys)
        support_x, support_y = self._half(rows[:, :, : self.shots], turns, keys, 0)
        query_x, query_y = self._half(rows[:, :, self.shots :], turns, keys, 1)
        return TaskBatch(
            support_x, support_y, query_x, query_y, keys, validate=False, classes=self.ways
        )

    def _half(
        self, rows: np.ndarray, turns: np.ndarray, keys: Sequence[int], half: int
    ) -> tuple[Tensor, Tensor]:
        """Inputs and labels of the support (0) or the query (1) set, from rows (T, ways, n)."""
        tasks, ways, count = rows.shape
        x = self._converted(torch.from_numpy(rows.reshape(tasks, -1)))
        if self.rotations or self.augment is not None:
            x = x.unflatten(1, (ways, count))
            x = turned(x, turns) if self.rotations else x
            if self.augment is not None:
                x = self.augment(
                    x, [mix(self.seed, half, *self.split.encode(), 0, k) for k in keys]
                )
            x = x.flatten(1, 2)
        y = torch.arange(ways, device=x.device).repeat_interleave(count)
        return x, y.expand(tasks, -1)

    def stream(self, tasks: int, start: int = 0, steps: int | None = None) -> Iterator[TaskBatch]:
        """Batches of ``tasks`` episodes from step ``start`` (to resume a run): ``steps`` of them,
        or without end."""
        for step in count(start) if steps is None else range(start, start + steps):
            yield self.batch(range(step * tasks, (step + 1) * tasks))

    @cached_property
    def _converted(self) -> Converted:
        return Converted(self.data, self.normalize, self.device, self.dtype)
