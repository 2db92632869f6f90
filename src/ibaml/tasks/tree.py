"""How are files read from a folder or a zip archive? Archives are read in place, not trusted."""

from __future__ import annotations

import hashlib
import os
import stat
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from ibaml.tasks.errors import DataError

MAX_MEMBER = 256 * 2**20  # bytes of one file in an archive


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
        root = Path(root).expanduser()
        if root.is_dir():
            return cls(root, tuple(sorted(_walk(root))), False)
        if not root.exists():
            raise DataError(f"{root} does not exist")
        if not zipfile.is_zipfile(root):
            raise DataError(f"{root} is neither a folder nor a zip archive")
        try:
            with zipfile.ZipFile(root) as archive:
                names = [_safe(info, root) for info in archive.infolist() if not info.is_dir()]
                names = [n for n in names if not _litter(n)]
                if len(set(names)) < len(names):
                    twice = next(n for n in sorted(names) if names.count(n) > 1)
                    raise DataError(f"{root}: refused, holds {twice!r} twice")
        except zipfile.BadZipFile as error:
            raise DataError(f"{root}: damaged archive ({error})") from error
        return cls(root, tuple(sorted(names)), True)

    def read_all(self, names: list[str]) -> Iterator[tuple[str, bytes]]:
        """The contents of the named files, in the same order."""
        if not self.zipped:
            for name in names:
                yield name, (self.root / name).read_bytes()
            return
        with zipfile.ZipFile(self.root) as archive:
            for name in names:
                try:
                    with archive.open(name) as member:
                        data = member.read(MAX_MEMBER + 1)
                except (zipfile.BadZipFile, RuntimeError, zlib.error, EOFError) as error:
                    raise DataError(
                        f"{self.root}: {name} cannot be read ({error}); is the archive damaged or "
                        "encrypted?"
                    ) from error
                if len(data) > MAX_MEMBER:
                    raise DataError(
                        f"{self.root}: {name} unpacks to more than {MAX_MEMBER:,} bytes"
                    )
                yield name, data

    def read(self, name: str) -> bytes:
        return next(self.read_all([name]))[1]

    def fingerprint(self, names: Sequence[str]) -> str:
        """A digest that changes with the content: of an archive's bytes, or of the paths, sizes and
        times of files in a folder (reading them all would take as long as decoding them)."""
        digest = hashlib.sha256()
        if self.zipped:
            with self.root.open("rb") as file:
                while block := file.read(2**20):
                    digest.update(block)
        else:
            digest.update(f"{self.root.resolve()}\n".encode())
            for name in names:
                i = (self.root / name).stat()
                facts = (name, i.st_size, i.st_mtime_ns, i.st_ctime_ns, i.st_ino)
                digest.update(repr(facts).encode())
        return digest.hexdigest()


def _walk(root: Path) -> Iterator[str]:
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(f for f in folders if not _litter(f))
        for file in files:
            if not _litter(file):
                yield (Path(folder) / file).relative_to(root).as_posix()


def _litter(name: str) -> bool:
    """Whether a file is hidden, or was added by an archiver."""
    return any(part != "." and part.startswith((".", "__MACOSX")) for part in name.split("/"))


def _safe(info: zipfile.ZipInfo, root: Path) -> str:
    path = PurePosixPath(info.filename)
    drive = ":" in info.filename.split("/", maxsplit=1)[0] or "\\" in info.filename
    if path.is_absolute() or ".." in path.parts or drive:
        raise DataError(f"{root}: refused, a member's path leaves the archive: {info.filename!r}")
    if stat.S_ISLNK(info.external_attr >> 16):
        raise DataError(f"{root}: refused, a member is a link: {info.filename!r}")
    return info.filename
