"""What is in a study's folder?

NAME.png NAME.pdf  the picture           NAME.csv …   the numbers
README.md          the text              result.json  everything, for programs
parts/             a file per finished part; a run that was stopped reads them
runs/              the run folders of studies that train
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ibaml.files import write_whole
from ibaml.machine import in_a_line, machine

if TYPE_CHECKING:
    from ibaml.paper.study import Findings, Study


def write_study(
    folder: Path,
    study: Study,
    settings: Any,
    findings: Findings,
    *,
    command: str,
    seconds: float,
) -> list[Path]:
    """Write the tables, the text and the result, then the pictures; returns the files.

    Without matplotlib there are no pictures: the same command with this folder draws them on a
    machine that has it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tables = []
    for name, rows in findings.tables.items():
        tables.append(folder / f"{name}.csv")
        write_whole(tables[-1], as_csv(rows))
    result = {
        "study": study.name,
        "title": study.title,
        "command": command,
        "seed": getattr(settings, "seed", None),
        "machine": findings.machine or in_a_line(machine()),
        "seconds": round(seconds, 1),
        "setup": list(findings.setup),
        "table": [dict(row) for row in findings.shown],
        "agrees": list(findings.agrees),
        "differs": list(findings.differs),
        "notes": list(findings.notes),
        "numbers": dict(findings.numbers),
        "settings": asdict(settings),
    }
    _write_result(folder, result, tables)  # before drawing, so that an error there loses nothing
    return _write_result(folder, result, [*_draw(folder, findings), *tables])


def _write_result(folder: Path, result: Mapping[str, Any], files: Sequence[Path]) -> list[Path]:
    whole = {**result, "files": [file.name for file in files]}
    text, numbers = folder / "README.md", folder / "result.json"
    write_whole(text, as_text(whole))
    write_whole(numbers, json.dumps(whole, indent=1, allow_nan=False))
    return [*files, text, numbers]


def _draw(folder: Path, findings: Findings) -> list[Path]:
    from ibaml.report.figure import save

    files: list[Path] = []
    try:
        for name, draw in findings.pictures.items():
            picture = draw()
            files += [save(picture, folder / f"{name}.{kind}") for kind in ("png", "pdf")]
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != "matplotlib":
            raise
    return files


def as_csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows with the same columns as CSV, with numbers in full precision."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def as_text(result: Mapping[str, Any]) -> str:
    """The short text: set-up, command, seed, machine, what agrees and what does not."""
    pictures = [name for name in result["files"] if name.endswith(".png")]
    lines = [f"# {result['title']}", ""]
    lines += [f"![{result['title']}]({name})" for name in pictures]
    lines += [""] if pictures else []
    lines += [f"    {result['command']}", "", _about(result), ""]
    if table := result.get("table"):
        rows = [list(table[0]), ["---"] * len(table[0]), *(list(row.values()) for row in table)]
        lines += [*(f"| {' | '.join(map(str, row))} |" for row in rows), ""]
    for title, key in _sections(result):
        lines += [f"## {title}", "", *(f"- {s}" for s in result[key] or ["nothing"]), ""]
    lines += ["Files: " + ", ".join([*result["files"], "result.json"]) + "."]
    return "\n".join(lines) + "\n"


def _about(result: Mapping[str, Any]) -> str:
    seed = "" if result["seed"] is None else f"Seed {result['seed']}. "
    return f"{seed}{result['machine']}. {result['seconds']:.0f} s."


_SECTIONS = (
    ("Set-up", "setup"),
    ("Agrees with the paper", "agrees"),
    ("Does not agree", "differs"),
    ("Beside the paper", "notes"),
)


def _sections(result: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The sections of a text; notes have one only if there are any."""
    return [(title, key) for title, key in _SECTIONS if key != "notes" or result.get("notes")]
