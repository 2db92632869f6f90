"""How is a file read that nobody vouches for? Within limits, all of which are here.

Images, archives, tables, settings, checkpoints and saved learners may come from anyone. docs/
security.md says what is promised. Whoever reads one names what it is; `Refused` becomes the error
of that reader.
"""

from __future__ import annotations

import io
import json
import os
import stat
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

KB, MB, GB = 2**10, 2**20, 2**30

# --- the limits ----------------------------------------------------------------------------------

SETTINGS = 256 * KB  # bytes of a TOML file
DOTS = 100  # in one line of it: names with more parts take the parser minutes
DOCUMENT = 64 * MB  # of a JSON file: a run's config.json, a list of splits, facts of a cache
DEPTH = 64  # of brackets in TOML and JSON
TABLE = 256 * MB  # of a CSV or TSV
CELLS = 20_000_000  # in one: rows times columns
LOG = 1 * GB  # of a run's log.jsonl
ARTIFACT = 16 * GB  # of a checkpoint, or a saved learner or posterior
HEADER = 64 * MB  # of the JSON at the beginning of one
NUMBERS = 2**30  # in the examples of a saved posterior
MEMBER = 256 * MB  # of one file in a folder or an archive
FILES = 2_000_000  # in a folder or an archive: a link to a whole disk is not followed to its end
DIRECTORY = 512 * MB  # of the list of files in a zip
UNPACKED = 1 * GB  # of a tar archive, unpacked
PICTURE = 64_000_000  # of an image file that a person names
PIXELS = 64_000_000  # of a picture; twice as many of a JPEG that is embedded, which is read smaller
ARRAY = 16 * GB  # of one array in an .npz, unpacked
SPARSE = 1 * GB  # of one that unpacks to more than RATIO times its packed size
RATIO = 20
PICKLE = 2 * GB  # of a dataset's pickle
OPCODES = 5_000_000  # in it: about five seconds

# the page of `ibaml serve`
UPLOAD = 32 * MB  # of a photograph, one in a request
REQUEST = 64 * KB  # of any other request
SHOWN = 2000  # photographs on it
NAME = 200  # letters of a file's or a class's name
DECODING = 10  # seconds for a photograph
DECODER = 2 * GB  # memory of the process that decodes it
ARRIVAL = 30  # seconds until a request must have come
CONNECTIONS = 64  # at once


class Refused(ValueError):
    """A file is not read; the message says why, and begins after the name of the file."""


def content(path: Path, most: int) -> bytes:
    """The bytes of a regular file of limited size. A pipe or a device is refused unopened: reading
    one may never end.

    Raises:
        Refused: it is no regular file, or too large.
        OSError: it cannot be read.
    """
    with opened(path) as file:
        size = os.fstat(file.fileno()).st_size
        pieces = [file.read(size + 1)] if size <= most else []  # read(n) takes n bytes at once
        while pieces and pieces[-1] and size <= most:  # it may grow meanwhile, or hide its size
            size = sum(map(len, pieces))
            pieces.append(file.read(MB))
    if size > most:
        raise Refused(f"has more than {most:,} bytes")
    if None in pieces:  # one of /proc, say, that is not opened to be waited for
        raise Refused("has nothing to read, and may never have")
    return b"".join(pieces)


@contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """A regular file, open to be read; raises as `content` does."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise Refused("is a folder" if path.is_dir() else "is no regular file (a pipe, a device?)")
    # it may be exchanged in between: a pipe without a writer then does not block
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    with open(os.open(path, flags), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise Refused("is no regular file (a pipe, a device?)")
        yield file


class Bounded(io.RawIOBase):
    """A file of which limited pieces are read, up to a limited place.

    Readers of archives ask for as many bytes as a header in the archive claims.
    """

    def __init__(self, file: Any, piece: int, end: int | None = None) -> None:
        self._file, self._piece, self._end = file, piece, end

    def read(self, size: int = -1, /) -> bytes:
        if size > self._piece or size < 0:
            data = self._file.read(self._piece + 1)
            if len(data) > self._piece:
                raise Refused(f"asks for more than {self._piece:,} bytes at once")
        else:
            data = self._file.read(size)
        self._check(self.tell())
        return data

    def seek(self, offset: int, whence: int = 0, /) -> int:
        if whence == 0:
            self._check(offset)
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def _check(self, place: int) -> None:
        if self._end is not None and place > self._end:
            raise Refused(f"unpacks to more than {self._end:,} bytes")


def parsed_json(text: bytes | str) -> Any:
    """The value of a JSON text, nested within the limit; `Refused` if it is not one."""
    try:
        value = json.loads(text.decode("utf-8") if isinstance(text, bytes) else text)
    except (ValueError, RecursionError) as error:
        raise Refused(f"is not JSON ({first_line(error)})") from error
    _shallow(value)
    return value


def header_of(content: bytes) -> dict[str, Any]:
    """The texts by name in the header of a safetensors file; `Refused` if it has none."""
    size = int.from_bytes(content[:8], "little")
    if size > HEADER:
        raise Refused(f"has a header of more than {HEADER:,} bytes")
    header = parsed_json(content[8 : 8 + size])
    texts = header.get("__metadata__") if isinstance(header, dict) else None
    if not isinstance(texts, dict):
        raise Refused("has no header")
    return texts


def parsed_toml(text: bytes) -> dict[str, Any]:
    """The values of a TOML text, nested within the limit; `Refused` if it is not one."""
    try:
        decoded = text.decode("utf-8")
        if any(line.count(".") > DOTS for line in decoded.splitlines()):
            raise Refused(f"has a line with more than {DOTS} dots")
        value = tomllib.loads(decoded)
    except (ValueError, RecursionError) as error:
        if isinstance(error, Refused):
            raise
        raise Refused(f"is not TOML: {first_line(error)}") from error
    _shallow(value)
    return value


def _shallow(value: Any) -> None:
    """Refuse what nests deeper than the limit: whoever prints or copies it would fail."""
    level, depth = [value], 0
    while level:
        if depth > DEPTH:
            raise Refused(f"nests more than {DEPTH} deep")
        level = [
            inner for one in level if isinstance(one, dict | list)
            for inner in (one.values() if isinstance(one, dict) else one)
        ]  # fmt: skip
        depth += 1


def first_line(error: BaseException) -> str:
    """What an error of somebody else's parser says, in one line."""
    return (str(error).splitlines() or [""])[0][:300] or type(error).__name__
