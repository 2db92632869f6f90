"""What does a person get? A table, JSON, and a sheet of pictures to look at."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ibaml._version import __version__
from ibaml.answers.classifier import Answers, Classifier
from ibaml.answers.reading import Given
from ibaml.files import write_whole
from ibaml.tasks.errors import DataError

TABLE, FACTS, SHEET = "predictions.csv", "predictions.json", "sheet.png"
_COLUMNS = (
    "file", "label", "probability", "unknown", "best", "familiar", "sure", "suggested", "note",
)  # fmt: skip
_MARK = "ibaml predict"
_TILE, _ACROSS, _MOST = 160, 6, 240  # pixels of a picture, pictures in a row and on a sheet


def check_out(out: Path) -> None:
    """Refuse a folder whose files an earlier `ibaml predict` did not write."""
    if out.exists() and not out.is_dir():
        raise DataError(f"--out {out} is a file: name a folder")
    if out.is_dir() and any(out.iterdir()):
        try:
            ours = json.loads((out / FACTS).read_text())["by"] == _MARK
        except (OSError, ValueError, KeyError, TypeError):
            ours = False
        if not ours:
            raise DataError(f"--out {out} holds other files: name a new folder")
    out.mkdir(parents=True, exist_ok=True)


def write_answers(
    out: Path,
    classifier: Classifier,
    queries: Given,
    answers: Answers,
    suggested: Sequence[int],
    false_alarms: float,
) -> list[Path]:
    """Write the answers of what could be read, and notes of the rest."""
    rows = _rows(queries, answers, suggested)
    text = io.StringIO()
    writer = csv.DictWriter(text, _COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    facts: dict[str, Any] = {
        "by": _MARK,
        "version": __version__,
        "prior": "none" if classifier.prior is None else classifier.prior.name,
        "false_alarms": false_alarms,
        "examples": {c: classifier.labels.count(c) for c in classifier.classes},
        "answers": [
            {**row, "probabilities": dict(zip(answers.classes, map(float, p), strict=True))}
            for row, p in zip(rows, answers.probabilities, strict=False)
        ],
        "unreadable": dict(queries.failed),
        "suggested": [queries.files[i] for i in suggested],
    }
    for answer, familiar in zip(facts["answers"], answers.familiar, strict=True):
        answer["familiar"] = None if np.isnan(familiar) else float(familiar)
    files = [out / FACTS, out / TABLE]
    write_whole(files[0], json.dumps(facts, indent=1) + "\n")
    write_whole(files[1], text.getvalue())
    if queries.pictures is not None:
        write_whole(out / SHEET, _sheet(queries, answers))
        files.append(out / SHEET)
    return files


def _rows(queries: Given, answers: Answers, suggested: Sequence[int]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    rank = {row: place for place, row in enumerate(suggested, start=1)}
    for i, (file, label, best) in enumerate(
        zip(queries.files, answers.labels, answers.best, strict=True)
    ):
        familiar = answers.familiar[i]
        rows.append({
            "file": file,
            "label": label,
            "probability": round(float(answers.probabilities[i].max()), 4),
            "unknown": "" if np.isnan(familiar) else "yes" if answers.unknown[i] else "no",
            "best": best,
            "familiar": "" if np.isnan(familiar) else round(float(familiar), 4),
            "sure": "" if answers.sure is None else "yes" if answers.sure[i] else "no",
            "suggested": rank.get(i, ""),
            "note": "",
        })  # fmt: skip
    for file, why in queries.failed.items():
        rows.append({"file": file, "note": why.splitlines()[0]})
    return rows


def _sheet(queries: Given, answers: Answers) -> bytes:
    """The pictures with their answers; what is unknown has a red frame."""
    from PIL import Image, ImageDraw, ImageFont, ImageOps

    from ibaml.tasks.images import open_picture

    assert queries.pictures is not None
    font = ImageFont.load_default(13)
    count = min(len(queries.files), _MOST)
    across, high = min(_ACROSS, max(count, 1)), _TILE + 40
    down = -(-count // across) if count else 0
    extra = 24 if len(queries.files) > count else 0
    sheet = Image.new(
        "RGB", (across * (_TILE + 12) + 12, max(down * high + 12 + extra, 40)), "white"
    )
    pen = ImageDraw.Draw(sheet)
    for i in range(count):
        left, top = 12 + (i % across) * (_TILE + 12), 12 + (i // across) * high
        name = queries.files[i]
        picture = open_picture(queries.pictures(name), name, least=_TILE)
        small = ImageOps.contain(picture, (_TILE, _TILE))
        sheet.paste(small, (left + (_TILE - small.width) // 2, top + (_TILE - small.height) // 2))
        unknown = bool(answers.unknown[i])
        if unknown:
            pen.rectangle((left - 3, top - 3, left + _TILE + 2, top + _TILE + 2), None, "red", 3)
        said = f"{answers.best[i]} {100 * answers.probabilities[i].max():.0f} %"
        for line, (words, color) in enumerate(
            ((f"unknown? {said}" if unknown else said, "red" if unknown else "black"),
             (name.rsplit("/", 1)[-1], "gray"))
        ):  # fmt: skip
            at = (left, top + _TILE + 4 + 16 * line)
            pen.text(at, _fitting(words, font, pen), color, font)
    if extra:
        pen.text((12, sheet.height - 22), f"… and {len(queries.files) - count} more", "black", font)
    content = io.BytesIO()
    sheet.save(content, "PNG")
    return content.getvalue()


def _fitting(words: str, font: Any, pen: Any) -> str:
    """As much of the words as a picture is wide."""
    words = words if words.isprintable() else "".join(c if c.isprintable() else "?" for c in words)
    while len(words) > 4 and pen.textlength(words, font) > _TILE:
        words = words[:-2].rstrip("…") + "…"
    return words
