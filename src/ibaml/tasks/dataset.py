"""Which examples does each class have, and which classes does each split have?"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ibaml.files import at_home
from ibaml.tasks.errors import DataError
from ibaml.untrusted import DOCUMENT, Refused, content, parsed_json

if TYPE_CHECKING:
    from ibaml.tasks.embedding import Embed

SPLITS = ("train", "val", "test")


@dataclass(frozen=True)
class Dataset:
    """Examples grouped by class.

    Attributes:
        examples: uint8 images (N, C, H, W), or floating feature vectors (N, D).
        labels: class index of every example, non-decreasing.
        classes: names of the classes.
        splits: class indices of each split; no class is in two splits.
        files: the file of each example, if it came from one.
        inverted: whether dark and light of the images were exchanged on reading.
        embed: what made feature vectors of images, if that is known.
    """

    name: str
    examples: np.ndarray
    labels: np.ndarray
    classes: tuple[str, ...]
    splits: Mapping[str, tuple[int, ...]]
    license: str = "unknown"
    digest: str = ""
    files: tuple[str, ...] = ()
    inverted: bool = False
    embed: Embed | None = None

    def __post_init__(self) -> None:
        if len(self.examples) != len(self.labels):
            raise DataError(f"{len(self.examples)} examples but {len(self.labels)} labels")
        if len(self.labels) and (np.diff(self.labels) < 0).any():
            raise DataError("examples must be grouped by class")
        seen: dict[int, str] = {}
        for split, members in self.splits.items():
            for c in members:
                if not 0 <= c < len(self.classes):
                    raise DataError(f"split {split!r} names class {c} of {len(self.classes)}")
                if c in seen:
                    raise DataError(
                        f"class {self.classes[c]!r} is in two splits, {seen[c]} and {split}: "
                        "test classes must be new"
                    )
                seen[c] = split

    @property
    def is_image(self) -> bool:
        return self.examples.dtype == np.uint8

    @cached_property
    def starts(self) -> np.ndarray:
        """The row where each class begins in ``examples``, and the end of the last class."""
        return np.searchsorted(self.labels, np.arange(len(self.classes) + 1))

    def count(self, c: int) -> int:
        return int(self.starts[c + 1] - self.starts[c])

    def members(self, split: str) -> tuple[int, ...]:
        """The classes of a split (``"all"`` for every class)."""
        if split == "all":
            return tuple(range(len(self.classes)))
        if split not in self.splits:
            raise DataError(f"{self.name} has no split {split!r}; it has {', '.join(self.splits)}")
        return self.splits[split]

    @cached_property
    def tensor(self) -> Tensor:
        """The examples as one tensor (memory-mapped where they come from the cache)."""
        import warnings

        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore", UserWarning
            )  # warns that the memory map is read-only; it is never written
            return torch.from_numpy(np.asarray(self.examples))

    def on(self, device: torch.device | str) -> Tensor:
        """The examples on a device, one copy for all callers; on the CPU if they do not fit."""
        copies: dict[torch.device, Tensor] = self.__dict__.setdefault("_copies", {})
        place = torch.device(device)
        if place not in copies:
            try:
                copies[place] = self.tensor.to(place)
            except torch.OutOfMemoryError:
                copies[place] = self.tensor
        return copies[place]

    @cached_property
    def moments(self) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation per channel (or feature) of the training split."""
        rows = np.concatenate(
            [np.arange(self.starts[c], self.starts[c + 1]) for c in self._for_moments()]
        )
        if len(rows) > 4096:
            rows = rows[:: len(rows) // 4096]
        # a constant feature has no deviation to divide by, so it is left as it is
        if self.is_image:
            mean, std = _image_moments(self.examples, rows)
            is_constant = std <= 1e-6
        else:
            sample = self.examples[rows].astype(np.float64)
            axes = (0, *range(2, sample.ndim))
            mean, std = sample.mean(axes), sample.std(axes)
            features = np.moveaxis(sample, 1, -1).reshape(-1, sample.shape[1])
            is_constant = constant(features, self.examples.dtype)
        std = np.where(is_constant, 1.0, std)
        return torch.from_numpy(mean), torch.from_numpy(std)

    def _for_moments(self) -> Sequence[int]:
        return self.splits.get("train") or range(len(self.classes))


def _image_moments(images: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation of each channel of some uint8 images, as fractions of 255, from
    sums in whole numbers: exact, and few images at a time."""
    shape = images.shape[1:]
    channels = shape[0] if len(shape) == 3 else 1
    sums, squares = [0] * channels, [0] * channels
    for begin in range(0, len(rows), 64):
        some = images[rows[begin : begin + 64]].reshape(-1, channels, *shape[-2:])
        for c in range(channels):
            channel = some[:, c]
            sums[c] += int(channel.sum(dtype=np.uint64))
            squares[c] += int(np.square(channel, dtype=np.uint16).sum(dtype=np.uint64))
    count = len(rows) * shape[-2] * shape[-1]
    mean = [total / (255 * count) for total in sums]
    spread = [count * square - total**2 for total, square in zip(sums, squares, strict=True)]
    return np.array(mean), np.array([math.sqrt(s) / (255 * count) for s in spread])


def constant(values: np.ndarray, stored: np.dtype) -> np.ndarray:
    """Which features of float64 values (N, D) vary by rounding only: their deviation is at most the
    precision of the dtype they were stored in, times their largest value."""
    deviation = (values - values[0]).std(
        0
    )  # minus the first, so that equal values give exactly zero
    return deviation <= np.finfo(stored).eps * np.abs(values).max(0)


def feature_vectors(
    features: np.ndarray | Tensor,
    labels: Sequence[str] | Sequence[int] | np.ndarray | Tensor,
    *,
    splits: Mapping[str, Sequence[str]] | str | Path | None = None,
    name: str = "features",
) -> Dataset:
    """Embeddings (N, D) from a model of your own, with a class name (or number) for each.

    ``splits`` has the class names of each split, or is a JSON file of them. Without it, classes are
    split 64 : 16 : 20 by a hash of their name.

    >>> data = feature_vectors(np.zeros((4, 2), np.float32), ["a", "a", "b", "b"])
    >>> data.classes
    ('a', 'b')
    """
    array = features.detach().cpu().float().numpy() if isinstance(features, Tensor) else features
    array = np.asarray(array)
    if np.issubdtype(array.dtype, np.floating):
        array = array.astype(np.float32)
    if array.ndim and len(array) == 0:
        raise DataError("features are empty")
    if array.ndim != 2 or not np.issubdtype(array.dtype, np.floating):
        raise DataError(
            f"features must be floating, (examples, D); got {array.dtype} {array.shape}"
        )
    if array.shape[1] == 0:
        raise DataError(f"features have no columns: shape {array.shape}")
    if not np.isfinite(array).all():
        raise DataError("features hold a NaN or an infinity")
    names = _class_names(labels)
    if len(names) != len(array):
        raise DataError(f"{len(array)} feature vectors but {len(names)} labels")
    order, grouped, classes = group(names)
    if splits is None:
        chosen = split_by_hash(classes)
    elif isinstance(splits, Mapping):
        chosen = split_by_name(splits, classes, name)
    else:
        chosen = split_by_file(Path(splits), classes)
    return Dataset(name, array[order], grouped, classes, chosen, license="yours")


def _class_names(labels: Sequence[str] | Sequence[int] | np.ndarray | Tensor) -> list[str]:
    shape = tuple(labels.shape) if isinstance(labels, np.ndarray | Tensor) else np.shape(labels)
    if len(shape) != 1:
        squeeze = ": squeeze them, labels[:, 0]" if shape[1:] == (1,) else ""
        raise DataError(f"labels must be (N,), one class each; got {shape}{squeeze}")
    values = labels.tolist() if isinstance(labels, np.ndarray | Tensor) else labels
    for i, value in enumerate(values):
        if value is None or (isinstance(value, float | np.floating) and not math.isfinite(value)):
            raise DataError(
                f"labels[{i}] is {value}, which is not a class: leave such examples out"
            )
    return [str(value) for value in values]


def group(items: Sequence[str]) -> tuple[list[int], np.ndarray, tuple[str, ...]]:
    """The order that groups items by class name, their labels, and the sorted class names."""
    classes = tuple(sorted(set(items)))
    index = {c: i for i, c in enumerate(classes)}
    order = sorted(range(len(items)), key=lambda i: index[items[i]])
    labels = np.array([index[items[i]] for i in order], dtype=np.int64)
    return order, labels, classes


def published(name: str) -> dict[str, Any]:
    """A published split of the literature, which ships with the package."""
    text = (files("ibaml.tasks") / "splits" / f"{name}.json").read_text("utf-8")
    return json.loads(text)


def split_by_file(path: Path, classes: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """Splits from a JSON file ``{"train": [class, …], "val": […], "test": […]}``."""
    try:
        lists = parsed_json(content(at_home(path), DOCUMENT))
    except Refused as error:
        raise DataError(f"split file {path} {error}") from error
    except OSError as error:
        raise DataError(f"split file {path}: {error.strerror or error}") from error
    well_formed = isinstance(lists, dict) and bool(lists) and set(lists) <= set(SPLITS)
    if not well_formed or not all(
        isinstance(v, list) and all(isinstance(c, str) for c in v) for v in lists.values()
    ):
        raise DataError(
            f'split file {path}: needs {{"train": ["class", …], "val": …, "test": …}}, numbers in '
            "quotes too"
        )
    return split_by_name(lists, classes, str(path))


def split_by_name(
    lists: Mapping[str, Sequence[str]], classes: Sequence[str], origin: str
) -> dict[str, tuple[int, ...]]:
    index = {c: i for i, c in enumerate(classes)}
    result = {}
    seen: dict[str, str] = {}
    for split, names in lists.items():
        missing = [n for n in names if n not in index]
        if missing:
            raise DataError(
                f"{origin}: {len(missing)} names of split {split!r} are not in the data, the first "
                f"is {missing[0]!r}"
            )
        for n in names:
            if seen.setdefault(n, split) != split:
                raise DataError(
                    f"{origin}: {n!r} is in two splits, {seen[n]} and {split}: what is tested must "
                    "be new"
                )
        result[split] = tuple(sorted({index[n] for n in names}))
    return result


def split_by_hash(classes: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """Splits 64 : 16 : 20 by a hash of the class's name, so that adding classes moves no other."""
    result: dict[str, list[int]] = {s: [] for s in SPLITS}
    for i, name in enumerate(classes):
        share = (
            int.from_bytes(
                hashlib.sha256(name.encode(errors="surrogateescape")).digest()[:8], "big"
            )
            / 2**64
        )
        result["train" if share < 0.64 else "val" if share < 0.8 else "test"].append(i)
    return {s: tuple(v) for s, v in result.items()}
