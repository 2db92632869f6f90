"""Which kind of data does a name or a path mean, and which settings does each kind read?

The name alone decides, so that a run folder can be read without its data.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

IMAGE_SIZE = 84  # for datasets whose images have no fixed size
QUERIES = 15


@dataclass(frozen=True)
class Kind:
    """One kind of data: what it is, and which settings it does not read, with the reasons."""

    what: str
    unread: Mapping[str, str]
    regression: bool = False

    def reads(self, name: str) -> bool:
        return name not in self.unread


_OF_TABLES = {
    **dict.fromkeys(("task", "features", "target"), "it names columns of a table"),
    "first_rows": "it orders the rows of a table",
}
_NO_IMAGES = "it holds no images"
_NO_LEVELS = {"class_level": "its classes are not its folders"}
_ITSELF = "its path says where it is"

GLYPHS = Kind(
    "a built-in dataset",
    {
        "root": "no files are read",
        "splits": "its test classes are other scripts",
        "image_size": "its images are 28×28",
        **_NO_LEVELS,
        **_OF_TABLES,
    },
)
PUBLISHED = Kind(
    "a published dataset",
    {
        "splits": "its splits are the published ones",
        "image_size": "its images have a fixed size",
        **_NO_LEVELS,
        **_OF_TABLES,
    },
)
FOLDER = Kind("a folder or zip of images", {"root": _ITSELF, **_OF_TABLES})
LIST = Kind("a list of images", {**_NO_LEVELS, **_OF_TABLES})
FEATURES = Kind(
    "an .npz of features",
    {
        "root": _ITSELF,
        **dict.fromkeys(("image_size", "rotations", "augment", "backbone"), _NO_IMAGES),
        **_NO_LEVELS,
        **_OF_TABLES,
    },
)
TABLE = Kind(
    "a table",
    {
        "root": _ITSELF,
        **dict.fromkeys(("image_size", "backbone"), _NO_IMAGES),
        **_NO_LEVELS,
        "queries": "all rows of a task besides its shots are queries",
    },
    regression=True,
)
SINUSOIDS = Kind(
    "a family of functions",
    {
        "root": "no files are read",
        "splits": "every split draws its own tasks",
        **dict.fromkeys(("image_size", "backbone"), _NO_IMAGES),
        **_NO_LEVELS,
        **_OF_TABLES,
    },
    regression=True,
)

NAMES: dict[str, Kind] = {
    "sinusoids": SINUSOIDS,
    "glyphs": GLYPHS,
    **dict.fromkeys(("omniglot", "miniimagenet", "cifar-fs", "fc100", "cub"), PUBLISHED),
}


def kind_of_data(spec: str, *, table: bool = False) -> Kind:
    """The kind of data of a name or path; ``table`` says that the columns of a table are named."""
    if spec in NAMES:
        return NAMES[spec]
    suffix = Path(spec).suffix.lower()
    if suffix == ".npz":
        return FEATURES
    if table and suffix != ".zip":
        return TABLE
    return LIST if suffix in (".csv", ".tsv") else FOLDER


def refusal(spec: str, kind: Kind, given: Mapping[str, Any]) -> str | None:
    """The message that refuses the first given setting that this kind of data does not read."""
    for name, reason in kind.unread.items():
        if given.get(name) is not None and given[name] is not False:
            return f"{name} is not read for {spec} ({kind.what}): {reason}. Leave it out"
    return None
