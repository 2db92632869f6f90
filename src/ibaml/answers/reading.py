"""What did a person hand in as examples and as queries? Pictures, or tables of numbers, as vectors
with names; what cannot be read is told apart."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ibaml.files import at_home
from ibaml.tasks.embedding import Content, Embed, Progress
from ibaml.tasks.errors import DataError
from ibaml.tasks.npz import read_npz
from ibaml.tasks.rows import read_rows
from ibaml.tasks.sources.decode import is_image
from ibaml.tasks.sources.layout import read_layout
from ibaml.tasks.tree import Tree

LABEL, FILE = "label", "file"  # columns of a table that are no features
_TABLES = (".csv", ".tsv")


@dataclass(frozen=True)
class Given:
    """What was read.

    Attributes:
        x: vectors of what could be read, (n, F).
        files: their names.
        labels: their classes; None for queries.
        failed: why others could not be read, by their names.
        source: what turns inputs into such vectors, as JSON.
        pictures: gives the content of a picture by its name; None for tables.
    """

    x: np.ndarray
    files: tuple[str, ...]
    labels: tuple[str, ...] | None
    failed: Mapping[str, str] = field(default_factory=dict)
    source: Mapping[str, Any] = field(default_factory=dict)
    pictures: Callable[[str], bytes] | None = None


def read_examples(
    path: Path,
    backbone: str,
    *,
    label: str | None = None,
    class_level: int | None = None,
    source: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
) -> Given:
    """Examples: class folders of pictures (or a zip), an .npz with x and y, or a table with a
    column ``label``.

    Args:
        backbone: the network for pictures.
        label: the class of all of them, where they have none.
        class_level: see `ibaml.tasks.sources.layout`.
        source: of the examples that are there already; others are refused.
    """
    if path.suffix == ".npz":
        found = _npz(path, labelled=label is None)
    elif path.suffix in _TABLES:
        found = _table(path, labelled=label is None, source=source)
    else:
        found = _pictures(
            path, _embed(source, backbone), progress,
            lambda names: (label,) * len(names) if label is not None
            else read_layout(names, str(path), class_level).classes,
        )  # fmt: skip
    if label is not None:
        found = Given(
            found.x, found.files, (label,) * len(found.x), found.failed, found.source,
            found.pictures,
        )  # fmt: skip
    _same(found, source, path)
    if not len(found.x):
        why = next(iter(found.failed.values()), "it is empty")
        raise DataError(f"{path}: no example can be read ({why})")
    return found


def read_queries(path: Path, source: Mapping[str, Any], progress: Progress | None = None) -> Given:
    """Queries of the same kind as the examples: pictures in a folder (nested or not), a zip or one
    file, an .npz with x, or a table."""
    if path.suffix == ".npz":
        found = _npz(path, labelled=False)
    elif path.suffix in _TABLES:
        found = _table(path, labelled=False, source=source)
    elif source.get("kind") == "pictures":
        found = _pictures(path, _embed(source, ""), progress, None)
    else:
        raise DataError(
            f"{path}: the examples are vectors, so that queries must be an .npz or a table; for "
            "pictures, `ibaml embed` makes vectors of them"
        )
    _same(found, source, path)
    if not found.files and not found.failed:
        raise DataError(f"{path}: there is nothing to answer")
    return found


def _same(found: Given, source: Mapping[str, Any] | None, path: Path) -> None:
    """Refuse vectors of another kind than those that are there."""
    if source is None:
        return
    here, there = found.source.get("embed"), source.get("embed")
    if (here is None) != (there is None):
        what, other = ("pictures", "plain vectors") if here else ("plain vectors", "pictures")
        raise DataError(f"{path}: these are {what}, but the examples are {other}")
    if here and there and here["digest"] != there["digest"]:
        raise DataError(
            f"{path} was embedded by {here['backbone']}, but the examples by {there['backbone']}: "
            "embed both by the same network"
        )
    columns = source.get("columns")
    if columns and found.source.get("columns") and columns != found.source["columns"]:
        raise DataError(f"{path} has the columns {found.source['columns']}, not {columns}")


# --- pictures ------------------------------------------------------------------------------------


def _embed(source: Mapping[str, Any] | None, backbone: str) -> Embed:
    if source is None:
        return Embed(backbone)
    if source.get("kind") != "pictures":
        raise DataError("the examples are no pictures: give an .npz or a table")
    return Embed.read(source["embed"])


def _pictures(
    path: Path,
    embed: Embed,
    progress: Progress | None,
    classes: Callable[[Sequence[str]], Sequence[str | None]] | None,
) -> Given:
    path = at_home(path)
    if path.is_file() and path.suffix.lower() != ".zip":
        tree = Tree(path.parent, (path.name,), False)
        names: Sequence[str] = tree.names
    else:
        tree = Tree.open(path)
        names = [name for name in tree.names if is_image(name)]
    if not names:
        raise DataError(f"{path}: found no pictures in it")
    labels = None if classes is None else classes(names)

    def contents(read: Callable[[str], bytes]) -> Iterator[Callable[[], tuple[str, Content]]]:
        for name in names:
            yield partial(_named, read, name)

    with ExitStack() as stack:
        read = stack.enter_context(tree.reading())
        x, failures = embed.of_contents(contents(read), len(names), progress)
    there = [i for i in range(len(names)) if i not in failures]
    return Given(
        x[there],
        tuple(names[i] for i in there),
        None if labels is None else tuple(str(labels[i]) for i in there),
        {names[i]: why for i, why in sorted(failures.items())},
        {"kind": "pictures", "embed": embed.described()},
        tree.read,
    )


def _named(read: Callable[[str], bytes], name: str) -> tuple[str, Content]:
    return name, read(name)


# --- numbers -------------------------------------------------------------------------------------


def _npz(path: Path, labelled: bool) -> Given:
    parts = read_npz(path, ("x", "y", "files", "embed"))
    x = parts.get("x")
    if x is None or x.ndim != 2 or x.dtype.kind not in "fiu":
        raise DataError(f"{path}: needs an array x of vectors, (n, F)")
    if labelled and (parts.get("y") is None or parts["y"].shape != x.shape[:1]):
        raise DataError(f"{path}: needs an array y, one label for each of the {len(x)} vectors")
    files = parts.get("files")
    if files is None or files.shape != x.shape[:1]:
        files = np.array([f"row {i}" for i in range(len(x))])
    source: dict[str, Any] = {"kind": "vectors"}
    if "embed" in parts:
        try:
            source = {"kind": "pictures", "embed": dict(json.loads(str(parts["embed"]))["embed"])}
            source["embed"]["digest"], source["embed"]["backbone"]
        except (ValueError, TypeError, KeyError) as error:
            raise DataError(f"{path}: its description of the network is damaged") from error
    labels = [str(label) for label in parts["y"].tolist()] if labelled else None
    return _finite(x.astype(np.float32), [str(f) for f in files.tolist()], labels, source)


def _table(path: Path, labelled: bool, source: Mapping[str, Any] | None) -> Given:
    columns = list(source.get("columns", ())) if source else []
    rows = read_rows(path, [*columns, *([LABEL] if labelled else [])])
    columns = columns or [c for c in rows[0] if c not in (LABEL, FILE)]
    if not columns:
        raise DataError(f"{path}: has no column of numbers")
    x = np.empty((len(rows), len(columns)), np.float32)
    for i, row in enumerate(rows):
        for j, column in enumerate(columns):
            try:
                x[i, j] = float(row[column])
            except ValueError:
                raise DataError(
                    f"{path}, line {i + 2}: {column} is {row[column]!r}, which is not a number"
                ) from None
    files = [row.get(FILE) or f"line {i}" for i, row in enumerate(rows, start=2)]
    labels = [row[LABEL] for row in rows] if labelled else None
    return _finite(x, files, labels, {"kind": "table", "columns": columns})


def _finite(
    x: np.ndarray, files: Sequence[str], labels: Sequence[str] | None, source: Mapping[str, Any]
) -> Given:
    """Without vectors that hold a NaN or an infinity, which failed."""
    finite = np.isfinite(x).all(1)
    good, bad = (np.flatnonzero(some).tolist() for some in (finite, ~finite))
    return Given(
        x[good],
        tuple(files[i] for i in good),
        None if labels is None else tuple(labels[i] for i in good),
        {files[i]: "a value is not finite" for i in bad},
        source,
    )
