"""What does ibaml do, shown in about two minutes? It learns a prior from characters of many
scripts, then characters of unseen scripts from one example each, and knows how sure to be."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from ibaml.assessment import Protocol, assess, assess_learner, draw_predictions, open_test, plain
from ibaml.evaluation import ClassScores, Interval, mean_interval, paired
from ibaml.files import write_whole
from ibaml.report import draw_reliability
from ibaml.tasks import EpisodeTasks
from ibaml.tasks.inspect import nearest_centroid
from ibaml.training import Outcome, Run, open_run, resolve, resume, train
from ibaml.training.build import build_learner, build_network
from ibaml.training.run import RunError
from ibaml.training.settings import Settings
from ibaml.training.start import Watchers

OURS, PRIOR, PIXELS = "iBaML", "untrained prior", "nearest centroid on pixels"


def settings(iterations: int) -> Settings:
    """The run of the demo: the defaults of `ibaml train` with a small network."""
    return resolve(
        {
            "data": "glyphs",
            "method": "ibaml",
            "adapt": "head",
            "channels": 16,
            "iterations": iterations,
            "val_every": 100,
            "val_tasks": 50,
            "tensorboard": False,
            "threads": 1,  # small layers: two threads wait for each other more than they work
        }
    )


def meta_train(out: Path, iterations: int, watchers: Watchers) -> tuple[Run, Outcome]:
    """Train in ``out``/run; an interrupted demo is resumed, a finished one starts over."""
    folder = out / "run"
    try:
        existing = open_run(folder)
        done, _ = existing.newest()
        if existing.settings.iterations == iterations and done and done.step < iterations:
            return resume(folder, watchers=watchers)
    except RunError:
        pass
    for old in (*folder.glob("checkpoints/*"), folder / "config.json", folder / "log.jsonl"):
        old.unlink(missing_ok=True)
    return train(settings(iterations), folder, watchers=watchers)


@dataclass(frozen=True)
class Result:
    """Figures of the three predictors, and iBaML's lead in accuracy, on the same tasks."""

    figures: dict[str, dict[str, Interval]]
    leads: dict[str, Interval]
    files: list[Path]


def judge(run: Run, out: Path, tasks: int, on_progress: Callable[[str, int], None]) -> Result:
    """Test the trained learner, its untrained prior and nearest centroids on the same new tasks."""
    protocol = Protocol(tasks=tasks)
    assessment = assess(
        run, protocol, also_transductive=False, on_progress=lambda _, done: on_progress(OURS, done)
    )
    source = open_test(run, protocol)
    assert isinstance(source, EpisodeTasks)
    # running statistics are learned, so the untrained network takes the support set's
    blank = build_learner(run.settings, build_network(run.settings, source.example_shape))
    untrained = assess_learner(
        blank,
        source,
        replace(protocol, norm_stats="support"),
        on_progress=lambda _, n: on_progress(PRIOR, n),
    )
    floor = nearest_centroid(
        source.data, protocol.split, source.ways, source.shots, source.queries, tasks
    )
    scores = {OURS: assessment.main, PRIOR: untrained.main}
    figures = {name: s.summary() for name, s in scores.items()}
    figures[PIXELS] = {"accuracy": mean_interval(floor)}
    ours = assessment.main.means()["accuracy"]
    leads = {
        PRIOR: paired(untrained.main, assessment.main)["accuracy"],
        PIXELS: mean_interval(ours - np.asarray(floor)),
    }
    classes = {n: s for n, s in scores.items() if isinstance(s, ClassScores)}
    files = [
        draw_reliability(classes, out / "reliability.png", "Glyphs of scripts never seen"),
        draw_predictions(assessment.learner, source, out / "episode.png"),
        out / "scores.json",
    ]
    content = {
        "tasks": tasks,
        "iteration": assessment.step,
        "torch": str(torch.__version__),
        "figures": {n: {m: plain(i) for m, i in s.items()} for n, s in figures.items()},
        "lead in accuracy": {n: plain(i) for n, i in leads.items()},
    }
    write_whole(files[-1], json.dumps(content, indent=2) + "\n")
    return Result(figures, leads, files)
