"""How good is a trained run? Its learner on test tasks, by itself and beside others."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch

from ibaml.evaluation import ClassScores, Interval, Scores, paired
from ibaml.evaluation.predict import score_tasks
from ibaml.execution import NORM_STATS, NormStats
from ibaml.files import write_whole
from ibaml.learner import MetaLearner
from ibaml.report import (
    Fit,
    draw_comparison,
    draw_episode,
    draw_fits,
    draw_reliability,
    draw_selective,
)
from ibaml.tasks import EpisodeTasks, SinusoidTasks, TaskSource
from ibaml.tasks.keyed import Target
from ibaml.tasks.kinds import QUERIES
from ibaml.tasks.sources.decode import Progress
from ibaml.training.build import open_tasks, pick_device
from ibaml.training.run import Run
from ibaml.training.settings import (
    FIELDS,
    SettingsError,
    checked,
    data_kind,
    is_regression,
    refuse_unread_data,
    setting,
)
from ibaml.training.start import load_run

_TASKS, _HOW = "Which tasks", "How predictions are made"
Told = Callable[[str, int], None]  # which protocol, tasks done


@dataclass(frozen=True)
class Protocol:
    """How a run is judged: which tasks, and how predictions are made.

    Attributes:
        norm_stats: None takes what a person gets from ``learner.adapt`` and, beside it, the
            literature's transductive statistics of the batch.
    """

    tasks: int = setting(1000, "Tasks to judge by.", _TASKS, least=1)
    split: str = setting("test", "train, val or test.", _TASKS)
    queries: int | None = setting(
        None, "Queries a class (or a task).", _TASKS, least=1,
        shown=f"{QUERIES}; a table: all other rows",
    )  # fmt: skip
    ways: int | None = setting(None, "Other ways than the run's (tied head).", _TASKS, least=2)
    shots: int | None = setting(None, "Other shots than the run's.", _TASKS, least=1)
    data: str | None = setting(None, "Another dataset than the run's.", _TASKS)
    root: str | None = setting(None, "Where that dataset's files lie.", _TASKS)
    steps: int | None = setting(
        None, "Other steps of adaptation than in training.", _HOW, least=0, shown="the run's"
    )
    samples: int = setting(10, "Monte-Carlo samples of a prediction.", _HOW, least=1)
    norm_stats: str | None = setting(
        None, "Batch norm's statistics: running, support, or batch (transductive).", _HOW,
        choices=NORM_STATS, shown="what learner.adapt uses, and batch beside it",
    )  # fmt: skip
    which: str = setting(
        "best", "best (on the validation tasks) or last weights.", _HOW, choices=("best", "last")
    )
    batch: int = setting(16, "Tasks at once in memory.", _HOW, least=1)
    device: str = setting("auto", "auto, cpu, cuda or cuda:N.", _HOW)

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Protocol:
        """A protocol from what was given, checked."""
        return cls(**{n: checked(cls, n, v) for n, v in given.items() if v is not None})


@dataclass(frozen=True)
class Assessment:
    """Scores by the name of the batch-norm protocol, most people's first."""

    learner: MetaLearner
    source: TaskSource
    step: int
    scores: dict[str, Scores]
    diverged: dict[str, int]  # tasks whose adaptation diverged: the prior answered

    @property
    def main(self) -> Scores:
        return next(iter(self.scores.values()))


def open_test(run: Run, protocol: Protocol, progress: Progress | None = None) -> TaskSource:
    """The tasks a run is judged by."""
    settings = run.settings
    changed = {
        name: value
        for name in ("ways", "shots", "queries", "data", "root")
        if (value := getattr(protocol, name)) is not None
    }
    kind = data_kind({**vars(settings), **changed})
    if kind.reads("queries"):
        changed.setdefault("queries", QUERIES)
    if "data" in changed:  # what belongs to the run's own data does not go with it
        own = ("root", "splits", "image_size", *kind.unread)
        changed = {**{name: FIELDS[name].default for name in own}, **changed}
        if kind.reads("image_size") and len(run.data["example_shape"]) == 3:
            changed["image_size"] = run.data["example_shape"][-1]
    if "ways" in changed and settings.regression:
        raise SettingsError(f"ways is for classification, and {run.path} is regression")
    if "ways" in changed and changed["ways"] != settings.ways and not settings.tie_head:
        raise SettingsError(
            f"{run.path} was trained {settings.ways}-way and its head has a prior for each class: "
            "other ways need a run trained with --tie-head"
        )
    settings = replace(settings, **changed)
    refuse_unread_data(vars(settings))
    if settings.ways is None and not is_regression(vars(settings)):
        raise SettingsError(f"{run.path} is regression, and {settings.data} is not")
    source = open_tasks(settings, pick_device(replace(settings, device=protocol.device)), progress)
    ours, theirs = tuple(run.data["example_shape"]), source.example_shape
    if ours != theirs or (source.ways is None) != run.settings.regression:
        raise SettingsError(
            f"{source.name} does not fit {run.path}: "
            + (
                f"one input has shape {theirs}, and the run was trained on {ours}"
                if ours != theirs
                else "one is regression and the other is not"
            )
        )
    source.batches(protocol.split, [0])  # no such split, too few classes: said now
    return source


def assess(
    run: Run,
    protocol: Protocol,
    *,
    beside: bool = True,
    told: Told | None = None,
    progress: Progress | None = None,
) -> Assessment:
    """The learner of a run on the tasks of the protocol.

    Args:
        beside: with batch norm, judge by the transductive statistics too.
    """
    source = open_test(run, protocol, progress)
    device = pick_device(replace(run.settings, device=protocol.device))
    learner, step = load_run(run, protocol.which, device)
    return assess_learner(learner, source, protocol, step=step, beside=beside, told=told)


def assess_learner(
    learner: MetaLearner,
    source: TaskSource,
    protocol: Protocol,
    *,
    step: int = 0,
    beside: bool = True,
    told: Told | None = None,
) -> Assessment:
    """Any learner on the tasks of the protocol."""
    if protocol.steps is not None:
        solver = replace(cast(Any, learner.solver), steps=protocol.steps)
        learner = learner.replace(solver=solver)
    scores, diverged = {}, {}
    for name, norm_stats in norm_protocols(learner, protocol.norm_stats, beside).items():
        report = (lambda done, name=name: told(name, done)) if told is not None else None
        ill: list[int] = []
        scores[name] = score_tasks(
            learner,
            source,
            protocol.split,
            range(protocol.tasks),
            samples=protocol.samples,
            norm_stats=norm_stats,
            batch=protocol.batch,
            progress=report,
            diverged=ill,
        )
        diverged[name] = len(ill)
    return Assessment(learner, source, step, scores, diverged)


def norm_protocols(
    learner: MetaLearner, asked: str | None, beside: bool
) -> dict[str, NormStats | None]:
    """The batch-norm protocols to judge by, by name; one without a name where there is no batch
    norm."""
    chosen = cast(NormStats | None, asked)
    kinds = sorted(set(learner.norm_plan(chosen).values()))
    if not kinds:
        return {"": None}

    def name(kinds: Sequence[str]) -> str:
        way = "transductive" if "batch" in kinds else "inductive"
        return f"{' and '.join(kinds)} ({way})"

    if chosen is not None or not beside:
        return {name(kinds): chosen}
    return {name(kinds): None, name(["batch"]): "batch"}


# --- what is left behind ------------------------------------------------------------------------


def write_assessment(
    found: Assessment, folder: Path, facts: Mapping[str, Any], split: str = "test"
) -> list[Path]:
    """summary.json, tasks.csv and tasks.json, and the pictures."""
    folder.mkdir(parents=True, exist_ok=True)
    facts = {**facts, **_drawn(found.main, found.source.target)}
    summary = {
        name: {metric: plain(value) for metric, value in scores.summary().items()}
        for name, scores in found.scores.items()
    }
    rows = [
        {"protocol": name, **row} for name, scores in found.scores.items() for row in scores.rows()
    ]
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(rows[0]))
    writer.writeheader()
    writer.writerows(rows)
    files = [folder / "summary.json", folder / "tasks.csv", folder / "tasks.json"]
    write_whole(
        files[0],
        json.dumps(
            {**facts, "iteration": found.step, "diverged": found.diverged, "results": summary},
            indent=2,
        )
        + "\n",
    )
    write_whole(files[1], text.getvalue())
    write_whole(files[2], json.dumps(rows) + "\n")
    return [*files, *draw_assessment(found, folder, split)]


def draw_assessment(found: Assessment, folder: Path, split: str = "test") -> list[Path]:
    """The pictures of a run: reliability, selective accuracy and an episode, or fits."""
    pictures = []
    classes = {n or "test tasks": s for n, s in found.scores.items() if isinstance(s, ClassScores)}
    if classes:
        title = f"{found.source.name}: confidence and accuracy"
        pictures.append(draw_reliability(classes, folder / "reliability.png", title))
        title = f"{found.source.name}: accuracy when the least sure are left out"
        pictures.append(draw_selective(classes, folder / "selective.png", title))
    if isinstance(found.source, EpisodeTasks) and found.source.data.is_image:
        path = folder / "episode.png"
        pictures.append(draw_predictions(found.learner, found.source, path, split))
    if isinstance(found.source, SinusoidTasks):
        pictures.append(draw_waves(found.learner, found.source, folder / "fits.png"))
    return pictures


def draw_predictions(
    learner: MetaLearner, source: EpisodeTasks, path: Path, split: str = "test", key: int = 0
) -> Path:
    """An episode with what the learner said of its queries (four of each class)."""
    episodes = source.episodes(split)
    batch = episodes.batch([key])
    said = learner.adapt_all(batch).predict_proba(batch.query_x)[0].cpu()
    plain = replace(episodes, normalise=False, device="cpu").batch([key])
    rows, _ = episodes.draw(key)
    names = [source.data.classes[source.data.labels[r[0]]] for r in rows]
    shown = min(4, episodes.queries)
    split_up = (episodes.ways, -1)
    return draw_episode(
        plain.support_x[0].unflatten(0, split_up),
        plain.query_x[0].unflatten(0, split_up)[:, :shown],
        names,
        path,
        f"{source.name}, a new task: {episodes.ways} classes, {episodes.shots} example(s) each",
        said.unflatten(0, split_up)[:, :shown],
    )


def draw_waves(learner: MetaLearner, source: SinusoidTasks, path: Path) -> Path:
    """A new sinusoid after 0, 1, 5 and 10 examples."""
    from ibaml.tasks import Sinusoids

    family = source.family
    examples = replace(source, shots=10, queries=1).batches("test", [3])[0]
    amplitude, phase, _ = Sinusoids.task(family, 2, 3)
    x = torch.linspace(*family.x_range, 200, device=source.device, dtype=source.dtype)[:, None]
    fits = []
    for shots in (0, 1, 5, 10):
        xs, ys = examples.support_x[0, :shots], examples.support_y[0, :shots]
        mean, variance = learner.adapt(xs, ys).predict(x, samples=50)
        fits.append(
            Fit(
                title=f"{shots} example{'' if shots == 1 else 's'}",
                x=x.cpu(),
                truth=amplitude * torch.sin(x + phase).cpu(),
                mean=mean.cpu(),
                deviation=variance.sqrt().cpu() if learner.belief.stochastic else None,
                examples_x=xs.cpu(),
                examples_y=ys.cpu(),
            )
        )
    return draw_fits([("prediction", fits)], path, "A new sinusoid, few examples")


def _drawn(scores: Scores, target: Target | None) -> dict[str, Any]:
    """How many tasks there were, where draws share them; the name of a target with units."""
    count = {} if scores.groups is None else {"distinct_tasks": scores.distinct}
    return count if target is None else {**count, "target": target.name}


def plain(value: Interval) -> dict[str, float | None]:
    """An interval for JSON, which has no infinity."""
    numbers = {"value": value.value, "low": value.low, "high": value.high}
    return {name: number if math.isfinite(number) else None for name, number in numbers.items()}


# --- beside others ------------------------------------------------------------------------------


def comparable(runs: Sequence[Run], protocol: Protocol) -> None:
    """Refuse runs that were not trained for the same tasks, by the field that differs; what the
    protocol says is the same for all."""
    first = runs[0]
    for run in runs[1:]:
        if run.settings.regression != first.settings.regression:
            kinds = ["regression" if r.settings.regression else "classes" for r in (first, run)]
            raise SettingsError(
                f"the runs differ: {first.path} is {kinds[0]} and {run.path} {kinds[1]}"
            )
        for field in ("ways", "shots"):
            ours, theirs = getattr(first.settings, field), getattr(run.settings, field)
            if ours != theirs and getattr(protocol, field) is None:
                raise SettingsError(
                    f"{field} differs: {ours} in {first.path}, {theirs} in {run.path}; give "
                    f"--{field} to judge all by the same tasks"
                )
        if run.data["digest"] != first.data["digest"] and protocol.data is None:
            raise SettingsError(
                f"the data differ: {first.data['name']} in {first.path}, {run.data['name']} in "
                f"{run.path}; give --data to judge all by the same tasks"
            )


def differences(scores: Mapping[str, Scores]) -> dict[str, dict[str, Interval]]:
    """Every learner's figures minus the first's, task by task."""
    first, *others = scores.items()
    return {name: paired(first[1], other) for name, other in others}


def write_comparison(
    scores: Mapping[str, Scores],
    folder: Path,
    facts: Mapping[str, Any],
    title: str,
    target: Target | None = None,
) -> list[Path]:
    """comparison.json, and the pictures."""
    folder.mkdir(parents=True, exist_ok=True)
    summaries = {name: s.summary() for name, s in scores.items()}
    content = {
        **facts,
        **_drawn(next(iter(scores.values())), target),
        "results": {n: {m: plain(i) for m, i in s.items()} for n, s in summaries.items()},
        "differences": {
            n: {m: plain(i) for m, i in s.items()} for n, s in differences(scores).items()
        },
    }
    write_whole(folder / "comparison.json", json.dumps(content, indent=2) + "\n")
    files = [folder / "comparison.json"]
    of = None if target is None else target.name
    files.append(draw_comparison(summaries, folder / "comparison.png", title, of))
    classes = {n: s for n, s in scores.items() if isinstance(s, ClassScores)}
    if classes:
        files.append(draw_reliability(classes, folder / "reliability.png", title))
    return files
