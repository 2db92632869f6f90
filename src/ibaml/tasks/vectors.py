"""How is a picture embedded only once? Its vector is kept in the cache, by the picture's content.

One SQLite file for each backbone: many processes may use it at once, and a vector is there or not.
It never holds more than ``MOST`` vectors; those that were not used for longest go first.
"""

from __future__ import annotations

import hashlib
import sqlite3
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from ibaml.tasks.cache import VECTORS, growing
from ibaml.tasks.errors import DataError

MOST = 100_000  # 0.5 GB of 1,280 features
_DAY = 86400
_TABLE = "CREATE TABLE vectors (key BLOB PRIMARY KEY, vector BLOB NOT NULL, used INTEGER NOT NULL)"
_T = TypeVar("_T")


@dataclass
class Vectors:
    """Vectors of ``width`` numbers by the digest of what they describe. A cache that cannot be used
    is warned of once, and then forgotten."""

    name: str
    digest: str
    width: int
    usable: bool = True

    def get(self, keys: Sequence[bytes]) -> dict[bytes, np.ndarray]:
        """Those of the vectors that are known."""
        return self._tried(lambda: self._get(keys), {})

    def put(self, vectors: Mapping[bytes, np.ndarray]) -> None:
        """Keep vectors."""
        self._tried(lambda: self._put(vectors), None)

    def _get(self, keys: Sequence[bytes]) -> dict[bytes, np.ndarray]:
        today, found, stale = int(time.time() // _DAY), {}, []
        with self._open() as base:
            for key in dict.fromkeys(keys):
                row = base.execute(
                    "SELECT vector, used FROM vectors WHERE key = ? AND typeof(vector) = 'blob' "
                    "AND length(vector) = ?",
                    (key, 4 * self.width),
                )
                for content, used in row:
                    found[key] = np.frombuffer(content, "<f4").astype(np.float32)
                    if used != today:
                        stale.append((today, key))
            base.executemany("UPDATE vectors SET used = ? WHERE key = ?", stale)
        return found

    def _put(self, vectors: Mapping[bytes, np.ndarray]) -> None:
        today = int(time.time() // _DAY)
        rows = [(key, v.astype("<f4").tobytes(), today) for key, v in vectors.items()]
        with self._open() as base:
            base.executemany("INSERT OR REPLACE INTO vectors VALUES (?, ?, ?)", rows)
            (count,) = base.execute("SELECT COUNT(*) FROM vectors").fetchone()
            if count > MOST:
                base.execute(
                    "DELETE FROM vectors WHERE key IN "
                    "(SELECT key FROM vectors ORDER BY used, rowid LIMIT ?)",
                    (count - MOST + MOST // 10,),
                )

    @contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        """One transaction; a damaged file is replaced by an empty one."""
        path = growing(f"embeddings-{self.name}", self.digest) / VECTORS
        with closing(sqlite3.connect(path, timeout=30)) as base, base:
            base.execute("PRAGMA trusted_schema = OFF")
            if not (known := _schema(base)):
                base.execute(_TABLE.replace("TABLE", "TABLE IF NOT EXISTS", 1))
            elif known != [_TABLE]:  # of somebody else: a view or trigger may never end
                raise sqlite3.DatabaseError("it is not one of ibaml's")
            yield base

    def _tried(self, do: Callable[[], _T], otherwise: _T) -> _T:
        if not self.usable:
            return otherwise
        try:
            try:
                return do()
            except sqlite3.OperationalError:  # locked, or not writable: the file may be sound
                raise
            except sqlite3.DatabaseError:
                (growing(f"embeddings-{self.name}", self.digest) / VECTORS).unlink(missing_ok=True)
                return do()
        except (sqlite3.Error, DataError, OSError) as error:
            self.usable = False
            warnings.warn(
                f"embeddings are not kept ({error}): set IBAML_CACHE to a folder that can be "
                "written",
                UserWarning,
                stacklevel=2,
            )
            return otherwise


def _schema(base: sqlite3.Connection) -> list[str]:
    """How the tables, views, indices and triggers of a file were made."""
    made = base.execute("SELECT sql FROM sqlite_master WHERE sql IS NOT NULL LIMIT 10")
    return [sql for (sql,) in made]


def key_of(content: bytes | np.ndarray) -> bytes:
    """The digest of an image file's bytes, or of pixels."""
    if isinstance(content, np.ndarray):
        digest = hashlib.sha256(f"pixels {content.shape}".encode())
        digest.update(np.ascontiguousarray(content).tobytes())
        return digest.digest()
    return hashlib.sha256(content).digest()
