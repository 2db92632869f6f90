"""What did `ibaml doctor` say of a run? Anybody may have written its file."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ibaml import untrusted
from ibaml.pages.blocks import Block, Commands, Points, Table, Text
from ibaml.pages.words import number, plain
from ibaml.tasks.errors import DataError

if TYPE_CHECKING:
    from ibaml.pages.opened import Opened

FILE = "doctor.json"  # what `ibaml doctor` writes into a run folder
_ROWS = 80  # of a table


def read_doctor(file: Path) -> dict[str, Any] | None:
    """What the doctor wrote; None if there is no such file."""
    if not file.exists():
        return None
    try:
        found = untrusted.parsed_json(untrusted.content(file, untrusted.DOCUMENT))
    except untrusted.Refused as error:
        raise DataError(f"{file} cannot be read: it {error}") from error
    if not isinstance(found, dict):
        raise DataError(f"{file} holds no verdict")
    return found


def doctors(opened: Sequence[Opened]) -> list[Block]:
    """The verdicts, or the command that makes one."""
    blocks: list[Block] = []
    for one in opened:
        prefix = f"{one.name}: " if len(opened) > 1 else ""
        if one.doctor is None:
            command = f"ibaml doctor {shlex.quote(str(one.run.path))}"
            word = f"{one.name} was" if prefix else "This run was"
            text = f"{word} not examined yet. To examine it, and then write this page again:"
            blocks.append(Text(text))
            blocks.append(Commands([("measures gradients, solutions, confidence", command)]))
        else:
            blocks += verdict_blocks(one.doctor, prefix)
    return blocks


def verdict_blocks(doctor: Mapping[str, Any], prefix: str = "") -> list[Block]:
    """A verdict, what follows from it, and what was measured."""
    healthy = not doctor.get("fault")
    verdict = _text(doctor, "verdict") or "There is no verdict."
    blocks: list[Block] = [Text(f"{prefix}{verdict}", "good" if healthy else "warn")]
    if command := _text(doctor, "command"):
        blocks.append(Commands([("what it advises", command)]))
    found = doctor.get("findings")
    others = [one for one in found[1:] if isinstance(one, dict)] if isinstance(found, list) else []
    if sentences := [_text(one, "sentence") for one in others if _text(one, "sentence")]:
        blocks.append(Points("What may follow from it", sentences))
    readings = doctor.get("readings")
    if isinstance(readings, dict) and readings:
        rows = [(str(n), _said(v)) for n, v in islice(readings.items(), _ROWS)]
        caption = "What was looked for, over its threshold: below 1 is fine"
        blocks.append(Table(f"{prefix}{caption}", ("fault", "reading"), rows, folded=True))
    measured = doctor.get("measured")
    if isinstance(measured, dict) and measured:
        rows = list(islice(_flat(measured), _ROWS))
        caption = f"{prefix}All that was measured"
        blocks.append(Table(caption, ("", "value"), rows, words=frozenset({1}), folded=True))
    return blocks


def _text(found: Mapping[str, Any], name: str) -> str:
    value = found.get(name)
    return value.strip() if isinstance(value, str) else ""


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Names and values, those of tables in tables too."""
    for name, found in values.items():
        if isinstance(found, list) and any(isinstance(one, Mapping) for one in found):
            found = {str(place): one for place, one in enumerate(found, start=1)}
        if isinstance(found, Mapping):
            yield from _flat(found, f"{prefix}{name} · ")
        else:
            yield f"{prefix}{name}", _said(found)


def _said(found: Any) -> str:
    if isinstance(found, list):
        return ", ".join(_said(one) for one in found[:20]) or "–"
    if isinstance(found, Mapping):
        return ", ".join(f"{name} {_said(one)}" for name, one in found.items())
    return number(found, 4) if isinstance(found, float) else plain(found)
