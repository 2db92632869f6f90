"""How is a zip archive read, in place and within limits? Image archives and .npz files are zips."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from ibaml import untrusted
from ibaml.tasks.errors import DataError

_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2)


def is_zip(path: Path) -> bool:
    """Whether a regular file is a zip archive."""
    try:
        with untrusted.opened(path) as file:
            return zipfile.is_zipfile(file)
    except untrusted.Refused as error:
        raise DataError(f"{path} {error}") from error
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}") from error


@contextmanager
def opened_zip(path: Path) -> Iterator[zipfile.ZipFile]:
    """An archive whose list of files has been read; a `DataError` if it cannot be."""
    with ExitStack() as stack:
        try:
            file = stack.enter_context(untrusted.opened(path))
            bounded = untrusted.Bounded(file, untrusted.DIRECTORY)
            archive = zipfile.ZipFile(bounded)
            if len(archive.infolist()) > untrusted.FILES:
                raise untrusted.Refused(f"holds more than {untrusted.FILES:,} files")
            if not all(info.filename for info in archive.infolist()):
                raise untrusted.Refused("holds a file without a name")
        except untrusted.Refused as error:
            raise DataError(f"{path} {error}") from error
        except OSError as error:
            raise DataError(f"{path}: {error.strerror or error}") from error
        except Exception as error:  # the parser may raise anything on a broken file
            reason = untrusted.first_line(error)
            raise DataError(f"{path}: damaged archive ({reason})") from error
        yield archive


def read_member(archive: zipfile.ZipFile, name: str, most: int = untrusted.MEMBER) -> bytes:
    """The content of a member; a `DataError` begins with its name."""
    info = archive.getinfo(name)
    if info.compress_type not in _METHODS:  # LZMA may ask for 4 GB to unpack a few bytes
        raise DataError(
            f"{name} is packed by method {info.compress_type}, which is not read: pack the archive "
            "again by deflate, the usual one"
        )
    try:
        with archive.open(info) as member:
            data = member.read(most + 1)
    except Exception as error:  # a decoder may raise anything on a broken file
        reason = untrusted.first_line(error)
        raise DataError(
            f"{name} cannot be read ({reason}); is the archive damaged or encrypted?"
        ) from error
    if len(data) > most:
        raise DataError(f"{name} unpacks to more than {most:,} bytes")
    return data
