"""How does a dataset of another library become ours? Any that gives (image, label) by number:
torch's `Dataset`, torchvision's, Hugging Face's."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from ibaml.tasks.dataset import (
    Dataset,
    group,
    split_by_file,
    split_by_hash,
    split_by_name,
)
from ibaml.tasks.embedding import Embed
from ibaml.tasks.errors import DataError
from ibaml.tasks.images import Channels, picture_of, plain, square

Progress = Callable[[int, int], None]
_AT_ONCE = 256


def from_dataset(
    dataset: Any,
    *,
    image: str = "image",
    label: str = "label",
    splits: Mapping[str, Sequence[str]] | str | Path | None = None,
    image_size: int = 84,
    channels: Channels = 3,
    embed: Embed | None = None,
    name: str | None = None,
    license: str = "unknown",
    progress: Progress | None = None,
) -> Dataset:
    """A dataset of pairs (image, label), or of mappings with an image and a label.

    Images are Pillow pictures, uint8 arrays or tensors, or floating tensors (C, H, W) of values in
    0 … 1, as transforms make them (not normalized). Classes are named by the dataset's
    ``.features[label].names`` or ``.classes``, if it has them.

    Args:
        image, label: the keys of mappings.
        splits: the class names of each split, or a JSON file of them; else by a hash of the names.
        embed: makes vectors of the images, at their full size; ``image_size`` is then not read.

    >>> from_dataset(torchvision.datasets.Flowers102("data"))                     # doctest: +SKIP
    """
    count = _length(dataset)
    names = _names(dataset, label)
    labels: list[str] = []
    parts: list[np.ndarray] = []
    waiting: list[np.ndarray] = []
    digest = hashlib.sha256(b"" if embed is None else embed.digest.encode())
    for at in range(count):
        picture, own = _pair(dataset[at], at, image, label)
        labels.append(_called(own, names, at))
        pixels = _pixels(picture, at, channels if embed is None else 3)
        if embed is None:
            pixels = square(picture_of(pixels, channels), image_size, channels)
        digest.update(
            labels[-1].encode(errors="surrogateescape")
            + b"\0"
            + str(pixels.shape).encode()
            + pixels.tobytes()
        )
        waiting.append(pixels)
        if len(waiting) == _AT_ONCE or at + 1 == count:
            parts.append(np.stack(waiting) if embed is None else embed(waiting))
            waiting = []
        if progress is not None:
            progress(at + 1, count)
    order, grouped, classes = group(labels)
    called = name or type(dataset).__name__
    if splits is None:
        chosen = split_by_hash(classes)
    elif isinstance(splits, Mapping):
        chosen = split_by_name(splits, classes, called)
    else:
        chosen = split_by_file(Path(splits), classes)
    return Dataset(
        called, np.concatenate(parts)[order], grouped, classes, chosen, license=license,
        digest=digest.hexdigest(), embed=embed,
    )  # fmt: skip


def _length(dataset: Any) -> int:
    try:
        count = len(dataset)
    except TypeError as error:
        raise DataError(
            "the dataset has no length: take a part of a stream as a list, "
            "from_dataset(list(itertools.islice(stream, 1000)))"
        ) from error
    if not count:
        raise DataError("the dataset is empty")
    return count


def _names(dataset: Any, label: str) -> Sequence[str] | None:
    """The names of the classes, if the dataset, or the one it is a subset of, has them."""
    while dataset is not None:
        try:
            found = dataset.features[label].names
        except (AttributeError, KeyError, TypeError):
            found = getattr(dataset, "classes", None)
        if isinstance(found, Sequence) and not isinstance(found, str):
            return found
        dataset = getattr(dataset, "dataset", None)
    return None


def _pair(item: Any, at: int, image: str, label: str) -> tuple[Any, Any]:
    if isinstance(item, Mapping):
        for key in (image, label):
            if key not in item:
                raise DataError(
                    f"item {at} has no {key!r}; it has {', '.join(map(str, item))}: name them, "
                    "image=…, label=…"
                )
        return item[image], item[label]
    if isinstance(item, tuple | list) and len(item) == 2:
        return item[0], item[1]
    raise DataError(f"item {at} is no pair (image, label) and no mapping: {type(item).__name__}")


def _called(own: Any, names: Sequence[str] | None, at: int) -> str:
    """The name of a label, which is a number or a text."""
    if isinstance(own, str):
        return own
    try:
        number = int(own)
        if number != own:
            raise ValueError
        if names is None:
            return str(number)
        if number < 0:
            raise IndexError
        return str(names[number])
    except (TypeError, ValueError, IndexError) as error:
        of = f" of {len(names)} classes" if names is not None else ""
        raise DataError(f"item {at}: {own!r} is no label{of}") from error


def _pixels(picture: Any, at: int, channels: Channels) -> np.ndarray:
    if hasattr(picture, "convert") and hasattr(picture, "getexif"):
        return np.asarray(plain(picture, channels))
    array = picture.detach().cpu().numpy() if isinstance(picture, Tensor) else picture
    if not isinstance(array, np.ndarray):
        raise DataError(
            f"item {at}: an image is a Pillow picture, an array or a tensor, got "
            f"{type(picture).__name__}"
        )
    if array.dtype.kind == "f":
        if array.size == 0 or not 0 <= array.min() <= array.max() <= 1:
            raise DataError(
                f"item {at}: floating pixels must lie in 0 … 1: leave out the normalization of the "
                "dataset's transform"
            )
        array = (array * 255).round().astype(np.uint8)
    return np.asarray(picture_of(array, channels))
