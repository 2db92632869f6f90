"""How a run begins: anew from settings, or again from its folder; how a learner is loaded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ibaml.extras import missing
from ibaml.fields import differs
from ibaml.learner import MetaLearner
from ibaml.machine import pick_device, threads
from ibaml.tasks import Inputs, TaskSource
from ibaml.tasks.sources.decode import Progress
from ibaml.training.build import (
    build_learner,
    build_network,
    choose_temperature,
    describe_source,
    fit_network,
    located,
    open_tasks,
)
from ibaml.training.checkpoint import under, unpack
from ibaml.training.loop import Outcome, Trainer
from ibaml.training.processes import Processes, joined, this_process
from ibaml.training.run import (
    Run,
    RunError,
    create_run,
    open_run,
    prepare_folder,
    settle,
)
from ibaml.training.settings import Settings
from ibaml.training.watch import JsonLines, TensorBoard, Watcher

Watchers = Callable[[Run, MetaLearner], Sequence[Watcher]]


def train(
    settings: Settings,
    out: str | Path,
    *,
    watchers: Watchers = lambda run, learner: (),
    progress: Progress | None = None,
) -> tuple[Run, Outcome]:
    """Train from settings in a new run folder; under torchrun, in as many processes as it started.

    >>> train(resolve({"data": "sinusoids", "iterations": 100}), "runs/waves")    # doctest: +SKIP
    """
    processes = this_process()
    settings = located(settings)
    out = Path(out)
    if processes.restarts and (out / "config.json").exists():
        if other := differs(open_run(out).settings, settings):
            raise RunError(
                f"{out} is another run ({other} differs): choose another --out, or go on with it "
                f"(ibaml train --resume {out})"
            )
        return resume(out, watchers=watchers, progress=progress)  # torchrun started us again
    with threads(settings.threads):
        return _begin(settings, out, processes, watchers, progress)


def resume(
    path: str | Path | Run,
    *,
    iterations: int | None = None,
    micro_batch: int | None = None,
    watchers: Watchers = lambda run, learner: (),
    progress: Progress | None = None,
) -> tuple[Run, Outcome]:
    """Go on with a run from its newest sound checkpoint.

    Args:
        path: the folder, or a `Run` whose settings were changed (for another machine, say).
        iterations: the new end (the schedule is then that of the longer run).
        micro_batch: another number of tasks at once in memory than the run's own (its sums are
            then rounded differently).
    """
    run = path if isinstance(path, Run) else open_run(path)
    given = {"iterations": iterations, "micro_batch": micro_batch}
    if changes := {name: value for name, value in given.items() if value is not None}:
        run = run.changed(**changes)
    with threads(run.settings.threads):
        return run, _go_on(run, this_process(), watchers, progress)


def _begin(
    settings: Settings,
    out: Path,
    processes: Processes,
    watchers: Watchers,
    progress: Progress | None,
) -> tuple[Run, Outcome]:
    """Train in a new folder."""
    device = pick_device(settings.device, processes.local_rank)
    tasks = open_tasks(settings, device, progress)
    tasks.batches("train", [0])  # too few classes or examples: said now
    settings = fit_network(settings, tasks)
    network = build_network(settings, tasks.example_shape)
    settings = choose_temperature(settings, network, tasks)
    learner = build_learner(settings, network).to(device)
    learner.inputs = Inputs.of(tasks)
    with joined(processes, device):
        run = _in_first(
            processes, device, lambda: create_run(out, settings, describe_source(tasks))
        )
        run = run or Run(out, settings, describe_source(tasks))
        return run, _go(run, learner, tasks, processes, watchers, None)


def _go_on(
    run: Run, processes: Processes, watchers: Watchers, progress: Progress | None
) -> Outcome:
    """Train from the newest state of the folder."""
    settings = run.settings
    device = pick_device(settings.device, processes.local_rank)
    tasks = open_tasks(settings, device, progress)
    if tasks.digest != run.data["digest"]:
        raise RunError(
            f"{settings.data} is not what {run.path} was trained on: its digest is "
            f"{tasks.digest[:12]} and was {str(run.data['digest'])[:12]}; bring the same data "
            "back, or train anew"
        )
    learner = build_learner(settings, build_network(settings, tasks.example_shape)).to(device)
    with joined(processes, device):
        saved, notes = run.resumable() if processes.first else (None, [])
        content = processes.from_first(None if saved is None else saved.content, device)
        return _go(run, learner, tasks, processes, watchers, content, notes)


def _in_first(processes: Processes, device: torch.device, make: Callable[[], Run]) -> Run | None:
    """Do something in the first process; every process learns whether it worked."""
    result: Run | None = None
    error: Exception | None = None
    if processes.first:
        try:
            result = make()
        except Exception as caught:
            error = caught
    if not processes.all_agree(error is None, device):
        raise error or RunError("the first process could not make the run folder")
    return result


def _go(
    run: Run,
    learner: MetaLearner,
    tasks: TaskSource,
    processes: Processes,
    watchers: Watchers,
    content: bytes | None,
    notes: Sequence[str] = (),
) -> Outcome:
    if not processes.first:
        trainer = Trainer(run.settings, learner, tasks, run, processes)
        if content is not None:
            trainer.restore(content)
        return trainer.train()
    with run.held():
        prepare_folder(run)
        changes = settle(run)
        every = run.settings.log_every
        logs: list[Watcher] = [JsonLines(run.path / "log.jsonl", every)]
        if run.settings.tensorboard:
            if (absent := missing("tensorboard")) is None:
                logs.append(TensorBoard(run.path / "tensorboard", every))
            else:
                notes = [*notes, f"{absent}. Going on without."]
        everyone = [*watchers(run, learner), *logs]
        trainer = Trainer(run.settings, learner, tasks, run, processes, everyone)
        if content is not None:
            trainer.restore(content)
            score = run.best_score()
            trainer.best, trainer.best_step = (None, 0) if score is None else score
        trainer.notes = [*notes, *changes]
        return trainer.train()


def load(
    path: str | Path,
    model: nn.Module | None = None,
    *,
    which: str = "best",
    device: torch.device | str = "cpu",
    **passed_in: Any,
) -> MetaLearner:
    """A trained learner from a file that `MetaLearner.save` wrote, or from a run folder; nothing in
    it is executed.

    Args:
        model: the module of a learner that was built around one of your own.
        which: of a run folder: ``"best"``, the weights with the best validation nll (the last where
            nothing was validated), or ``"last"``.
        passed_in: what else was your own: ``likelihood``, ``solver``, …

    >>> learner = ibaml.load("runs/demo")                                         # doctest: +SKIP
    >>> learner.adapt(x, y).predict_proba(new_x)                                  # doctest: +SKIP
    """
    if which not in ("best", "last"):
        raise ValueError(f'which must be "best" or "last", got {which!r}')
    if Path(path).is_file():
        from ibaml.artifact import load_learner

        if model is not None:
            passed_in["model"] = model
        return load_learner(path, device, **passed_in)
    if model is not None or passed_in:
        raise ValueError(f"{path} is no file of a learner: a run folder needs nothing passed in")
    return load_run(open_run(path), which, device)[0]


def load_run(
    run: Run, which: str = "best", device: torch.device | str = "cpu"
) -> tuple[MetaLearner, int]:
    """The learner of a run, and the iteration its weights are from."""
    shape = tuple(int(n) for n in run.data["example_shape"])
    learner = build_learner(run.settings, build_network(run.settings, shape))
    saved = run.weights(which)
    tensors, _ = unpack(saved.content)
    weights = under("learner", tensors)
    weights.update(
        # the average stands for the weights it averages
        (name, value)
        for name, value in under("average", tensors).items()
    )
    try:
        learner.load_state_dict(weights)
    except RuntimeError as error:
        raise RunError(f"{saved.path} does not fit the settings of {run.path}: {error}") from error
    learner.eval()
    if (inputs := run.data.get("inputs")) is not None:
        learner.inputs = Inputs.read(inputs)
    return learner.to(device), saved.step
