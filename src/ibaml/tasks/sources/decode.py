"""How do image files become a dataset? Every image is decoded once, into the cache."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ibaml.tasks.cache import cached
from ibaml.tasks.dataset import Dataset, group
from ibaml.tasks.errors import DataError
from ibaml.tasks.images import Channels, ImageError, decode
from ibaml.tasks.tree import Tree

IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff")
Progress = Callable[[int, int], None]  # arguments: images decoded so far, images in all
Splitter = Callable[[Sequence[str]], Mapping[str, tuple[int, ...]]]


@dataclass(frozen=True)
class Entry:
    """One image file of one class."""

    label: str
    file: str


def load_images(
    name: str,
    parts: Sequence[tuple[Tree, Sequence[Entry]]],
    splitter: Splitter,
    *,
    size: int,
    channels: Channels,
    license: str = "unknown",
    invert: bool = False,
    progress: Progress | None = None,
) -> Dataset:
    """Decode image files into a dataset, or read it from the cache if it is there."""
    if size < 4:
        raise DataError(f"image_size must be 4 or more, got {size}")
    digest = hashlib.sha256(f"{size},{channels},{invert}".encode())
    for tree, entries in parts:
        named = [e.file for e in entries]
        if len(set(named)) < len(named):
            twice = next(f for f in named if named.count(f) > 1)
            raise DataError(f"{name}: {twice!r} is listed twice")
        digest.update(tree.fingerprint(named).encode())
        digest.update(json.dumps([[e.label, e.file] for e in entries]).encode())
    flat = [(tree, entry) for tree, entries in parts for entry in entries]
    if not flat:
        raise DataError(f"{name}: found no images ({', '.join(IMAGE_SUFFIXES)})")
    order, labels, classes = group([entry.label for _, entry in flat])

    def build() -> tuple[np.ndarray, dict[str, Any]]:
        place = np.empty(len(flat), dtype=np.int64)
        place[order] = np.arange(len(flat))
        images = np.zeros((len(flat), channels, size, size), dtype=np.uint8)
        done, unreadable = 0, []
        for tree, entries in parts:
            for file, data in tree.read_all([e.file for e in entries]):
                try:
                    pixels = decode(data, file, size, channels)
                    images[place[done]] = 255 - pixels if invert else pixels
                except ImageError as error:
                    unreadable.append(str(error))
                done += 1
                if progress is not None:
                    progress(done, len(flat))
        if unreadable:
            shown = "\n  ".join(unreadable[:10])
            more = f"\n  … and {len(unreadable) - 10} more" if len(unreadable) > 10 else ""
            raise ImageError(
                f"{len(unreadable)} of {len(flat)} images cannot be read: repair or remove them:"
                f"\n  {shown}{more}"
            )
        return images, {"images": len(flat)}

    images, _ = cached(name, digest.hexdigest(), build)
    return Dataset(
        name=name,
        examples=images,
        labels=labels,
        classes=classes,
        splits=splitter(classes),
        license=license,
        digest=digest.hexdigest(),
        files=tuple(flat[i][1].file for i in order),
        inverted=invert,
    )


def is_image(name: str) -> bool:
    return name.lower().endswith(IMAGE_SUFFIXES)
