"""Omniglot: 1,623 handwritten characters of 50 alphabets, 20 drawings each."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from ibaml.tasks.dataset import Dataset, published, split_by_name
from ibaml.tasks.errors import DataError
from ibaml.tasks.sources.decode import Entry, Progress, is_image, load_images
from ibaml.tasks.tree import Tree


def omniglot(
    root: str | Path,
    *,
    split: Literal["1028", "background"] = "1028",
    image_size: int = 28,
    progress: Progress | None = None,
) -> Dataset:
    """Omniglot from its public zips or folders (``images_background``, ``images_evaluation``).

    Gray, ink bright on black. ``split="1028"`` is the few-shot literature's 1028/172/423
    characters; ``"background"`` is that of its authors: 964 characters to train, 659 to test.
    """
    if split not in ("1028", "background"):
        raise DataError(f'split must be "1028" or "background", got {split!r}')
    root = Path(root)
    parts = []
    for half in ("background", "evaluation"):
        tree = _find(root, f"images_{half}")
        entries = []
        for name in tree.names:
            pieces = name.split("/")
            if is_image(name) and len(pieces) >= 3:
                entries.append(Entry("/".join((half, *pieces[-3:-1])), name))
        parts.append((tree, entries))
    return load_images(
        "omniglot",
        parts,
        _literature if split == "1028" else _authors,
        size=image_size,
        channels=1,
        license="MIT",
        invert=True,
        progress=progress,
    )


def _find(root: Path, name: str) -> Tree:
    for place in (root / f"{name}.zip", root / name, root / "omniglot-py" / name):
        if place.exists():
            return Tree.open(place)
    raise DataError(f"{root}: found neither {name}.zip nor a folder {name}")


def _authors(classes: Sequence[str]) -> dict[str, tuple[int, ...]]:
    halves = {"train": "background/", "test": "evaluation/"}
    return {
        s: tuple(i for i, c in enumerate(classes) if c.startswith(h)) for s, h in halves.items()
    }


def _literature(classes: Sequence[str]) -> dict[str, tuple[int, ...]]:
    lists: dict[str, list[str]] = {}
    for split, alphabets in published("omniglot").items():
        lists[split] = []
        for alphabet, ranges in alphabets.items():
            for span in ranges.split(","):
                first, _, last = span.partition("-")
                numbers = range(int(first), int(last or first) + 1)
                lists[split] += [f"{alphabet}/character{n:02d}" for n in numbers]
    return split_by_name(lists, classes, "Omniglot")
