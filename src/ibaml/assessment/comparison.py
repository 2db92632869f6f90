"""How does a run compare with others, task by task?"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ibaml.assessment.files import drawn_facts, plain
from ibaml.assessment.protocol import Protocol
from ibaml.evaluation import ClassScores, Interval, Scores, paired
from ibaml.extras import missing
from ibaml.fields import SettingsError
from ibaml.files import write_whole
from ibaml.report import draw_comparison, draw_reliability
from ibaml.tasks.keyed import Target
from ibaml.training.run import Run


def comparable(runs: Sequence[Run], protocol: Protocol) -> None:
    """Refuse runs that were not trained for the same tasks, and name the field that differs. Fields
    that the protocol sets are the same for all."""
    first = runs[0]
    for run in runs[1:]:
        if run.settings.regression != first.settings.regression:
            kinds = ["regression" if r.settings.regression else "classes" for r in (first, run)]
            raise SettingsError(
                f"the runs differ: {first.path} is {kinds[0]} and {run.path} {kinds[1]}"
            )
        for field in ("ways", "shots", "first_rows"):
            ours, theirs = getattr(first.settings, field), getattr(run.settings, field)
            if ours != theirs and getattr(protocol, field) is None:
                raise SettingsError(
                    f"{field} differs: {ours} in {first.path}, {theirs} in {run.path}; give "
                    f"--{field.replace('_', '-')} to judge all on the same tasks"
                )
        if run.data["digest"] != first.data["digest"] and protocol.data is None:
            raise SettingsError(
                f"the data differ: {first.data['name']} in {first.path}, {run.data['name']} in "
                f"{run.path}; give --data to judge all on the same tasks"
            )


def differences(scores: Mapping[str, Scores]) -> dict[str, dict[str, Interval]]:
    """Every learner's figures minus those of the first, task by task."""
    first, *others = scores.items()
    return {name: paired(first[1], other) for name, other in others}


def write_comparison(
    scores: Mapping[str, Scores],
    folder: Path,
    facts: Mapping[str, Any],
    title: str,
    target: Target | None = None,
) -> list[Path]:
    """Write comparison.json, and the pictures if matplotlib is installed."""
    folder.mkdir(parents=True, exist_ok=True)
    summaries = {name: s.summary() for name, s in scores.items()}
    content = {
        **facts,
        **drawn_facts(next(iter(scores.values())), target),
        "results": {n: {m: plain(i) for m, i in s.items()} for n, s in summaries.items()},
        "differences": {
            n: {m: plain(i) for m, i in s.items()} for n, s in differences(scores).items()
        },
    }
    write_whole(folder / "comparison.json", json.dumps(content, indent=2) + "\n")
    files = [folder / "comparison.json"]
    if missing("matplotlib") is not None:
        return files
    of = None if target is None else target.name
    files.append(draw_comparison(summaries, folder / "comparison.png", title, of))
    classes = {n: s for n, s in scores.items() if isinstance(s, ClassScores)}
    if classes:
        files.append(draw_reliability(classes, folder / "reliability.png", title))
    return files
