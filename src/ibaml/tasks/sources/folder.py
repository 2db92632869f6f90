"""How are a user's own images read? From folders of classes (or zips), or a CSV list."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from ibaml.files import at_home, real
from ibaml.tasks.dataset import SPLITS, Dataset, split_by_file, split_by_hash, split_by_name
from ibaml.tasks.embedding import Embed
from ibaml.tasks.errors import DataError, DataWarning
from ibaml.tasks.images import Channels
from ibaml.tasks.rows import read_rows
from ibaml.tasks.sources.decode import Entry, Parts, Progress, Splitter, is_image, load_images
from ibaml.tasks.sources.embedded import embed_images
from ibaml.tasks.sources.layout import PER_IMAGE, by_class, read_layout
from ibaml.tasks.tree import Tree


def image_folder(
    root: str | Path | Sequence[str | Path],
    *,
    splits: str | Path | None = None,
    class_level: int | None = None,
    image_size: int = 84,
    channels: Channels = 3,
    embed: Embed | None = None,
    name: str | None = None,
    license: str = "yours",
    progress: Progress | None = None,
) -> Dataset:
    """Images in folders of classes, in a folder or a zip, or several of them.

    The class of an image is the innermost folder that holds it; of folders with the same name, the
    shortest path that tells them apart. The same path below several roots is one class. The splits
    are ``train``, ``val`` and ``test`` folders around the classes, or lists of classes in the JSON
    file ``splits``; else classes are split 64 : 16 : 20 by a hash of their name, also if such
    folders split the images of each class. Images that cannot be read are left out, and a
    `DataWarning` names them.

    Args:
        class_level: 1 takes the folders directly in the root as classes, 2 those in them, ….
        embed: makes vectors of the images, at their full size; ``image_size`` is then not read.

    >>> data = image_folder("photos/", image_size=84)      # doctest: +SKIP
    """
    roots = [root] if isinstance(root, str | Path) else list(root)
    if not roots:
        raise DataError("there is no folder to read: name one")
    _refuse_overlap(roots)
    origin = ", ".join(map(str, roots))
    trees = [Tree.open(one) for one in roots]
    images = [[n for n in tree.names if is_image(n)] for tree in trees]
    layout = read_layout([n for names in images for n in names], origin, class_level)
    for note in layout.notes + tuple(
        note for tree, names in zip(trees, images, strict=True) for note in _empty(tree, names)
    ):
        warnings.warn(note, DataWarning, stacklevel=2)
    if layout.splits is not None and splits is not None:
        raise DataError(
            f"{origin} has a folder for each split already: leave splits out, or move the class "
            "folders out of them"
        )
    classes = iter(layout.classes)
    parts = [
        (tree, [Entry(next(classes), n) for n in names])
        for tree, names in zip(trees, images, strict=True)
    ]
    return _read(
        name or real(roots[0]).stem, parts, _splitter(splits, layout.splits, origin),
        image_size, channels, license, embed, progress,
    )  # fmt: skip


def image_list(
    table: str | Path,
    *,
    root: str | Path | None = None,
    splits: str | Path | None = None,
    image_size: int = 84,
    channels: Channels = 3,
    embed: Embed | None = None,
    name: str | None = None,
    license: str = "yours",
    progress: Progress | None = None,
) -> Dataset:
    """Images listed in a CSV with the columns ``path``, ``label`` and optionally ``split``. Without
    that, or if it splits the images of each class, classes are split by the file ``splits`` or by a
    hash, as in `image_folder`."""
    table = Path(table)
    rows = read_rows(table, ("path", "label"))
    tree = Tree.open(table.parent if root is None else root)
    files = set(tree.names)
    missing = [r["path"] for r in rows if r["path"] not in files]
    if missing:
        raise DataError(
            f"{table}: {len(missing)} of {len(rows)} files are missing under {tree.root}, the "
            f"first is {missing[0]!r}"
        )
    found = None
    if "split" in rows[0]:
        for number, row in enumerate(rows, start=2):
            if row["split"] not in SPLITS:
                raise DataError(
                    f"{table}, line {number}: split is {row['split']!r}, it must be one of {SPLITS}"
                )
        found = by_class([r["label"] for r in rows], [r["split"] for r in rows], str(table))
        if found is None:
            warnings.warn(PER_IMAGE.format(table), DataWarning, stacklevel=2)
        elif splits is not None:
            raise DataError(
                f"{table} has a column 'split' already: leave splits out, or drop the column"
            )
    parts = [(tree, [Entry(r["label"], r["path"]) for r in rows])]
    return _read(
        name or table.stem, parts, _splitter(splits, found, str(table)), image_size, channels,
        license, embed, progress,
    )  # fmt: skip


def roots_of(spec: str, separator: str) -> list[Path]:
    """The folders of a text that names one, or several with a separator between them."""
    whole = at_home(spec)
    parts = [at_home(one) for one in spec.split(separator) if one]
    several = len(parts) > 1 and not whole.exists() and any(one.exists() for one in parts)
    return parts if several else [whole]


def _read(
    name: str,
    parts: Parts,
    splitter: Splitter,
    size: int,
    channels: Channels,
    license: str,
    embed: Embed | None,
    progress: Progress | None,
) -> Dataset:
    if embed is not None:
        return embed_images(name, parts, splitter, embed, license=license, progress=progress)
    return load_images(
        name, parts, splitter, size=size, channels=channels, license=license, leave_out=True,
        progress=progress,
    )  # fmt: skip


def _splitter(
    path: str | Path | None, lists: Mapping[str, Sequence[str]] | None, origin: str
) -> Splitter:
    if path is not None:
        return partial(split_by_file, Path(path))
    if lists is None:
        return split_by_hash

    def named(classes: Sequence[str]) -> Mapping[str, tuple[int, ...]]:
        here = set(classes)  # a class may have no readable image
        left = {split: [c for c in names if c in here] for split, names in lists.items()}
        return split_by_name(left, classes, origin)

    return named


def _refuse_overlap(roots: Sequence[str | Path]) -> None:
    paths = [real(root) for root in roots]
    for i, one in enumerate(paths):
        for other in paths[:i] + paths[i + 1 :]:
            if one.is_relative_to(other):
                raise DataError(f"{one} lies in {other}, or is it: name the outer folder alone")


def _empty(tree: Tree, images: Sequence[str]) -> list[str]:
    """A sentence for folders directly in the root without one of its images."""
    if tree.zipped:
        return []
    holding = {n.partition("/")[0] for n in images}
    folders = sorted(p.name for p in tree.root.iterdir() if p.is_dir())
    empty = [f for f in folders if not f.startswith((".", "__MACOSX")) and f not in holding]
    return [f"{tree.root}: no image in {', '.join(map(repr, empty))}"] if empty else []
