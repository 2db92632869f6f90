"""CUB-200: 200 bird species, split 100/50/50 as the few-shot literature does."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from ibaml.tasks.dataset import Dataset, published, split_by_name
from ibaml.tasks.errors import DataError
from ibaml.tasks.sources.decode import Entry, Progress, is_image, load_images
from ibaml.tasks.tree import Tree


def cub(root: str | Path, *, image_size: int = 84, progress: Progress | None = None) -> Dataset:
    """CUB-200-2011 from its public folder (``images/001.Black_footed_Albatross/…``)."""
    tree = Tree.open(root)
    lists = published("cub")
    known = {c for names in lists.values() for c in names}
    entries = [
        Entry(n.split("/")[-2], n)
        for n in tree.names
        if is_image(n) and "/" in n and n.split("/")[-2] in known
    ]
    if not entries:
        raise DataError(f"{root}: found no class folders of CUB-200 such as {lists['train'][0]}")
    return load_images(
        "cub",
        [(tree, entries)],
        partial(split_by_name, lists, origin=str(root)),
        size=image_size,
        channels=3,
        license="non-commercial research",
        progress=progress,
    )
