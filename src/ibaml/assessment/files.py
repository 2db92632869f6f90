"""Which files hold the figures of an assessment?"""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ibaml.assessment.judge import Assessment
from ibaml.assessment.pictures import draw_assessment
from ibaml.assessment.stored import write_scores
from ibaml.evaluation import Interval, Scores
from ibaml.files import write_whole
from ibaml.tasks.keyed import Target


def write_assessment(
    assessment: Assessment, folder: Path, facts: Mapping[str, Any], split: str = "test"
) -> list[Path]:
    """Write summary.json, tasks.csv, tasks.json and scores.npz, and the pictures."""
    folder.mkdir(parents=True, exist_ok=True)
    facts = {**facts, **drawn_facts(assessment.main, assessment.source.target)}
    summary = {
        name: {metric: plain(value) for metric, value in scores.summary().items()}
        for name, scores in assessment.scores.items()
    }
    rows = [
        {"protocol": name, **row}
        for name, scores in assessment.scores.items()
        for row in scores.rows()
    ]
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(rows[0]))
    writer.writeheader()
    writer.writerows(rows)
    files = [folder / "summary.json", folder / "tasks.csv", folder / "tasks.json"]
    write_whole(
        files[0],
        json.dumps(
            {
                **facts,
                "iteration": assessment.step,
                "diverged": assessment.diverged,
                "results": summary,
            },
            indent=2,
        )
        + "\n",
    )
    write_whole(files[1], text.getvalue())
    write_whole(files[2], json.dumps(rows) + "\n")
    files.append(write_scores(assessment.scores, folder))
    return [*files, *draw_assessment(assessment, folder, split)]


def drawn_facts(scores: Scores, target: Target | None) -> dict[str, Any]:
    """The number of distinct tasks, if draws share them; the name of a target with units."""
    count = {} if scores.groups is None else {"distinct_tasks": scores.distinct}
    return count if target is None else {**count, "target": target.name}


def plain(value: Interval) -> dict[str, float | None]:
    """An interval for JSON, with None for infinity, which JSON lacks."""
    numbers = {"value": value.value, "low": value.low, "high": value.high}
    return {name: number if math.isfinite(number) else None for name, number in numbers.items()}
