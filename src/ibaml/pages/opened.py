"""What is known of a run? Its settings, log, weights, verdict and scores, as far as they are."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ibaml.assessment import Protocol, Stored, assess_learner, comparable, open_test
from ibaml.assessment.judge import with_steps
from ibaml.assessment.stored import read_assessment
from ibaml.evaluation import RegressionScores
from ibaml.learner import MetaLearner
from ibaml.machine import pick_device
from ibaml.pages.doctor import FILE, read_doctor
from ibaml.pages.log import Log
from ibaml.tasks import TaskSource
from ibaml.tasks.sources.decode import Progress
from ibaml.training.run import Run, open_run, origin
from ibaml.training.start import load_run
from ibaml.training.watch import read_log

OnTask = Callable[[str, int], None]  # arguments: the run, tasks done


@dataclass(frozen=True)
class Opened:
    """A run, and what can be read of it.

    Attributes:
        name: as the page calls it.
        learner, step: with the weights that were judged; None if there are none.
        judged: how good it is; None if that cannot be found out.
        source: the tasks it was judged on; None if its data cannot be read.
        problems: sentences on what is missing, and what helps.
    """

    name: str
    run: Run
    origin: Mapping[str, Any]
    log: Log
    doctor: Mapping[str, Any] | None
    learner: MetaLearner | None = None
    step: int = 0
    judged: Stored | None = None
    source: TaskSource | None = None
    problems: tuple[str, ...] = ()


def open_runs(
    names: Mapping[str, Path],
    tasks: int,
    device: str = "auto",
    on_task: OnTask | None = None,
    progress: Progress | None = None,
) -> list[Opened]:
    """The runs with their scores: those that `ibaml evaluate` kept, if every run has them for the
    weights it has now; else of this many validation tasks. Test tasks are never judged here."""
    opened = [_open(name, path) for name, path in names.items()]
    kept = [_kept(one) for one in opened]
    if all(one.judged is not None for one in kept):
        return [_with_tasks(one, device, progress) for one in kept]
    queries = [q for one in kept if (q := one.run.settings.queries) is not None]
    protocol = Protocol(
        tasks=tasks, split="val", queries=min(queries) if queries else None, device=device
    )
    return [_validated(one, protocol, on_task, progress) for one in kept]


def _open(name: str, path: Path) -> Opened:
    run = open_run(path)
    doctor, problems = None, []
    try:
        doctor = read_doctor(path / FILE)
    except (ValueError, OSError) as error:
        problems.append(f"{error}.")
    log = Log.of(read_log(path / "log.jsonl"))
    return Opened(name, run, origin(run), log, doctor, problems=tuple(problems))


def _kept(opened: Opened) -> Opened:
    """With the stored scores, if they are of the run's weights."""
    run = opened.run
    try:
        stored = read_assessment(run.path / "evaluation")
        if stored is None:
            return opened
        now = run.weights(stored.protocol.which).step
    except (ValueError, OSError) as error:
        return _but(opened, f"The kept evaluation is not shown: {error}.")
    regression = isinstance(next(iter(stored.scores.values())), RegressionScores)
    if regression != run.settings.regression:
        return _but(opened, "The kept evaluation is not shown: it is of another kind of task.")
    if stored.iteration != now:
        return _but(
            opened,
            f"The kept evaluation is of iteration {stored.iteration}, and the weights are of "
            f"iteration {now} by now: it is not shown.",
        )
    return replace(opened, judged=stored)


def _with_tasks(opened: Opened, device: str, progress: Progress | None) -> Opened:
    """With the learner and the tasks of the stored scores, to show some of them."""
    assert opened.judged is not None
    protocol = replace(opened.judged.protocol, device=device)
    try:
        learner, step = load_run(opened.run, protocol.which, pick_device(device))
        learner = with_steps(learner, protocol)
        opened = replace(opened, learner=learner, step=step)
        source = open_test(opened.run, protocol, progress)
    except (ValueError, OSError) as error:
        return _but(opened, f"No task can be shown: {error}")
    return replace(opened, source=source)


def _validated(
    opened: Opened, protocol: Protocol, on_task: OnTask | None, progress: Progress | None
) -> Opened:
    """With scores on validation tasks."""
    opened = replace(opened, judged=None)
    try:
        learner, step = load_run(opened.run, "best", pick_device(protocol.device))
        opened = replace(opened, learner=learner, step=step)
        source = open_test(opened.run, protocol, progress)
        judged = assess_learner(
            learner, source, protocol, step=step, also_transductive=False,
            on_progress=None if on_task is None else lambda _, done: on_task(opened.name, done),
        )  # fmt: skip
    except (ValueError, OSError, FloatingPointError) as error:
        command = f"ibaml evaluate {shlex.quote(str(opened.run.path))}"
        return _but(
            opened,
            f"How good the run is on validation tasks could not be found out: {error}. If it has "
            f"test tasks, `{command}` judges on them.",
        )
    target = None if source.target is None else source.target.name
    found = Stored(protocol, step, source.name, target, judged.scores, judged.diverged)
    return replace(opened, source=source, judged=found)


def _but(opened: Opened, problem: str) -> Opened:
    return replace(opened, problems=(*opened.problems, problem))


def incomparable(opened: Sequence[Opened]) -> str | None:
    """Why the runs' scores cannot be subtracted task by task; None if they can."""
    judged = [one.judged for one in opened]
    first = judged[0]
    if first is None or any(one is None for one in judged):
        return "not every run could be judged"
    read = ("split", "ways", "shots", "queries", "first_rows", "data")
    for one in judged[1:]:
        assert one is not None
        for field in read:
            if getattr(one.protocol, field) != getattr(first.protocol, field):
                return f"the runs were judged with a different {field}"
        if next(iter(one.scores.values())).keys != next(iter(first.scores.values())).keys:
            return "the runs were judged on different tasks"
    try:
        comparable([one.run for one in opened], first.protocol)
    except ValueError as error:
        return str(error)
    return None
