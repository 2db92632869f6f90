"""CIFAR-FS and FC100, both from a public CIFAR-100 archive: the binary one, or the Python one."""

from __future__ import annotations

import gzip
import hashlib
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from ibaml import untrusted
from ibaml.tasks.cache import cached
from ibaml.tasks.dataset import Dataset, group, published, split_by_name
from ibaml.tasks.errors import DataError
from ibaml.tasks.sources.unpickle import array, numbers, texts, unpickle

_BINARY, _PYTHON = "cifar-100-binary", "cifar-100-python"
_WANTED = {
    _BINARY: ("train.bin", "test.bin", "fine_label_names.txt", "coarse_label_names.txt"),
    _PYTHON: ("train", "test", "meta"),
}
_PIXELS = 3 * 32 * 32


class _Content(NamedTuple):
    """Images (N, 3072), the number of each one's class and superclass, and their names."""

    pixels: np.ndarray
    fine: Sequence[int]
    coarse: Sequence[int]
    fine_names: list[str]
    coarse_names: list[str]


def cifar100(root: str | Path, kind: Literal["cifar-fs", "fc100"] = "cifar-fs") -> Dataset:
    """CIFAR-100 split by class (CIFAR-FS) or by superclass (FC100); 32×32 color.

    ``root`` holds ``cifar-100-binary.tar.gz`` or ``cifar-100-python.tar.gz``, or the folder in one.
    The binary one is taken first; the pickles of the other are read without loading them.
    """
    if kind not in ("cifar-fs", "fc100"):
        raise DataError(f'kind must be "cifar-fs" or "fc100", got {kind!r}')
    form, raw = _files(Path(root))
    digest = hashlib.sha256(b"".join(hashlib.sha256(raw[n]).digest() for n in sorted(raw)))
    digest.update(kind.encode())

    def build() -> tuple[np.ndarray, dict[str, Any]]:
        content = _of_binary(raw) if form == _BINARY else _of_pickles(raw)
        for numbered, called in (
            (content.fine, content.fine_names), (content.coarse, content.coarse_names)
        ):  # fmt: skip
            if len(numbered) != len(content.pixels):
                raise DataError(f"{form}: {len(content.pixels)} images, {len(numbered)} labels")
            if len(numbered) and not 0 <= min(numbered) <= max(numbered) < len(called):
                raise DataError(f"{form}: a label lies outside the {len(called)} classes")
        names = [content.fine_names[f] for f in content.fine]
        above = {
            content.fine_names[f]: content.coarse_names[c]
            for f, c in zip(content.fine, content.coarse, strict=True)
        }
        order, labels, classes = group(names)
        facts = {"labels": labels.tolist(), "classes": classes, "above": above}
        return content.pixels.reshape(-1, 3, 32, 32)[order], facts

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


def _of_binary(raw: dict[str, bytes]) -> _Content:
    """Records of one byte for the superclass, one for the class, and the pixels."""
    for part in ("train.bin", "test.bin"):
        if not raw[part] or len(raw[part]) % (2 + _PIXELS):
            raise DataError(
                f"{_BINARY}/{part} has {len(raw[part]):,} bytes, not a multiple of {2 + _PIXELS:,}"
            )
    records = np.frombuffer(raw["train.bin"] + raw["test.bin"], np.uint8).reshape(-1, 2 + _PIXELS)
    fine, coarse = (
        raw[f"{level}_label_names.txt"].decode("latin-1").split() for level in ("fine", "coarse")
    )
    return _Content(
        records[:, 2:], records[:, 1].tolist(), records[:, 0].tolist(), fine, coarse
    )  # fmt: skip


def _of_pickles(raw: dict[str, bytes]) -> _Content:
    meta = _keys(raw, "meta", "fine_label_names", "coarse_label_names")
    parts = [_keys(raw, part, "data", "fine_labels", "coarse_labels") for part in ("train", "test")]
    pixels = [array(part["data"], _PYTHON, 2) for part in parts]
    if any(p.shape[1] != _PIXELS for p in pixels):
        raise DataError(f"{_PYTHON}: an image must have {_PIXELS:,} numbers")
    fine, coarse = (
        [
            n
            for part in parts
            for n in numbers(part[f"{level}_labels"], f"{_PYTHON}: {level}_labels")
        ]
        for level in ("fine", "coarse")
    )
    return _Content(
        np.concatenate(pixels), fine, coarse,
        texts(meta["fine_label_names"], f"{_PYTHON}: fine_label_names"),
        texts(meta["coarse_label_names"], f"{_PYTHON}: coarse_label_names"),
    )  # fmt: skip


def _keys(raw: dict[str, bytes], part: str, *needed: str) -> dict[str, Any]:
    content = unpickle(raw[part], part)
    for key in needed:
        if key not in content:
            raise DataError(f"{_PYTHON}/{part}: has no {key!r}")
    return content


def _files(root: Path) -> tuple[str, dict[str, bytes]]:
    """Which of the two forms is there, and the contents of its files."""
    for form, wanted in _WANTED.items():
        folder, archive = root / form, root / f"{form}.tar.gz"
        try:
            if folder.is_dir():
                return form, {n: untrusted.content(folder / n, untrusted.MEMBER) for n in wanted}
            if archive.exists():
                return form, _unpacked(archive, form, wanted)
        except untrusted.Refused as error:
            raise DataError(f"{folder if folder.is_dir() else archive} {error}") from error
        except OSError as error:
            raise DataError(f"{error.filename or archive}: {error.strerror or error}") from error
    raise DataError(
        f"{root}: found neither {_BINARY}.tar.gz nor {_PYTHON}.tar.gz, nor a folder of that name"
    )


def _unpacked(archive: Path, form: str, wanted: Sequence[str]) -> dict[str, bytes]:
    contents = {}
    with untrusted.opened(archive) as file:
        try:
            unzipped = untrusted.Bounded(
                gzip.GzipFile(fileobj=file), untrusted.MEMBER, untrusted.UNPACKED
            )
            with tarfile.open(fileobj=unzipped, mode="r:") as tar:
                for count, member in enumerate(tar):
                    if count > 100:
                        raise untrusted.Refused("holds more files than CIFAR-100")
                    short = member.name.removeprefix(f"{form}/")
                    if short in wanted and member.isreg() and member.size <= untrusted.MEMBER:
                        stream = tar.extractfile(member)
                        assert stream is not None
                        contents[short] = stream.read()
        except untrusted.Refused:
            raise
        except Exception as error:  # the parser may raise anything on a broken file
            reason = untrusted.first_line(error)
            raise DataError(f"{archive}: damaged archive ({reason})") from error
    if missing := set(wanted) - set(contents):
        raise DataError(f"{archive}: has no {', '.join(sorted(missing))}")
    return contents
