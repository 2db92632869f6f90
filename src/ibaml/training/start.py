"""How does a run begin, from settings or from its folder, and how is a learner loaded?"""

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
from ibaml.training.base_classes import start_from_base
from ibaml.training.build import (
    build_learner,
    build_network,
    choose_step_size,
    choose_temperature,
    choose_train_ways,
    describe_source,
    fit_network,
    located,
    open_tasks,
)
from ibaml.training.checkpoint import under, unpack
from ibaml.training.loop import Outcome, Trainer
from ibaml.training.pretraining import pretrain_run
from ibaml.training.processes import Processes, joined, this_process
from ibaml.training.run import (
    Run,
    RunError,
    begun_here,
    create_run,
    open_run,
    prepare_folder,
    settle,
)
from ibaml.training.settings import Settings
from ibaml.training.spans import Spans
from ibaml.training.watch import JsonLines, TensorBoard, Watcher

Watchers = Callable[[Run, MetaLearner], Sequence[Watcher]]


def train(
    settings: Settings,
    out: str | Path,
    *,
    watchers: Watchers = lambda run, learner: (),
    progress: Progress | None = None,
    spans: Spans | None = None,
) -> tuple[Run, Outcome]:
    """Train from settings in a new run folder; under torchrun, in all the processes it started.
    ``spans`` gets the time of each kind of work.

    >>> train(resolve({"data": "sinusoids", "iterations": 100}), "runs/waves")    # doctest: +SKIP
    """
    processes = this_process()
    settings = located(settings)
    out = Path(out)
    if processes.restarts and (out / "config.json").exists():
        begun = open_run(out)
        if other := differs(begun.settings, settings):
            raise RunError(
                f"{out} is another run ({other} differs): choose another --out, or resume it "
                f"(ibaml train --resume {out})"
            )
        if not begun_here(out):
            raise RunError(
                f"{out} is a run already: choose another --out, or resume it (ibaml train --resume "
                f"{out})"
            )
        return resume(begun, watchers=watchers, progress=progress)  # torchrun restarted us
    with threads(settings.threads):
        return _begin(settings, out, processes, watchers, progress, spans)


def resume(
    path: str | Path | Run,
    *,
    iterations: int | None = None,
    micro_batch: int | None = None,
    watchers: Watchers = lambda run, learner: (),
    progress: Progress | None = None,
) -> tuple[Run, Outcome]:
    """Continue a run from its newest readable checkpoint.

    Args:
        path: the folder, or a `Run` whose settings were changed (for another machine, say).
        iterations: another number of iterations (the step size then follows the longer schedule).
        micro_batch: another number of tasks in memory at once (sums are then rounded
            differently).
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
    spans: Spans | None,
) -> tuple[Run, Outcome]:
    """Train in a new folder."""
    device = pick_device(settings.device, processes.local_rank)
    tasks = open_tasks(settings, device, progress)
    tasks.batches("train", [0])  # too few classes or examples fail now
    settings = fit_network(settings, tasks)
    settings, tasks = choose_train_ways(settings, tasks)
    network = build_network(settings, tasks.example_shape)
    settings = start_from_base(settings, network, tasks, progress)
    settings = choose_temperature(settings, network, tasks)
    settings = choose_step_size(settings, network)
    learner = build_learner(settings, network).to(device)
    learner.inputs = Inputs.of(tasks)
    with joined(processes, device):
        run = _in_first(
            processes, device, lambda: create_run(out, settings, describe_source(tasks))
        )
        run = run or Run(out, settings, describe_source(tasks))
        return run, _go(run, learner, tasks, processes, watchers, None, spans=spans)


def _go_on(
    run: Run, processes: Processes, watchers: Watchers, progress: Progress | None
) -> Outcome:
    """Train from the newest state in the folder."""
    settings = run.settings
    device = pick_device(settings.device, processes.local_rank)
    tasks = open_tasks(settings, device, progress)
    if tasks.digest != run.data["digest"]:
        raise RunError(
            f"{settings.data} is not what {run.path} was trained on: its digest is "
            f"{tasks.digest[:12]} and was {str(run.data['digest'])[:12]}; restore the same "
            "data, or train again"
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
    spans: Spans | None = None,
) -> Outcome:
    if run.settings.pretrain and content is None and processes.world > 1:
        raise RunError(
            "pretrain is done by one process: leave torchrun out until it is done, then resume "
            "with it"
        )
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
                notes = [*notes, f"{absent}. Continuing without."]
        everyone = [*watchers(run, learner), *logs]
        if run.settings.pretrain and content is None:
            stopped = pretrain_run(run, learner, tasks, everyone)
            if stopped is not None:
                return Outcome(0, stopped)
        trainer = Trainer(run.settings, learner, tasks, run, processes, everyone, spans)
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
    """A trained learner from a file that `MetaLearner.save` wrote, or from a run folder. Nothing in
    it is executed.

    Args:
        model: your own module, if the learner was built around one.
        which: for a run folder, ``"best"`` takes the weights with the best validation nll (the last
            if nothing was validated), ``"last"`` the last ones.
        passed_in: your own ``likelihood``, ``solver``, …, if the learner had any.

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
        raise ValueError(f"{path} is not a file of a learner: a run folder needs nothing passed in")
    return load_run(open_run(path), which, device)[0]


def load_run(
    run: Run, which: str = "best", device: torch.device | str = "cpu"
) -> tuple[MetaLearner, int]:
    """The learner of a run, and the iteration that its weights come from."""
    shape = tuple(int(n) for n in run.data["example_shape"])
    saved = run.weights(which)
    tensors, _ = unpack(saved.content)
    with torch.device("meta"):  # the settings of somebody else's run may ask for any memory
        size = sum(p.numel() for p in build_network(run.settings, shape).parameters())
    if size > sum(t.numel() for t in tensors.values()):
        raise RunError(
            f"{saved.path} does not fit the settings of {run.path}: their network has {size:,} "
            "weights, more than are in it"
        )
    learner = build_learner(run.settings, build_network(run.settings, shape))
    weights = under("learner", tensors)
    weights.update(
        # the average replaces the weights that it averages
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
