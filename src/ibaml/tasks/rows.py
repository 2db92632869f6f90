"""How does a user's CSV or TSV become rows by column name?"""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path

from ibaml import untrusted
from ibaml.tasks.errors import DataError


def read_rows(path: Path, needed: Sequence[str]) -> list[dict[str, str]]:
    """The rows of a CSV or TSV with a header, which must have these columns."""
    origin = str(path)
    try:
        text = untrusted.content(path, untrusted.TABLE).decode("utf-8-sig")
        text = text.replace("\r\n", "\n").replace("\r", "\n")
        first = text.split("\n", 1)[0]
        reader = csv.DictReader(io.StringIO(text), delimiter="\t" if "\t" in first else ",")
        width = max(1, len(reader.fieldnames or []))
        most = untrusted.CELLS // width
        rows: list[Mapping[str, str | None]] = list(islice(reader, most + 1))
        if len(rows) > most:
            raise untrusted.Refused(f"has more than {most:,} rows of {width:,} columns")
    except untrusted.Refused as error:
        raise DataError(f"{origin} {error}") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{origin}: is not UTF-8 text: save it as UTF-8 ({error})") from error
    except csv.Error as error:
        raise DataError(f"{origin}: not a readable table ({error})") from error
    except OSError as error:
        raise DataError(f"{origin}: {error.strerror or error}") from error
    columns = reader.fieldnames or []
    for column in needed:
        if column not in columns:
            raise DataError(f"{origin}: no column {column!r}; it has {', '.join(columns)}")
    if not rows:
        raise DataError(f"{origin}: has no rows")
    for number, row in enumerate(rows, start=2):
        if any(row[c] in (None, "") for c in needed):
            raise DataError(f"{origin}, line {number}: a value of {', '.join(needed)} is missing")
    return [{k: str(v) for k, v in row.items() if k is not None} for row in rows]
