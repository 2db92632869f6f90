"""Which datasets have a name? How each is opened, its terms, and where it comes from."""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ibaml.extras import need
from ibaml.files import at_home
from ibaml.kinds import FEATURES, IMAGE_SIZE, LIST, NAMES, kind_of_data, refusal
from ibaml.tasks.cache import cached
from ibaml.tasks.dataset import SPLITS, Dataset, feature_vectors
from ibaml.tasks.download import Remote
from ibaml.tasks.embedding import Embed
from ibaml.tasks.errors import DataError, DataWarning
from ibaml.tasks.sources import cifar100, cub, image_folder, image_list, miniimagenet, omniglot
from ibaml.tasks.sources.decode import Progress
from ibaml.tasks.sources.embedded import embedded
from ibaml.tasks.sources.folder import roots_of
from ibaml.untrusted import parsed_json

if TYPE_CHECKING:
    import numpy as np

_OMNIGLOT = "https://raw.githubusercontent.com/brendenlake/omniglot/master/python"
Opener = Callable[[Path, Progress | None], Dataset]


@dataclass(frozen=True)
class Known:
    """One dataset: its terms, the content of its folder, and the files that may be downloaded."""

    name: str
    about: str
    license: str
    layout: str  # which files its folder holds, and where to get them
    open: Opener | None  # None: rendered, without files
    remotes: tuple[Remote, ...] = ()


CATALOG: dict[str, Known] = {
    known.name: known
    for known in (
        Known(
            "glyphs",
            "characters of many scripts, rendered from the DejaVu fonts; test scripts are new",
            "DejaVu fonts' permissive license",
            "nothing to download: it is rendered on first use",
            None,
        ),
        Known(
            "omniglot",
            "1,623 handwritten characters of 50 alphabets, 20 each, 28×28 gray",
            "MIT",
            "images_background.zip and images_evaluation.zip (or the folders in them)",
            lambda root, progress: omniglot(root, progress=progress),
            (
                Remote(
                    f"{_OMNIGLOT}/images_background.zip",
                    "68d2efa1b9178cc56df9314c21c6e718",
                    "07356096b8076fcf915341f8715e94822249e2a4d5b999fd2d0f6cf9ebffebd5",
                ),
                Remote(
                    f"{_OMNIGLOT}/images_evaluation.zip",
                    "6b91aef0f799c5bb55b94e3f2daec811",
                    "f5165eb5f20d18e13c6515650b69a42a2c0507506969d410ba5e4a1c572bd542",
                ),
            ),
        ),
        Known(
            "miniimagenet",
            "100 classes of 600 color images, 84×84; Ravi–Larochelle split",
            "non-commercial research (ImageNet's terms)",
            "train.csv, val.csv, test.csv beside images/; or one folder per WordNet id; or "
            "mini-imagenet-cache-{train,val,test}.pkl. Ask image-net.org for access",
            lambda root, progress: miniimagenet(root, progress=progress),
        ),
        Known(
            "cifar-fs",
            "CIFAR-100 as 64/16/20 classes, 32×32 color",
            "free for research, cite Krizhevsky (2009)",
            "cifar-100-binary.tar.gz (or -python) from www.cs.toronto.edu/~kriz/cifar.html",
            lambda root, progress: cifar100(root, "cifar-fs"),
        ),
        Known(
            "fc100",
            "CIFAR-100 split by superclass (12/4/4), 32×32 color",
            "free for research, cite Krizhevsky (2009)",
            "cifar-100-binary.tar.gz (or -python) from www.cs.toronto.edu/~kriz/cifar.html",
            lambda root, progress: cifar100(root, "fc100"),
        ),
        Known(
            "cub",
            "200 bird species, 100/50/50, 84×84 color",
            "non-commercial research",
            "CUB_200_2011/images/ from www.vision.caltech.edu/datasets/cub_200_2011",
            lambda root, progress: cub(root, progress=progress),
        ),
    )
}


def data_folder(name: str, root: str | Path | None = None) -> Path:
    """The folder of a named dataset: ``root``, or NAME in ``IBAML_DATA`` (default ``data``)."""
    if root is not None:
        return at_home(root)
    return at_home(os.environ.get("IBAML_DATA", "data")) / name


def open_data(
    spec: str,
    *,
    root: str | Path | None = None,
    splits: str | Path | None = None,
    class_level: int | None = None,
    image_size: int | None = None,
    embed: Embed | None = None,
    progress: Progress | None = None,
) -> Dataset:
    """A dataset by name, or by the path of an image folder (or of several, with ``:`` between them
    as in PATH), a zip of one, a CSV list of images, or an .npz of feature vectors x and labels y.
    Options that such data do not read are refused.

    Args:
        root: the folder of the files of a named dataset or of a list.
        splits: JSON file with the classes of "train", "val" and "test", for your own data.
        class_level: which folders are classes, as in `image_folder`.
        image_size: side of the images of a folder or list, 84 unless given.
        embed: makes vectors of the images.

    >>> open_data("glyphs").members("test")      # doctest: +SKIP
    """
    known, paths = CATALOG.get(spec), roots_of(spec, os.pathsep)
    path = paths[0]
    absent = [str(one) for one in paths if not one.exists()]
    if not spec or (known is None and (spec in NAMES or absent)):
        wrong = absent[0] if len(paths) > 1 else spec
        raise DataError(f"{wrong!r} is neither a path nor one of {', '.join(CATALOG)}")
    kind = kind_of_data(spec)
    given: dict[str, Any] = {
        "root": root, "splits": splits, "image_size": image_size, "class_level": class_level,
        "backbone": embed and embed.name,
    }  # fmt: skip
    if reason := refusal(spec, kind, given):
        raise DataError(reason)
    if known is not None:
        if known.open is None:
            return glyphs() if embed is None else embedded(glyphs(), embed, progress)
        folder = data_folder(spec, root)
        if not folder.exists():
            raise DataError(
                f"{spec}: {folder} does not exist. Put into it: {known.layout}. Or say where it is "
                f"(--root, or IBAML_DATA); `ibaml data get {spec}` helps"
            )
        data = known.open(folder, progress)
        return data if embed is None else embedded(data, embed, progress)
    if kind is FEATURES:
        return _features(path, splits)
    common: dict[str, Any] = {
        "splits": splits, "image_size": IMAGE_SIZE if image_size is None else image_size,
        "embed": embed, "progress": progress,
    }  # fmt: skip
    if kind is LIST:
        return image_list(path, root=root, **common)
    return image_folder(paths, class_level=class_level, **common)


def _features(path: Path, splits: str | Path | Mapping[str, Sequence[str]] | None) -> Dataset:
    """Feature vectors ``x`` and labels ``y`` of an .npz, and what made them of pictures, if
    `ibaml embed` did; nothing in it is executed."""
    from ibaml.tasks.npz import read_npz

    held = read_npz(path, ("x", "y", "split", "embed"))
    if missing := [name for name in ("x", "y") if name not in held]:
        raise DataError(f"{path} has no array {missing[0]!r}: it needs x (N, D) and y (N,)")
    try:
        if splits is None and "split" in held:
            splits = _splits(held["y"], held["split"])
        data = feature_vectors(held["x"], held["y"], splits=splits, name=path.stem)
    except ValueError as error:  # also of four bytes that are no character
        raise DataError(f"{path}: {error}") from error
    if "embed" in held:
        return _of_pictures(data, held["embed"], held["x"], path)
    return data


def _splits(labels: np.ndarray, splits: np.ndarray) -> dict[str, list[str]]:
    """The classes of each split, from the split of every vector."""
    if labels.ndim != 1 or labels.shape != splits.shape:
        raise DataError(f"y is {labels.shape} and split {splits.shape}: one each, (N,)")
    lists: dict[str, set[str]] = {}
    for label, split in zip(labels.tolist(), splits.tolist(), strict=True):
        if split not in ("", *SPLITS):
            raise DataError(f"split {split!r} is none of {', '.join(SPLITS)}")
        if split:
            lists.setdefault(split, set()).add(str(label))
    return {split: sorted(lists[split]) for split in SPLITS if split in lists}


def saved_vectors(data: Dataset) -> dict[str, Any]:
    """The arrays of an .npz that `open_data` reads as the same vectors, which an embedding made."""
    import numpy as np

    assert data.embed is not None
    split_of = {c: split for split, members in data.splits.items() for c in members}
    source = {
        "embed": data.embed.described(), "digest": data.digest, "vectors": _sha(data.examples),
    }  # fmt: skip
    return {
        "x": data.examples,
        "y": np.array(data.classes)[data.labels],
        "files": np.array(data.files),
        "split": np.array([split_of.get(int(c), "") for c in data.labels]),
        "embed": np.array(json.dumps(source)),
    }


def _of_pictures(data: Dataset, text: np.ndarray, x: np.ndarray, path: Path) -> Dataset:
    """Vectors with what made them, and the digest of their pictures if they are those vectors."""
    try:
        source = parsed_json(str(text)) if text.ndim == 0 else None
        if not isinstance(source, dict):
            raise DataError("what made them is not described")
        same = source.get("vectors") == _sha(x)
        return replace(
            data,
            embed=Embed.read(source.get("embed")),
            digest=str(source["digest"]) if same else "",
        )
    except (ValueError, KeyError) as error:
        warnings.warn(
            f"{path}: what is trained on these vectors will not read pictures: {error}",
            DataWarning,
            stacklevel=2,
        )
        return data


def _sha(vectors: np.ndarray) -> str:
    return hashlib.sha256(vectors.tobytes()).hexdigest()


def glyphs(*, per_class: int = 20, seed: int = 0) -> Dataset:
    """The default dataset, which needs no files: rendered on first use, then from the cache."""
    for library in ("matplotlib", "fontTools", "PIL"):  # matplotlib carries the fonts
        need(library, "glyphs", "glyphs")
    import matplotlib
    import numpy as np
    import PIL
    from PIL import features

    from ibaml.tasks.render import known_rendering, render_glyphs

    def build() -> tuple[np.ndarray, dict[str, Any]]:
        made = render_glyphs(per_class=per_class, seed=seed)
        facts = {
            "labels": made.labels.tolist(),
            "classes": made.classes,
            "splits": made.splits,
            "digest": made.digest,
        }
        return made.images, facts

    renderer = (matplotlib.__version__, PIL.__version__, features.version("freetype2"))
    address = hashlib.sha256(repr((per_class, seed, renderer)).encode()).hexdigest()
    images, facts = cached("glyphs", address, build)
    if (per_class, seed) == (20, 0) and not known_rendering(facts["digest"]):
        warnings.warn(
            f"glyphs: this machine's font renderer draws them differently (digest "
            f"{facts['digest'][:12]}): figures may differ slightly from published ones",
            UserWarning,
            stacklevel=2,
        )
    return Dataset(
        "glyphs",
        images,
        np.array(facts["labels"], dtype=np.int64),
        tuple(facts["classes"]),
        {s: tuple(c) for s, c in facts["splits"].items()},
        license=CATALOG["glyphs"].license,
        digest=facts["digest"],
    )
