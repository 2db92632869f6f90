"""miniImageNet in its three public layouts, with the Ravi–Larochelle split."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ibaml import untrusted
from ibaml.files import real
from ibaml.tasks.cache import cached
from ibaml.tasks.dataset import SPLITS, Dataset, group, published, split_by_name
from ibaml.tasks.errors import DataError
from ibaml.tasks.images import Channels
from ibaml.tasks.rows import read_rows
from ibaml.tasks.sources.decode import Entry, Progress, is_image, load_images
from ibaml.tasks.sources.unpickle import array, numbers, unpickle
from ibaml.tasks.tree import Tree

LICENSE = "non-commercial research (ImageNet terms)"


def miniimagenet(
    root: str | Path,
    *,
    image_size: int = 84,
    channels: Channels = 3,
    progress: Progress | None = None,
) -> Dataset:
    """miniImageNet from ``train.csv``, ``val.csv``, ``test.csv`` beside ``images/``; from a folder
    per WordNet id; or, where there are no images, from the ``mini-imagenet-cache-*.pkl`` pickles
    (their bytes are read; no pickle is loaded)."""
    root = Path(root)
    pickled = any((root / f"mini-imagenet-cache-{s}.pkl").exists() for s in SPLITS)
    tree = Tree.open(root)
    listed = any((root / f"{s}.csv").exists() for s in SPLITS)
    if listed and ((root / "images").exists() or not pickled):
        entries, lists = _tables(root, tree)
        splitter = partial(split_by_name, lists, origin=str(root))
    else:
        known = {c for names in published("miniimagenet").values() for c in names}
        entries = [
            Entry(n.split("/")[-2], n)
            for n in tree.names
            if is_image(n) and "/" in n and n.split("/")[-2] in known
        ]
        if not entries and pickled:
            return _pickles(root, image_size)
        if not entries:
            raise DataError(
                f"{root}: found none of the public layouts (train.csv + images/, one folder per "
                "WordNet id, mini-imagenet-cache-train.pkl)"
            )
        splitter = partial(split_by_name, _present(entries), origin=str(root))
    return load_images(
        "miniimagenet",
        [(tree, entries)],
        splitter,
        size=image_size,
        channels=channels,
        license=LICENSE,
        progress=progress,
    )


def _tables(root: Path, tree: Tree) -> tuple[list[Entry], dict[str, list[str]]]:
    files = set(tree.names)
    entries, lists = [], {}
    for split in SPLITS:
        table = root / f"{split}.csv"
        if not table.exists():
            continue
        rows = read_rows(table, ("filename", "label"))
        missing = [r["filename"] for r in rows if f"images/{r['filename']}" not in files]
        if missing:
            raise DataError(
                f"{table}: {len(missing)} of {len(rows)} files are not in images/, the first is "
                f"{missing[0]!r}"
            )
        entries += [Entry(r["label"], f"images/{r['filename']}") for r in rows]
        lists[split] = sorted({r["label"] for r in rows})
    return entries, lists


def _present(entries: Sequence[Entry]) -> dict[str, list[str]]:
    """The published splits that are on disk; a split must have all of its classes."""
    files = {e.label for e in entries}
    return {s: names for s, names in published("miniimagenet").items() if files & set(names)}


def _pickles(root: Path, size: int) -> Dataset:
    paths = {s: root / f"mini-imagenet-cache-{s}.pkl" for s in SPLITS}
    paths = {s: path for s, path in paths.items() if path.exists()}
    stats = {s: path.stat() for s, path in paths.items()}
    stamp = repr([(s, i.st_size, i.st_mtime_ns, i.st_ctime_ns, i.st_ino) for s, i in stats.items()])
    digest = hashlib.sha256(f"{size}{real(root)}{stamp}".encode()).hexdigest()

    def build() -> tuple[np.ndarray, dict[str, Any]]:
        images, names, lists = [], [], {}
        for split, path in paths.items():
            pixels, index = _one_pickle(path, size)
            lists[split] = sorted(index)
            for label, rows in index.items():
                images.append(pixels[np.asarray(rows)])
                names += [label] * len(rows)
        order, labels, classes = group(names)
        stacked = np.concatenate(images).transpose(0, 3, 1, 2)[order]
        facts = {"labels": labels.tolist(), "classes": classes, "lists": lists}
        return np.ascontiguousarray(stacked), facts

    images, facts = cached("miniimagenet", digest, build)
    classes = tuple(facts["classes"])
    return Dataset(
        "miniimagenet",
        images,
        np.array(facts["labels"], dtype=np.int64),
        classes,
        split_by_name(facts["lists"], classes, str(root)),
        license=LICENSE,
        digest=digest,
    )


def _one_pickle(path: Path, size: int) -> tuple[np.ndarray, dict[str, list[int]]]:
    try:
        content = unpickle(untrusted.content(path, untrusted.PICKLE), path.name)
    except untrusted.Refused as error:
        raise DataError(f"{path} {error}") from error
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}") from error
    for key in ("image_data", "class_dict"):
        if key not in content:
            raise DataError(f"{path}: there is no {key!r}")
    pixels = array(content["image_data"], str(path), 4)
    if pixels.shape[1:] != (size, size, 3):
        raise DataError(
            f"{path}: images are {pixels.shape[1:]}; pickles are 84×84, so image_size must be 84"
        )
    index = content["class_dict"]
    if not isinstance(index, dict):
        raise DataError(f"{path}: class_dict must be a dictionary from class to rows")
    members = {
        label if isinstance(label, str) else bytes(label).decode("latin-1"): numbers(
            one, f"{path}: the rows of {label!r}"
        )
        for label, one in index.items()
        if isinstance(label, str | bytes)
    }
    if len(members) < len(index):
        raise DataError(f"{path}: class_dict has a class whose name is no text")
    rows = [row for one in members.values() for row in one]
    if rows and not 0 <= min(rows) <= max(rows) < len(pixels):
        raise DataError(f"{path}: class_dict names rows outside the {len(pixels)} images")
    if not rows:
        raise DataError(f"{path}: class_dict names no images")
    if len(set(rows)) < len(rows):
        raise DataError(f"{path}: class_dict names an image in two classes")
    return pixels, members
