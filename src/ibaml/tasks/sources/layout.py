"""Which class, and which split, does the path of an image in a folder mean?

The class is the innermost folder that holds the image, or the folder at a level that is named.
Folders named train, val and test are no classes but splits, above the classes or inside them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ibaml.tasks.dataset import SPLITS
from ibaml.tasks.errors import DataError

_SPLIT_NAMES = {"train": "train", "val": "val", "valid": "val", "validation": "val", "test": "test"}
Path = tuple[str, ...]
PER_IMAGE = (
    "{} splits the images of each class. Few-shot tasks need classes that are new in the test: the "
    "images of a class were put together, and the classes are split"
)


@dataclass(frozen=True)
class Layout:
    """The class of every image; the classes of each split, if the folders say; and what a person
    should know of how the folders were read."""

    classes: tuple[str, ...]
    splits: Mapping[str, Sequence[str]] | None
    notes: tuple[str, ...]


def read_layout(names: Sequence[str], origin: str, class_level: int | None = None) -> Layout:
    """The layout of images by their names, relative to their root.

    Args:
        origin: what messages call the root.
        class_level: 1 takes the folders directly in the root as classes, 2 those in them, …;
            folders of splits do not count.

    >>> read_layout(["fruit/apple/1.jpg", "fruit/pear/1.jpg"], "photos").classes
    ('apple', 'pear')
    """
    if class_level is not None and class_level < 1:
        raise DataError(f"class_level must be 1 or more, got {class_level}")
    above = [name.rpartition("/")[0] for name in names]  # many images have the same
    parts = {one: tuple(p for p in one.split("/") if p not in (".", "")) for one in set(above)}
    folders = [parts[one] for one in above]
    splits: list[str | None]
    if (outer := _outer(folders, names, origin)) is not None:
        splits = [_SPLIT_NAMES[path[outer].casefold()] for path in folders]
        folders = [path[:outer] + path[outer + 1 :] for path in folders]
    else:
        folders, splits = _inner(folders, names, origin, class_level)
    for name, path in zip(names, folders, strict=True):
        if not path:
            raise DataError(
                f"{origin}: {name} lies in no class folder: put images into one folder per class"
            )
        if class_level is not None and len(path) < class_level:
            raise DataError(
                f"{origin}: {name} lies above level {class_level}: use --class-level {len(path)} "
                "or less, or leave it out for the innermost folders"
            )
    paths = [path[:class_level] for path in folders]
    called = _shortest(set(paths))
    classes = tuple(called[path] for path in paths)
    found = by_class(classes, splits, origin)
    notes = [] if class_level is not None else _notes(set(paths), called, origin)
    if found is None and any(splits):
        notes.append(PER_IMAGE.format(origin))
    return Layout(classes, found, tuple(notes))


def by_class(
    classes: Sequence[str], splits: Sequence[str | None], origin: str
) -> dict[str, list[str]] | None:
    """The classes of each split, from the split of every image; None if the images of each class
    are split (all classes are in the training split). What is neither is refused."""
    members: dict[str, set[str]] = {}
    for name, split in zip(classes, splits, strict=True):
        if split is not None:
            members.setdefault(split, set()).add(name)
    if not members:
        return None
    twice = {
        name: [s for s in SPLITS if name in members.get(s, ())]
        for name in sorted(set(classes))
        if sum(name in names for names in members.values()) > 1
    }
    if not twice:
        return {s: sorted(members[s]) for s in SPLITS if s in members}
    if all(names <= members.get("train", set()) for names in members.values()):
        return None
    name, (one, other, *_) = next(iter(twice.items()))
    raise DataError(
        f"{origin}: class {name!r} is in two splits, {one} and {other}, and others are in one: "
        "what is tested must be new, so move it into one; or have all classes in train, for splits "
        "by hash"
    )


def _outer(folders: Sequence[Path], names: Sequence[str], origin: str) -> int | None:
    """The level of split folders above the classes, below folders that hold everything."""
    if not folders:
        return None
    level = 0
    while _shared(folders, level):
        level += 1
    here = {path[level] for path in folders if len(path) > level}
    if not any(map(_is_split, here)):
        return None
    for name, path in zip(names, folders, strict=True):
        if len(path) <= level or not _is_split(path[level]):
            beside = repr(path[level]) if len(path) > level else name
            one = next(other for other in sorted(here) if _is_split(other))
            raise DataError(
                f"{origin}: {beside} lies beside folders named like splits ({one}): move it out, "
                "or name the folder to read"
            )
    return level


def _shared(folders: Sequence[Path], level: int) -> bool:
    """Whether all images lie in one folder of this level that is not named like a split."""
    first = folders[0][level : level + 1]
    return bool(first) and not _is_split(first[0]) and all(
        path[level : level + 1] == first for path in folders
    )  # fmt: skip


def _inner(
    folders: Sequence[Path], names: Sequence[str], origin: str, level: int | None
) -> tuple[list[Path], list[str | None]]:
    """Folders without those of splits inside classes, and the split of every image."""

    def split_inside(path: Path) -> tuple[Path, str | None]:
        levels = range(max(1, level or len(path) - 1), len(path))
        at = next((i for i in levels if _is_split(path[i])), None)
        if at is None:
            return path, None
        return path[:at] + path[at + 1 :], _SPLIT_NAMES[path[at].casefold()]

    read = {path: split_inside(path) for path in set(folders)}
    found = [read[path][0] for path in folders]
    splits = [read[path][1] for path in folders]
    if any(splits) and not all(splits):
        name = next(n for n, s in zip(names, splits, strict=True) if s is None)
        other = next(n for n, s in zip(names, splits, strict=True) if s is not None)
        raise DataError(
            f"{origin}: {name} is in no split, and {other} is: move the images of each class into "
            "folders named train, val and test, or rename those, or give --class-level"
        )
    return found, splits


def _is_split(folder: str) -> bool:
    return folder.casefold() in _SPLIT_NAMES


def _shortest(paths: Iterable[Path]) -> dict[Path, str]:
    """A name for every class: its folder's, with as many folders above as tell it from others."""
    length = dict.fromkeys(sorted(paths), 1)
    while True:
        named: dict[str, list[Path]] = {}
        for path, n in length.items():
            named.setdefault("/".join(path[-n:]), []).append(path)
        alike = [path for same in named.values() if len(same) > 1 for path in same]
        if not alike:
            return {path: "/".join(path[-n:]) for path, n in length.items()}
        for path in alike:
            length[path] += 1


def _notes(paths: set[Path], called: Mapping[Path, str], origin: str) -> list[str]:
    for path in sorted(paths):
        below = [other for other in sorted(paths) if len(path) < len(other) and
                 other[: len(path)] == path]  # fmt: skip
        if below:
            return [
                f"{origin}: {'/'.join(path)} holds images, and so does {'/'.join(below[0])} in it: "
                f"they are two classes, {called[path]!r} and {called[below[0]]!r}; "
                f"--class-level {len(path)} makes one of them"
            ]
    return []
