"""Which examples does a plain classifier of the training classes read, batch by batch?"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
import torch
from torch import Tensor

from ibaml.seeding import mix
from ibaml.tasks.augment import Augment
from ibaml.tasks.converted import Converted, turned
from ibaml.tasks.dataset import Dataset
from ibaml.tasks.errors import DataError
from ibaml.tasks.sending import sent

_ORDER, _LOOKS = 11, 12  # streams of random numbers


@dataclass(frozen=True)
class Passes:
    """Passes over all examples of the training split, each in a new order. Batch ``step`` depends
    on the seed and its number alone, so that a stopped run goes on with the same batches.

    Args:
        batch: examples of a batch (all, if there are fewer); those left over at the end of a pass
            are left out.
        rotations: count every class turned by 90, 180 and 270 degrees as a class of its own.
        augment: random flips, crops, colors.

    >>> import ibaml
    >>> x, y = Passes(ibaml.tasks.glyphs(), batch=8).examples(0)
    >>> x.shape, y.shape
    (torch.Size([8, 1, 28, 28]), torch.Size([8]))
    """

    data: Dataset
    batch: int = 64
    seed: int = 0
    rotations: bool = False
    augment: Augment | None = None
    device: torch.device | str = "cpu"
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        if (self.rotations or self.augment) and not self.data.is_image:
            raise DataError("rotations and augmentation are for images")
        if len(self._members) < 2:
            raise DataError(
                f"{self.data.name} has {len(self._members)} training classes, and a classifier "
                "needs two: choose the classes of each split with --splits FILE"
            )

    @property
    def _members(self) -> tuple[int, ...]:
        return tuple(sorted(c for c in self.data.members("train") if self.data.count(c)))

    @property
    def classes(self) -> int:
        """How many classes the labels tell apart."""
        return len(self._members) * (4 if self.rotations else 1)

    @property
    def steps(self) -> int:
        """Batches of a pass."""
        return max(1, self._total // self.batch)

    @property
    def _total(self) -> int:
        return len(self._rows) * (4 if self.rotations else 1)

    @cached_property
    def _rows(self) -> np.ndarray:
        return np.flatnonzero(np.isin(self.data.labels, self._members))

    @cached_property
    def _labels(self) -> np.ndarray:
        return np.searchsorted(self._members, self.data.labels[self._rows])

    @cached_property
    def _converted(self) -> Converted:
        return Converted(self.data, device=self.device, dtype=self.dtype)

    def examples(self, step: int) -> tuple[Tensor, Tensor]:
        """Inputs and labels of a batch; 0 is the first."""
        epoch, place = divmod(step, self.steps)
        order = _order(mix(self.seed, _ORDER, epoch), self._total)
        chosen = order[place * self.batch : (place + 1) * self.batch]
        which, turns = chosen % len(self._rows), chosen // len(self._rows)
        x = self._converted(torch.from_numpy(self._rows[which])[None])  # one task of many examples
        if self.rotations:
            x = turned(x, turns[None])
        if self.augment is not None:
            x = self.augment(x[:, None], [mix(self.seed, _LOOKS, step)])[:, 0]
        labels = torch.from_numpy(self._labels[which] + turns * len(self._members))
        return x[0], sent(labels, x.device)


@lru_cache(maxsize=2)
def _order(seed: int, total: int) -> np.ndarray:
    """A permutation; that of a pass is asked for by each of its batches."""
    order: np.ndarray = torch.randperm(total, generator=torch.Generator().manual_seed(seed)).numpy()
    return order
