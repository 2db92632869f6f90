"""How are a user's own images read? From one folder per class (or a zip), or a CSV list."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from ibaml.tasks.dataset import SPLITS, Dataset, split_by_file, split_by_hash, split_by_name
from ibaml.tasks.errors import DataError
from ibaml.tasks.images import Channels
from ibaml.tasks.rows import read_rows
from ibaml.tasks.sources.decode import Entry, Progress, Splitter, is_image, load_images
from ibaml.tasks.tree import Tree


def image_folder(
    root: str | Path,
    *,
    splits: str | Path | None = None,
    image_size: int = 84,
    channels: Channels = 3,
    name: str | None = None,
    license: str = "yours",
    progress: Progress | None = None,
) -> Dataset:
    """Images in one folder per class, in a folder or a zip.

    The splits are ``train``, ``val`` and ``test`` folders above the classes, or lists of classes in
    the JSON file ``splits``. Else classes are split 64 : 16 : 20 by a hash of their name.

    >>> data = image_folder("photos/", image_size=84)      # doctest: +SKIP
    """
    tree = Tree.open(root)
    images = [n for n in tree.names if is_image(n)]
    parts = [[p for p in n.split("/") if p != "."] for n in images]
    while _wrapped(parts):
        parts = [p[1:] for p in parts]  # drop a single outer folder
    top = {p[0].casefold() for p in parts}
    splitter = _splitter(splits)
    depth = 2
    if top & set(_SPLIT_NAMES):
        if not top <= set(_SPLIT_NAMES):
            odd = sorted(top - set(_SPLIT_NAMES))[0]
            raise DataError(f"{root}: {odd!r} lies beside folders named like splits: move it out")
        if splits is not None:
            raise DataError(
                f"{root} has a folder for each split already: leave splits out, or move the class "
                "folders out of them"
            )
        depth = 3
        given: dict[str, set[str]] = {}
        for p in parts:
            given.setdefault(_SPLIT_NAMES[p[0].casefold()], set()).add(p[min(1, len(p) - 1)])
        lists = {s: sorted(given[s]) for s in SPLITS if s in given}
        splitter = partial(split_by_name, lists, origin=str(root))
    for n, p in zip(images, parts, strict=True):
        if len(p) != depth:
            where = "in no class folder" if len(p) < depth else "in a folder inside a class folder"
            raise DataError(f"{root}: {n} lies {where}: put images into one folder per class")
    entries = [Entry(p[depth - 2], n) for n, p in zip(images, parts, strict=True)]
    _refuse_empty(tree, root)
    return load_images(
        name or Path(root).resolve().stem,
        [(tree, entries)],
        splitter,
        size=image_size,
        channels=channels,
        license=license,
        progress=progress,
    )


def image_list(
    table: str | Path,
    *,
    root: str | Path | None = None,
    splits: str | Path | None = None,
    image_size: int = 84,
    channels: Channels = 3,
    name: str | None = None,
    license: str = "yours",
    progress: Progress | None = None,
) -> Dataset:
    """Images listed in a CSV with the columns ``path``, ``label`` and optionally ``split``. Without
    that, classes are split by the file ``splits`` or by a hash, as in `image_folder`."""
    table = Path(table)
    rows = read_rows(table, ("path", "label"))
    tree = Tree.open(table.parent if root is None else root)
    there = set(tree.names)
    missing = [r["path"] for r in rows if r["path"] not in there]
    if missing:
        raise DataError(
            f"{table}: {len(missing)} of {len(rows)} files are missing under {tree.root}, the "
            f"first is {missing[0]!r}"
        )
    splitter = _splitter(splits)
    if "split" in rows[0]:
        if splits is not None:
            raise DataError(
                f"{table} has a column 'split' already: leave splits out, or drop the column"
            )
        lists: dict[str, set[str]] = {}
        for number, row in enumerate(rows, start=2):
            if row["split"] not in SPLITS:
                raise DataError(
                    f"{table}, line {number}: split is {row['split']!r}, it must be one of {SPLITS}"
                )
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
        license=license,
        progress=progress,
    )


_SPLIT_NAMES = {"train": "train", "val": "val", "valid": "val", "validation": "val", "test": "test"}


def _splitter(splits: str | Path | None) -> Splitter:
    return split_by_hash if splits is None else partial(split_by_file, Path(splits))


def _wrapped(parts: Sequence[Sequence[str]]) -> bool:
    """Whether all class folders lie in one folder that is not named like a split."""
    return (
        len({p[0] for p in parts}) == 1
        and min(len(p) for p in parts) > 2
        and parts[0][0].casefold() not in _SPLIT_NAMES
    )


def _refuse_empty(tree: Tree, root: str | Path) -> None:
    if tree.zipped:
        return
    for folder in sorted(p for p in tree.root.iterdir() if p.is_dir()):
        hidden = folder.name.startswith((".", "__MACOSX"))
        inside = any(n.startswith(f"{folder.name}/") and is_image(n) for n in tree.names)
        if not hidden and not inside:
            raise DataError(f"{root}: class folder {folder.name!r} holds no images: remove it")
