"""What did a reproduction of the paper find? One section for each of its studies."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ibaml import untrusted
from ibaml.pages.blocks import Block, Commands, Page, Points, Section, Table, Text, Tone
from ibaml.pages.pictures import picture_file
from ibaml.pages.words import duration
from ibaml.tasks.errors import DataError

RESULT = "result.json"
_PAPER = "Scalable Bayesian Meta-Learning through Generalized Implicit Gradients"
_LISTS: tuple[tuple[str, str, Tone], ...] = (
    ("Agrees with the paper", "agrees", "good"),
    ("Does not agree", "differs", "warn"),
    ("Beside the paper", "notes", "plain"),
    ("Set-up", "setup", "quiet"),
)


def studies_in(root: Path) -> list[Path]:
    """The folders of studies: this one, or those in it."""
    if (root / RESULT).is_file():
        return [root]
    return sorted(file.parent for file in root.glob(f"*/{RESULT}") if file.is_file())


def reproduction_page(root: Path) -> Page:
    """The page of the folder of one study, or of a folder of several."""
    folders = studies_in(root)
    if not folders:
        raise DataError(f"{root} holds no results: run `ibaml reproduce` first")
    results = [(folder, _read(folder / RESULT)) for folder in folders]
    agrees, differs = (
        sum(len(_texts(r, key)) for _, r in results) for key in ("agrees", "differs")
    )
    lead = (
        f"{agrees} findings agree with the paper, {differs} do not. Each picture is drawn from "
        "numbers that lie beside it as CSV."
    )
    sections = [Section(_text(r, "title"), _study(folder, r)) for folder, r in results]
    whole = shlex.quote(str(root))
    sections.append(Section("Do it again", [
        Commands([*((_text(r, "title"), _text(r, "command")) for _, r in results),
                  ("this page", f"ibaml report {whole}")])
    ]))  # fmt: skip
    return Page(_PAPER, "The paper, reproduced", lead, sections)


def _study(folder: Path, result: Mapping[str, Any]) -> list[Block]:
    blocks: list[Block] = []
    names = [name for name in _texts(result, "files") if Path(name).name == name]
    for name in names:
        if name.endswith(".png"):
            alt = f"Picture of {_text(result, 'title')}; the lists below say what it shows"
            try:
                blocks.append(picture_file(folder / name, alt))
            except DataError as error:
                blocks.append(Text(str(error), "warn"))
    rows = [row for row in _list(result, "table") if isinstance(row, dict) and row]
    rows = [row for row in rows if list(row) == list(rows[0])]
    if rows:
        head = [str(name) for name in rows[0]]
        cells = [[str(cell) for cell in row.values()] for row in rows]
        blocks.append(Table("The figures", head, cells))
    for title, key, tone in _LISTS:
        if items := _texts(result, key):
            blocks.append(Points(title, items, tone))
    blocks.append(Text(_about(result), "quiet"))
    blocks.append(Text(f"Files in {folder}: {', '.join(names) or 'none'}.", "quiet"))
    return blocks


def _about(result: Mapping[str, Any]) -> str:
    seconds, seed = result.get("seconds"), result.get("seed")
    parts = [] if seed is None else [f"Seed {seed}."]
    parts.append(f"{_text(result, 'machine')}.")
    if isinstance(seconds, int | float) and 0 <= seconds < 1e12:
        parts.append(f"{duration(float(seconds))}.")
    return " ".join(parts)


def _read(file: Path) -> dict[str, Any]:
    try:
        found = untrusted.parsed_json(untrusted.content(file, untrusted.DOCUMENT))
    except untrusted.Refused as error:
        raise DataError(f"{file} cannot be read: it {error}") from error
    if not isinstance(found, dict):
        raise DataError(f"{file} holds no result")
    return found


def _text(result: Mapping[str, Any], key: str) -> str:
    found = result.get(key)
    return found if isinstance(found, str) and found.strip() else "unknown"


def _list(result: Mapping[str, Any], key: str) -> list[Any]:
    found = result.get(key)
    return found if isinstance(found, list) else []


def _texts(result: Mapping[str, Any], key: str) -> list[str]:
    return [str(one) for one in _list(result, key)]
