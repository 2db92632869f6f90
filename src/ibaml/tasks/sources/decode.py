"""How do image files become a dataset? Every image is decoded once, into the cache."""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ibaml.tasks.cache import cached
from ibaml.tasks.dataset import Dataset, group
from ibaml.tasks.errors import DataError, DataWarning
from ibaml.tasks.images import FOREIGN, Channels, ImageError, decode
from ibaml.tasks.tree import Tree

if TYPE_CHECKING:
    from ibaml.tasks.embedding import Embed

IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff")
Progress = Callable[[int, int], None]  # arguments: images decoded so far, images in all
Splitter = Callable[[Sequence[str]], Mapping[str, tuple[int, ...]]]


class Entry(NamedTuple):
    """One image file of one class."""

    label: str
    file: str


Parts = Sequence[tuple[Tree, Sequence[Entry]]]


def load_images(
    name: str,
    parts: Parts,
    splitter: Splitter,
    *,
    size: int,
    channels: Channels,
    license: str = "unknown",
    invert: bool = False,
    leave_out: bool = False,
    progress: Progress | None = None,
) -> Dataset:
    """Decode image files into a dataset, or read it from the cache if it is there.

    Args:
        leave_out: whether images that cannot be read are left out, with a `DataWarning` that names
            them, instead of refused.
    """
    if size < 4:
        raise DataError(f"image_size must be 4 or more, got {size}")
    flat = listed(name, parts)
    digest = hashlib.sha256(f"{size},{channels},{invert}".encode())
    for tree, entries in parts:
        digest.update(tree.fingerprint([e.file for e in entries]).encode())
        digest.update(json.dumps([[e.label, e.file] for e in entries]).encode())
    order, _, _ = group([entry.label for _, entry in flat])

    def build() -> tuple[np.ndarray, dict[str, Any]]:
        place = np.empty(len(flat), dtype=np.int64)
        place[order] = np.arange(len(flat))
        images = np.zeros((len(flat), channels, size, size), dtype=np.uint8)
        at, failures = 0, {}
        for tree, entries in parts:
            with tree.reading() as read:
                for entry in entries:
                    try:
                        pixels = decode(read(entry.file), entry.file, size, channels)
                        images[place[at]] = 255 - pixels if invert else pixels
                    except DataError as error:
                        failures[at] = str(error)
                    at += 1
                    if progress is not None:
                        progress(at, len(flat))
        if failures and (not leave_out or len(failures) == len(flat)):
            raise ImageError(_unreadable(failures, len(flat), "repair or remove them"))
        images = np.delete(images, place[list(failures)], axis=0) if failures else images
        return images, {"images": len(flat), "unreadable": list(failures.items())}

    images, facts = cached(name, digest.hexdigest(), build)
    failures = {int(at): str(why) for at, why in facts.get("unreadable", ())}
    return made(name, parts, splitter, images, failures, license, digest.hexdigest(), invert)


def made(
    name: str,
    parts: Parts,
    splitter: Splitter,
    examples: np.ndarray,
    failures: Mapping[int, str],
    license: str,
    digest: str,
    inverted: bool = False,
    embed: Embed | None = None,
) -> Dataset:
    """The dataset of examples that are grouped by class already, without those that failed."""
    flat = listed(name, parts)
    kept = [one for at, one in enumerate(flat) if at not in failures]
    if failures:
        lost = sorted({e.label for _, e in flat} - {e.label for _, e in kept})
        without = f"\n  no image is left of {', '.join(map(repr, lost))}" if lost else ""
        message = _unreadable(failures, len(flat), "they are left out") + without
        warnings.warn(f"{name}: {message}", DataWarning, stacklevel=2)
    order, labels, classes = group([entry.label for _, entry in kept])
    several = len({tree.root for tree, _ in parts}) > 1
    files = [str(tree.root / e.file) if several else e.file for tree, e in kept]
    return Dataset(
        name=name,
        examples=examples,
        labels=labels,
        classes=classes,
        splits=splitter(classes),
        license=license,
        digest=digest,
        files=tuple(files[i] for i in order),
        inverted=inverted,
        embed=embed,
    )


def listed(name: str, parts: Parts) -> list[tuple[Tree, Entry]]:
    """All images of the parts; none, or a file twice, is refused."""
    for _, entries in parts:
        named = sorted(e.file for e in entries)
        if twice := next((one for one, other in pairwise(named) if one == other), None):
            raise DataError(f"{name}: {twice!r} is listed twice")
    flat = [(tree, entry) for tree, entries in parts for entry in entries]
    if not flat:
        raise DataError(f"{name}: found no images ({', '.join(IMAGE_SUFFIXES)})")
    return flat


def _unreadable(failures: Mapping[int, str], total: int, remedy: str) -> str:
    shown = "\n  ".join([failures[at] for at in sorted(failures)][:10])
    more = f"\n  … and {len(failures) - 10} more" if len(failures) > 10 else ""
    return f"{len(failures)} of {total} images cannot be read: {remedy}:\n  {shown}{more}"


_ENDS = (*IMAGE_SUFFIXES, *FOREIGN)


def is_image(name: str) -> bool:
    return name.lower().endswith(_ENDS)
