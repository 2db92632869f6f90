"""How are files read from a folder or a zip archive? Archives are read in place, not trusted."""

from __future__ import annotations

import hashlib
import os
import stat
import zipfile
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path, PurePosixPath

from ibaml import untrusted
from ibaml.files import at_home, real
from ibaml.tasks.archive import is_zip, opened_zip, read_member
from ibaml.tasks.errors import DataError


@dataclass(frozen=True)
class Tree:
    """Files by their relative name with ``/`` between the parts, in sorted order.

    Nothing is extracted from an archive. A member that points outside it (``..``, an absolute path,
    a link) makes the whole archive refused.
    """

    root: Path
    names: tuple[str, ...]
    zipped: bool

    @classmethod
    def open(cls, root: str | Path) -> Tree:
        root = at_home(root)
        if root.is_dir():
            return cls(root, tuple(sorted(_walk(root))), False)
        if not root.exists():
            raise DataError(f"{root} does not exist")
        if not is_zip(root):
            raise DataError(f"{root} is neither a folder nor a zip archive")
        with opened_zip(root) as archive:
            names = [_safe(info, root) for info in archive.infolist() if not info.is_dir()]
        names = sorted(n for n in names if not _litter(n))
        if twice := next((one for one, other in pairwise(names) if one == other), None):
            raise DataError(f"{root}: refused, holds {twice!r} twice")
        return cls(root, tuple(names), True)

    @contextmanager
    def reading(self) -> Iterator[Callable[[str], bytes]]:
        """A function that returns the content of a named file; a `DataError` if it cannot be read.
        Threads may share it."""
        if not self.zipped:
            yield self._read_file
            return
        with opened_zip(self.root) as archive:
            yield partial(self._read_member, archive)

    def _read_file(self, name: str) -> bytes:
        try:
            return untrusted.content(self.root / name, untrusted.MEMBER)
        except untrusted.Refused as error:
            raise DataError(f"{name} {error}") from error
        except OSError as error:
            raise DataError(f"{name}: {error.strerror or error}") from error

    def _read_member(self, archive: zipfile.ZipFile, name: str) -> bytes:
        try:
            return read_member(archive, name)
        except DataError as error:
            raise DataError(f"{self.root}: {error}") from error

    def read_all(self, names: list[str]) -> Iterator[tuple[str, bytes]]:
        """The contents of the named files, in the same order."""
        with self.reading() as read:
            for name in names:
                yield name, read(name)

    def read(self, name: str) -> bytes:
        return next(self.read_all([name]))[1]

    def fingerprint(self, names: Sequence[str]) -> str:
        """A digest that changes with the content: of an archive's bytes, or of the paths, sizes and
        times of files in a folder (reading them all would take as long as decoding them)."""
        digest = hashlib.sha256()
        if self.zipped:
            with untrusted.opened(self.root) as file:
                while block := file.read(2**20):
                    digest.update(block)
        else:
            digest.update(f"{real(self.root)}\n".encode(errors="surrogateescape"))
            root = str(self.root)
            for name in names:
                facts: tuple[object, ...] = (name,)
                with suppress(OSError):  # a file that was removed meanwhile is reported when read
                    i = os.stat(f"{root}/{name}")
                    facts = (name, i.st_size, i.st_mtime_ns, i.st_ctime_ns, i.st_ino)
                digest.update(repr(facts).encode())
        return digest.hexdigest()


_LITTER = (".", "__MACOSX")  # how names begin that are hidden, or were added by an archiver


def _walk(root: Path) -> Iterator[str]:
    """The regular files under a folder. A link to a folder is followed if that was not visited
    yet, so each folder is read once, and a cycle ends; real folders come before links to them."""
    here = real(root)
    visited = {_identity(here)}
    waiting, links, found = deque([""]), deque[str](), 0
    while waiting or links:
        prefix = waiting.popleft() if waiting else links.popleft()
        if prefix and (root / prefix.rstrip("/")).is_symlink():
            target = real(root / prefix)
            if _identity(target) in visited or here.is_relative_to(target):
                continue
            visited.add(_identity(target))
        for entry in sorted(_entries(root / prefix), key=lambda one: one.name):
            if entry.name.startswith(_LITTER):
                continue
            link = entry.is_symlink()
            if link and os.path.isdir(entry.path):
                links.append(f"{prefix}{entry.name}/")
            elif entry.is_dir(follow_symlinks=False):
                if (identity := _identity(Path(entry.path))) not in visited:
                    visited.add(identity)
                    waiting.append(f"{prefix}{entry.name}/")
            # a broken link counts as a file, which is then said to be unreadable
            elif (
                (os.path.isfile(entry.path) or not os.path.exists(entry.path))
                if link
                else (
                    entry.is_file(follow_symlinks=False)  # known without another call
                )
            ):
                found += 1
                if found > untrusted.FILES:
                    raise DataError(
                        f"{root} holds more than {untrusted.FILES:,} files: name a folder in it"
                    )
                yield f"{prefix}{entry.name}"


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except OSError as error:
        raise DataError(
            f"{folder} cannot be read ({error.strerror or error}): change its permissions, or move "
            "it out"
        ) from error


def _identity(folder: Path) -> tuple[int, int]:
    facts = folder.stat()
    return facts.st_dev, facts.st_ino


def _litter(name: str) -> bool:
    """Whether a file is hidden, or was added by an archiver."""
    return any(part != "." and part.startswith(_LITTER) for part in name.split("/"))


def _safe(info: zipfile.ZipInfo, root: Path) -> str:
    path = PurePosixPath(info.filename)
    drive = ":" in info.filename.split("/", maxsplit=1)[0] or "\\" in info.filename
    if path.is_absolute() or ".." in path.parts or drive:
        raise DataError(f"{root}: refused, a member's path leaves the archive: {info.filename!r}")
    if stat.S_ISLNK(info.external_attr >> 16):
        raise DataError(f"{root}: refused, a member is a link: {info.filename!r}")
    return info.filename
