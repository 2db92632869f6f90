"""How does raw input (a photograph, a row of numbers) become what a trained network reads?

The preparation of the training data is a few numbers that are saved with a learner, so that
predicting does not need the training data.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ibaml.tasks.dataset import Dataset
from ibaml.tasks.embedding import Embed
from ibaml.tasks.errors import DataError
from ibaml.tasks.images import open_picture, picture_of, read_file, square
from ibaml.tasks.keyed import EpisodeTasks, TableTasks, TaskSource


@dataclass(frozen=True)
class Inputs:
    """The preparation of inputs (and, in regression, of targets).

    Attributes:
        shape: of one prepared input: (channels, side, side) for an image, (features,) for a row.
        mean, deviation: of the training data, per channel (of values in 0 … 1) or feature.
        inverted: whether dark and light are exchanged.
        columns: names of the features, if they have any.
        target: name of the target, its mean and deviation in training.
        embed: what makes a row of a picture; its description where that needs a part of yours.

    >>> Inputs((2,), (1.0, 0.0), (2.0, 1.0))([[3.0, 4.0]])
    tensor([[1., 4.]])
    """

    shape: tuple[int, ...]
    mean: tuple[float, ...]
    deviation: tuple[float, ...]
    inverted: bool = False
    columns: tuple[str, ...] = ()
    target: tuple[str, float, float] | None = None
    embed: Embed | Mapping[str, Any] | None = None

    @property
    def is_image(self) -> bool:
        return len(self.shape) == 3

    @classmethod
    def of(cls, data: Dataset | TaskSource) -> Inputs | None:
        """The preparation of these data; None if they are used as they are."""
        if isinstance(data, EpisodeTasks):
            data = data.data
        if isinstance(data, Dataset):
            mean, deviation = data.moments
            return cls(
                tuple(data.examples.shape[1:]), tuple(mean.tolist()), tuple(deviation.tolist()),
                data.inverted and data.is_image, embed=data.embed,
            )  # fmt: skip
        if isinstance(data, TableTasks):
            table = data.table
            center, spread = table.center.tolist(), table.spread.tolist()
            return cls(
                (len(center) - 1,), tuple(center[:-1]), tuple(spread[:-1]), columns=table.features,
                target=(table.target, center[-1], spread[-1]),
            )  # fmt: skip
        return None

    def __call__(self, raw: Any) -> Tensor:
        """Prepared inputs (N, …), float32.

        Args:
            raw: images: paths of files, or arrays of uint8 (N, C, H, W) or (N, H, W[, C]); rows:
                numbers (N, features), or mappings from column to number, or images if these were
                embedded.
        """
        if self.embed is not None and not _rows(raw):
            raw = (self.embed if isinstance(self.embed, Embed) else Embed.read(self.embed))(raw)
        if self.is_image:
            pixels = torch.from_numpy(np.stack([self._pixels(one) for one in _several(raw)]))
            x = pixels.float() / 255
            mean, deviation = (torch.tensor(v).view(-1, 1, 1) for v in (self.mean, self.deviation))
            return (x - mean) / deviation
        if isinstance(raw, Sequence) and raw and isinstance(raw[0], Mapping):
            raw = [[float(row[self._column(c, row)]) for c in self.columns] for row in raw]
        x = torch.as_tensor(np.asarray(raw, dtype=np.float64))
        if x.dim() != 2 or x.shape[1:] != self.shape:
            named = f" ({', '.join(self.columns)})" if self.columns else ""
            raise DataError(
                f"inputs must be rows of {self.shape[0]} numbers{named}, got shape {tuple(x.shape)}"
            )
        if not bool(x.isfinite().all()):
            raise DataError("inputs hold a NaN or an infinity")
        return ((x - torch.tensor(self.mean)) / torch.tensor(self.deviation)).float()

    def targets(self, y: Any) -> Tensor:
        """Standardized targets, from targets in their own units."""
        _, center, spread = self._target()
        return ((torch.as_tensor(np.asarray(y, dtype=np.float64)) - center) / spread).float()

    def restored(self, mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
        """A prediction's mean and variance in the target's own units."""
        _, center, spread = self._target()
        return mean * spread + center, variance * spread**2

    def _target(self) -> tuple[str, float, float]:
        if self.target is None:
            raise DataError(
                "targets were not standardized in training: there is nothing to convert"
            )
        return self.target

    def _column(self, column: str, row: Mapping[str, Any]) -> str:
        if column not in row:
            raise DataError(f"a row has no column {column!r}; it has {', '.join(map(str, row))}")
        return column

    def _pixels(self, one: Any) -> np.ndarray:
        """One image as uint8 (C, side, side)."""
        channels, side = self.shape[0], self.shape[-1]
        if isinstance(one, str | Path):
            picture = open_picture(read_file(Path(one)), str(one), channels)  # type: ignore[arg-type]
        else:
            picture = picture_of(np.asarray(one), channels)  # type: ignore[arg-type]
        pixels = square(picture, side, channels)  # type: ignore[arg-type]
        return 255 - pixels if self.inverted else pixels

    def described(self) -> dict[str, Any]:
        """The preparation for a JSON file."""
        embed = self.embed.described() if isinstance(self.embed, Embed) else self.embed
        return {**asdict(replace(self, embed=None)), "embed": embed}

    @classmethod
    def read(cls, content: Mapping[str, Any]) -> Inputs:
        """The preparation that `described` returned; anything else is refused."""
        try:
            target = content["target"]
            inputs = cls(
                tuple(int(n) for n in content["shape"]),
                tuple(float(n) for n in content["mean"]),
                tuple(float(n) for n in content["deviation"]),
                bool(content["inverted"]),
                tuple(str(n) for n in content["columns"]),
                None if target is None else (str(target[0]), float(target[1]), float(target[2])),
                _known_embedding(content.get("embed")),
            )
            sizes = {len(inputs.mean), len(inputs.deviation), inputs.shape[0]}
            numbers = (*inputs.mean, *inputs.deviation, *(inputs.target or ("", 0.0, 1.0))[1:])
            if len(inputs.shape) not in (1, 3) or len(sizes) > 1 or min(inputs.shape) < 1:
                raise ValueError("its sizes do not match")
            if not all(map(math.isfinite, numbers)) or min(inputs.deviation) <= 0:
                raise ValueError("a mean or a deviation is not a valid number")
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise DataError(f"the description of inputs is damaged ({error})") from error
        return inputs


def _rows(raw: Any) -> bool:
    """Whether raw inputs are rows of numbers already, not pictures."""
    if isinstance(raw, np.ndarray | Tensor):
        return raw.ndim == 2 and str(raw.dtype).removeprefix("torch.").startswith("float")
    first = raw[0] if isinstance(raw, Sequence) and raw and not isinstance(raw, str) else None
    if isinstance(first, np.ndarray | Tensor):
        return first.ndim == 1
    return isinstance(first, Sequence | Mapping) and not isinstance(first, str)


def _known_embedding(content: Any) -> Embed | Mapping[str, Any] | None:
    """The embedding of a description; the description itself if the embedding cannot be made here,
    which is then said when a picture is to be read."""
    if content is None:
        return None
    if not isinstance(content, dict):
        raise ValueError("its embedding is none")
    try:
        return Embed.read(content)
    except DataError:
        return content


def _several(raw: Any) -> Sequence[Any]:
    """A sequence of images, from one or several."""
    if isinstance(raw, str | Path):
        return [raw]
    if isinstance(raw, Tensor):
        raw = raw.numpy()
    items = list(raw)
    if not items:
        raise DataError("there is no image to prepare")
    return items
