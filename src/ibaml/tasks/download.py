"""How is a dataset file downloaded, complete and verified?

It is written as `<name>.part`, continued after an interruption, and renamed only when its checksum
is the expected one.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

from ibaml.tasks.errors import DataError
from ibaml.tasks.tree import Tree

Report = Callable[[int, int | None], None]
"""Called with the bytes so far and the bytes in all (None if unknown)."""

BACKOFF = 0.5  # seconds before the second attempt, doubled before each one after it


class DownloadError(RuntimeError):
    """A download failed, or gave another file; the message says how to download it by hand."""


@dataclass(frozen=True)
class Remote:
    """A file to download: its address, and its SHA-256 (or MD5, where that is what is published)
    in hexadecimal digits.

    ``contents`` is the SHA-256 of the files in a zip (their names and SHA-256s, in order), where
    the zip's own is not known. It then decides alone: nobody can make two zips of different files
    with the same one, and a zip that was packed again has it too.
    """

    url: str
    checksum: str
    contents: str | None = None

    @property
    def name(self) -> str:
        """The file's name: the last part of the address."""
        return urlsplit(self.url).path.rsplit("/", 1)[-1]

    @property
    def algorithm(self) -> str:
        """Which digest the checksum is, by its length."""
        return "md5" if len(self.checksum) == 32 else "sha256"

    def digest(self, path: Path) -> str:
        with path.open("rb") as file:
            return hashlib.file_digest(file, self.algorithm).hexdigest()

    def problem(self, path: Path) -> str | None:
        """What shows that a file is another one; None if it is this one."""
        if self.contents is None:
            found, expected, kind = self.digest(path), self.checksum, self.algorithm
        else:
            try:
                found, expected, kind = contents_of(path), self.contents, "sha256 of the contents"
            except DataError as error:
                return str(error)
        return None if found == expected else f"expected {kind} {expected}, found {found}"


def contents_of(archive: Path) -> str:
    """The SHA-256 of the names and SHA-256s of the files in a zip."""
    tree, digest = Tree.open(archive), hashlib.sha256()
    for name, content in tree.read_all(list(tree.names)):
        digest.update(name.encode() + b"\0" + hashlib.sha256(content).digest())
    return digest.hexdigest()


def fetch(
    remote: Remote,
    folder: Path,
    report: Report | None = None,
    *,
    attempts: int = 4,
    timeout: float = 30.0,
) -> Path:
    """The path of the file in the folder; it is downloaded if it is not there.

    Args:
        report: called as the bytes arrive; the count falls back to 0 if the download starts over.
        attempts: how often to try when the connection drops or the server answers 5xx.
        timeout: seconds to wait for the server, each time.
    """
    path = Path(folder) / remote.name
    if path.is_file() and remote.problem(path) is None:
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    for attempt in range(attempts):
        if attempt:
            time.sleep(BACKOFF * 2 ** (attempt - 1))
        try:
            continued = _receive(remote.url, part, report, timeout)
        except _Failure as failure:
            reason = str(failure)
            if not failure.passing:
                break
            continue
        problem = remote.problem(part)
        if problem is None:
            os.replace(part, path)
            return path
        part.unlink()
        reason = problem
        if not continued:  # a fresh download with wrong content: trying again is useless
            break
    raise DownloadError(
        f"could not download {remote.url}: {reason}. Download it by hand and save it as {path} "
        f"({remote.algorithm} {remote.checksum})"
    )


class _Failure(Exception):
    """A request failed; says whether another attempt may succeed."""

    def __init__(self, message: str, passing: bool = True) -> None:
        super().__init__(message)
        self.passing = passing


def _receive(url: str, part: Path, report: Report | None, timeout: float) -> bool:
    """Append what is missing to the part; True if an earlier part was continued."""
    start = part.stat().st_size if part.is_file() else 0
    asked = {"User-Agent": "ibaml"} | ({"Range": f"bytes={start}-"} if start else {})
    try:
        with urlopen(Request(url, headers=asked), timeout=timeout) as response:
            got = start if response.status == 206 else 0
            total = None if response.length is None else got + response.length
            continued = got > 0
            with part.open("ab" if continued else "wb") as file:
                while chunk := response.read1(2**18):
                    file.write(chunk)
                    got += len(chunk)
                    if report is not None:
                        report(got, total)
    except HTTPError as error:
        error.close()
        if error.code == 416 and start:  # the part is complete
            return True
        passing = error.code >= 500 or error.code in (408, 429)
        raise _Failure(f"HTTP {error.code} {error.reason}", passing) from error
    except (OSError, HTTPException) as error:
        raise _Failure(str(error.reason if isinstance(error, URLError) else error)) from error
    if total is not None and got < total:
        raise _Failure(f"dropped after {got} of {total} bytes")
    return continued
