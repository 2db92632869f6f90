"""What lies in a study's folder: finished parts, pictures, numbers, a text; and the page over all.

NAME.png NAME.pdf  the picture           NAME.csv …   the numbers
README.md          the text              result.json  all of it, for programs
parts/             a file per finished part, by its settings: a run that was stopped reads them
"""

from __future__ import annotations

import csv
import hashlib
import html
import io
import json
import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ibaml._version import __version__
from ibaml.files import write_whole

if TYPE_CHECKING:
    from ibaml.reproduce.study import Findings, Study

Numbers = dict[str, Any]


class Parts:
    """Numbers that were computed once are read, not computed again.

    A part is known by the study, this version of ibaml and the settings in its key.

    Attributes:
        computed, reused: how many of this run's parts were, so far.
        seconds: what all of them took when they were computed.
    """

    def __init__(self, folder: Path, study: str) -> None:
        self._folder = folder
        self._study = study
        self.computed = self.reused = 0
        self.seconds = 0.0

    def __call__(self, key: Mapping[str, Any], compute: Callable[[], Numbers]) -> Numbers:
        """The numbers of the part with this key."""
        whole = {"study": self._study, "version": __version__, **key}
        text = json.dumps(whole, sort_keys=True)
        file = self._folder / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"
        stored = _read(file)
        if stored is not None and json.dumps(stored.get("key"), sort_keys=True) == text:
            self.reused += 1
        else:
            began = time.perf_counter()
            numbers = compute()
            stored = {"key": whole, "seconds": time.perf_counter() - began, "numbers": numbers}
            self._folder.mkdir(parents=True, exist_ok=True)
            write_whole(file, json.dumps(stored, allow_nan=False))
            self.computed += 1
        self.seconds += stored["seconds"]
        found: Numbers = stored["numbers"]
        return found


def _read(file: Path) -> dict[str, Any] | None:
    try:
        found = json.loads(file.read_text())
    except (OSError, ValueError):  # not there, or not ours: it is computed
        return None
    return found if isinstance(found, dict) else None


def machine() -> str:
    """The machine and the software, in a line."""
    name = platform.processor() or platform.machine()
    cpus = Path("/proc/cpuinfo")
    if cpus.exists():
        models = [line for line in cpus.read_text().splitlines() if line.startswith("model name")]
        name = models[0].split(":", 1)[1].strip() if models else name
    return (
        f"{name}, {os.cpu_count()} cores, {platform.system()}; Python "
        f"{platform.python_version()}, torch {torch.__version__}, ibaml {__version__}"
    )


def write_study(
    folder: Path,
    study: Study,
    settings: Any,
    findings: Findings,
    *,
    command: str,
    seconds: float,
) -> list[Path]:
    """Write the pictures, the tables, the text and the result; returns the files."""
    from ibaml.report.figure import save

    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for name, picture in findings.pictures.items():
        files += [save(picture, folder / f"{name}.{kind}") for kind in ("png", "pdf")]
    for name, rows in findings.tables.items():
        files.append(folder / f"{name}.csv")
        write_whole(files[-1], as_csv(rows))
    result = {
        "study": study.name,
        "title": study.title,
        "command": command,
        "seed": settings.seed,
        "machine": machine(),
        "seconds": round(seconds, 1),
        "setup": list(findings.setup),
        "agrees": list(findings.agrees),
        "differs": list(findings.differs),
        "numbers": dict(findings.numbers),
        "settings": asdict(settings),
        "files": [file.name for file in files],
    }
    files += [folder / "README.md", folder / "result.json"]
    write_whole(files[-2], as_text(result))
    write_whole(files[-1], json.dumps(result, indent=1, allow_nan=False))
    return files


def as_csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows with the same columns as CSV, numbers in full."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def as_text(result: Mapping[str, Any]) -> str:
    """The short text: set-up, command, seed, machine, what agrees and what does not."""
    picture = next(name for name in result["files"] if name.endswith(".png"))
    lines = [f"# {result['title']}", "", f"![{result['title']}]({picture})", ""]
    lines += [f"    {result['command']}", ""]
    lines += [f"Seed {result['seed']}. {result['machine']}. {result['seconds']:.0f} s.", ""]
    for title, key in _SECTIONS:
        lines += [f"## {title}", "", *(f"- {s}" for s in result[key] or ["nothing"]), ""]
    lines += ["Files: " + ", ".join(result["files"]) + ", result.json."]
    return "\n".join(lines) + "\n"


_SECTIONS = (
    ("Set-up", "setup"),
    ("Agrees with the paper", "agrees"),
    ("Does not agree", "differs"),
)


def write_page(root: Path) -> Path:
    """One page over all studies whose results lie under ``root``."""
    found = [(file.parent.name, _read(file)) for file in sorted(root.glob("*/result.json"))]
    sections = [_section(folder, result) for folder, result in found if result is not None]
    if not sections:
        raise ValueError(f"{root} holds no results: run `ibaml reproduce` first")
    page = root / "index.html"
    write_whole(page, _PAGE.format(sections="\n".join(sections)))
    return page


def _section(folder: str, result: Mapping[str, Any]) -> str:
    where = html.escape(folder, quote=True)
    pictures = [name for name in result["files"] if name.endswith(".png")]
    lines = [f"<h2>{html.escape(result['title'])}</h2>"]
    lines += [f'<a href="{where}/{p}"><img src="{where}/{p}" alt=""></a>' for p in pictures]
    lines += [f"<pre>{html.escape(result['command'])}</pre>"]
    about = f"Seed {result['seed']}. {result['machine']}. {result['seconds']:.0f} s."
    lines += [f"<p class=about>{html.escape(about)}</p>"]
    for title, key in _SECTIONS:
        items = "".join(f"<li>{html.escape(s)}</li>" for s in result[key] or ["nothing"])
        lines += [f"<h3>{title}</h3><ul class={key}>{items}</ul>"]
    links = [f'<a href="{where}/{f}">{f}</a>' for f in (*result["files"], "README.md")]
    lines += [f"<p class=about>{' · '.join(links)}</p>"]
    return "\n".join(lines)


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>The paper, reproduced</title>
<style>
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem;
        color: #222 }}
img {{ max-width: 100%; border: 1px solid #ddd }}
pre {{ background: #f4f4f4; padding: .6rem }}
h2 {{ margin-top: 3rem; border-top: 1px solid #ddd; padding-top: 1rem }}
.about {{ color: #666; font-size: 85% }}
.agrees li::marker {{ content: "✓ "; color: #2e8b57 }}
.differs li::marker {{ content: "✗ "; color: #c0392b }}
</style></head><body>
<h1>Scalable Bayesian Meta-Learning through Generalized Implicit Gradients, reproduced</h1>
{sections}
</body></html>
"""
