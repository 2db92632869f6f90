"""How is a file written: whole, or not at all."""

from __future__ import annotations

import os
import tempfile
from contextlib import suppress
from pathlib import Path


def real(path: str | Path) -> Path:
    """The absolute path, with links and ~ followed. Links in a circle, or somebody who has no home,
    are left as they are, for whoever opens it to refuse."""
    return Path(os.path.realpath(os.path.expanduser(path)))


def at_home(path: str | Path) -> Path:
    """The path with ~ followed likewise."""
    return Path(os.path.expanduser(path))


def write_whole(path: Path, content: bytes | str) -> None:
    """Write a file so that a reader finds the old content or the new one, never half of it, even
    after a power failure."""
    data = content.encode() if isinstance(content, str) else content
    handle, name = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(name)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # makes the rename itself durable
    finally:
        os.close(folder)
