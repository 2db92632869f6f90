"""A folder (or zip) of a user's own images: one folder per class, or a CSV that lists them."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from ibaml.tasks.dataset import SPLITS, Dataset, split_by_file, split_by_hash, split_by_name
from ibaml.tasks.images import Channels
from ibaml.tasks.sources.decode import Entry, Progress, Splitter, is_image, load_images
from ibaml.tasks.tree import DataError, Tree


def image_folder(
    root: str | Path,
    *,
    splits: str | Path | None = None,
    image_size: int = 84,
    channels: Channels = 3,
    name: str | None = None,
    licence: str = "yours",
    progress: Progress | None = None,
) -> Dataset:
    """Images in one folder per class, in a folder or a zip.

    ``train``, ``val`` and ``test`` folders above the classes are the splits; else ``splits`` names
    a JSON file with lists of classes; else classes are split 64 : 16 : 20 by a hash of their name.

    >>> data = image_folder("photos/", image_size=84)      # doctest: +SKIP
    """
    tree = Tree.open(root)
    images = [n for n in tree.names if is_image(n)]
    parts = [n.split("/") for n in images]
    while parts and len({p[0] for p in parts}) == 1 and min(len(p) for p in parts) > 2:
        parts = [p[1:] for p in parts]  # one folder around everything
    loose = [n for n, p in zip(images, parts, strict=True) if len(p) < 2]
    if loose:
        raise DataError(
            f"{root}: {loose[0]} lies in no class folder; put images into one folder per class"
        )
    splitter: Splitter = split_by_hash
    if parts and {p[0] for p in parts} <= set(SPLITS) and min(len(p) for p in parts) > 2:
        entries = [Entry(p[1], n) for n, p in zip(images, parts, strict=True)]
        given: dict[str, set[str]] = {}
        for p in parts:
            given.setdefault(p[0], set()).add(p[1])
        lists = {s: sorted(given[s]) for s in SPLITS if s in given}
        splitter = partial(split_by_name, lists, origin=str(root))
    else:
        entries = [Entry(p[0], n) for n, p in zip(images, parts, strict=True)]
    _refuse_empty(tree, {e.label for e in entries}, root)
    if splits is not None:
        splitter = partial(split_by_file, Path(splits))
    return load_images(
        name or Path(root).stem,
        [(tree, entries)],
        splitter,
        size=image_size,
        channels=channels,
        licence=licence,
        progress=progress,
    )


def image_list(
    table: str | Path,
    *,
    root: str | Path | None = None,
    image_size: int = 84,
    channels: Channels = 3,
    name: str | None = None,
    licence: str = "yours",
    progress: Progress | None = None,
) -> Dataset:
    """Images listed in a CSV with the columns ``path``, ``label`` and optionally ``split``."""
    table = Path(table)
    rows = read_rows(table.read_text("utf-8-sig"), str(table), ("path", "label"))
    tree = Tree.open(table.parent if root is None else root)
    there = set(tree.names)
    missing = [r["path"] for r in rows if r["path"] not in there]
    if missing:
        raise DataError(
            f"{table}: {len(missing)} of {len(rows)} files are missing under {tree.root}, the "
            f"first is {missing[0]!r}"
        )
    splitter: Splitter = split_by_hash
    if "split" in rows[0]:
        lists: dict[str, set[str]] = {}
        for row in rows:
            lists.setdefault(row["split"], set()).add(row["label"])
        splitter = partial(
            split_by_name, {s: sorted(c) for s, c in lists.items()}, origin=str(table)
        )
    return load_images(
        name or table.stem,
        [(tree, [Entry(r["label"], r["path"]) for r in rows])],
        splitter,
        size=image_size,
        channels=channels,
        licence=licence,
        progress=progress,
    )


def read_rows(text: str, origin: str, needed: Sequence[str]) -> list[dict[str, str]]:
    """The rows of a CSV or TSV with a header, which must have these columns."""
    first = text.split("\n", 1)[0]
    reader = csv.DictReader(io.StringIO(text), delimiter="\t" if "\t" in first else ",")
    columns = reader.fieldnames or []
    for column in needed:
        if column not in columns:
            raise DataError(f"{origin}: no column {column!r}; it has {', '.join(columns)}")
    rows: list[Mapping[str, str | None]] = list(reader)
    if not rows:
        raise DataError(f"{origin}: has no rows")
    for number, row in enumerate(rows, start=2):
        if any(row[c] in (None, "") for c in needed):
            raise DataError(f"{origin}, line {number}: a value of {', '.join(needed)} is missing")
    return [{k: str(v) for k, v in row.items() if k is not None} for row in rows]


def _refuse_empty(tree: Tree, classes: set[str], root: str | Path) -> None:
    if tree.zipped:
        return
    for folder in sorted(p for p in tree.root.iterdir() if p.is_dir()):
        hidden = folder.name.startswith((".", "__MACOSX"))
        if not hidden and not any(n.startswith(f"{folder.name}/") for n in tree.names):
            raise DataError(f"{root}: class folder {folder.name!r} holds no images; remove it")
