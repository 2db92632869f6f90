"""CIFAR-FS and FC100, both from the public CIFAR-100 python archive."""

from __future__ import annotations

import hashlib
import tarfile
import zlib
from pathlib import Path
from typing import Any, Literal

import numpy as np

from ibaml.tasks.cache import cached
from ibaml.tasks.dataset import Dataset, group, published, split_by_name
from ibaml.tasks.errors import DataError
from ibaml.tasks.sources.unpickle import array, texts, unpickle
from ibaml.tasks.tree import MAX_MEMBER

_FOLDER = "cifar-100-python"


def cifar100(root: str | Path, kind: Literal["cifar-fs", "fc100"] = "cifar-fs") -> Dataset:
    """CIFAR-100 split by class (CIFAR-FS) or by superclass (FC100); 32×32 color.

    ``root`` holds ``cifar-100-python.tar.gz`` or the folder ``cifar-100-python``; its pickles are
    read without running them.
    """
    if kind not in ("cifar-fs", "fc100"):
        raise DataError(f'kind must be "cifar-fs" or "fc100", got {kind!r}')
    raw = _files(Path(root))
    digest = hashlib.sha256(b"".join(hashlib.sha256(raw[n]).digest() for n in sorted(raw)))
    digest.update(kind.encode())

    def build() -> tuple[np.ndarray, dict[str, Any]]:
        meta = _keys(raw, "meta", "fine_label_names", "coarse_label_names")
        fine, coarse = texts(meta["fine_label_names"]), texts(meta["coarse_label_names"])
        pixels, names, above = [], [], {}
        for part in ("train", "test"):
            content = _keys(raw, part, "data", "fine_labels", "coarse_labels")
            if max(content["fine_labels"]) >= len(fine):
                raise DataError(f"{part}: a label lies outside the {len(fine)} classes")
            pixels.append(array(content["data"], part, 2).reshape(-1, 3, 32, 32))
            for f, c in zip(content["fine_labels"], content["coarse_labels"], strict=True):
                names.append(fine[f])
                above[fine[f]] = coarse[c]
        order, labels, classes = group(names)
        facts = {"labels": labels.tolist(), "classes": classes, "above": above}
        return np.concatenate(pixels)[order], facts

    images, facts = cached(kind, digest.hexdigest(), build)
    classes = tuple(facts["classes"])
    lists = published(kind)
    if kind == "fc100":
        lists = {s: [c for c in classes if facts["above"][c] in sup] for s, sup in lists.items()}
    return Dataset(
        kind,
        images,
        np.array(facts["labels"], dtype=np.int64),
        classes,
        split_by_name(lists, classes, kind),
        license="free for research, cite Krizhevsky (2009)",
        digest=digest.hexdigest(),
    )


def _keys(raw: dict[str, bytes], part: str, *needed: str) -> dict[str, Any]:
    content = unpickle(raw[part], part)
    for key in needed:
        if key not in content:
            raise DataError(f"{_FOLDER}/{part}: has no {key!r}")
    return content


def _files(root: Path) -> dict[str, bytes]:
    wanted = ("train", "test", "meta")
    folder = root / _FOLDER
    if folder.is_dir():
        return {n: (folder / n).read_bytes() for n in wanted}
    archive = root / f"{_FOLDER}.tar.gz"
    if not archive.exists():
        raise DataError(f"{root}: found neither {archive.name} nor a folder {_FOLDER}")
    contents = {}
    try:
        with tarfile.open(archive, "r:gz") as tar:
            for member in tar:
                short = member.name.removeprefix(f"{_FOLDER}/")
                if short in wanted and member.isfile() and member.size <= MAX_MEMBER:
                    stream = tar.extractfile(member)
                    assert stream is not None
                    contents[short] = stream.read()
    except (tarfile.TarError, EOFError, OSError, zlib.error) as error:
        raise DataError(f"{archive}: damaged archive ({error})") from error
    if missing := set(wanted) - set(contents):
        raise DataError(f"{archive}: has no {', '.join(sorted(missing))}")
    return contents
