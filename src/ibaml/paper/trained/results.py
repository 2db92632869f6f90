"""How is an arm trained, tested and inspected exactly once, even if the study is interrupted?

Training leaves an ordinary run folder: a complete one is not trained again, a stopped one is
resumed. Results are kept as parts, which can be read without the run folder, the data and this
machine.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from ibaml.assessment import Protocol, assess, open_test
from ibaml.evaluation import ClassScores
from ibaml.evaluation.packed import packed, unpacked
from ibaml.machine import in_a_line, machine, pick_device, threads
from ibaml.paper.study import Progress
from ibaml.paper.trained.arms import ARMS, OWN, Settings, of_this_machine, run_settings
from ibaml.paper.trained.inside import look_inside
from ibaml.parts import Numbers, Parts
from ibaml.training import Run, RunError, Step, open_run, resume, train
from ibaml.training.faults import Diverged
from ibaml.training.identity import identity
from ibaml.training.start import load_run
from ibaml.training.watch import read_log

OnProgress = Callable[[int, str], None]  # arguments: tasks done of this arm, the current work


@dataclass(frozen=True)
class Result:
    """The results of an arm.

    Attributes:
        training: iterations, tasks, seconds, machine, data, validation, and why it failed, if so.
        tested: the iteration of the tested weights, and tasks whose adaptation diverged.
        scores: of the test tasks; None where training failed before its first checkpoint.
        inside: see `look_inside`; None likewise.
    """

    name: str
    training: Numbers
    tested: Numbers
    scores: ClassScores | None
    inside: Numbers | None

    @property
    def title(self) -> str:
        return ARMS[self.name].title


def results(settings: Settings, parts: Parts, progress: Progress) -> list[Result]:
    """All arms, one after the other."""
    jobs = [_Job(name, settings, parts) for name in settings.arms]
    total, done, results_so_far = sum(job.size for job in jobs), 0, []
    with threads(settings.threads):
        for job in jobs:
            results_so_far.append(job.result(partial(_tell, progress, done, total, job.title)))
            done += job.size
    progress(total, total, "drawing")
    _same_data(results_so_far)
    return results_so_far


def _tell(progress: Progress, before: int, total: int, title: str, done: int, what: str) -> None:
    progress(min(before + done, total), total, f"{title}: {what}")


class _Job:
    """One arm of one comparison."""

    def __init__(self, name: str, study: Settings, parts: Parts) -> None:
        self.name, self.study, self.parts = name, study, parts
        self.settings = run_settings(ARMS[name], study)
        self.key = {"arm": identity(self.settings)}
        self.folder = parts.run_folder(name.replace("_", "-"), self.key)
        self.title = ARMS[name].title
        self.trained_on = self.settings.iterations * self.settings.tasks
        self.size = self.trained_on + study.test_tasks
        self.test_steps = None if ARMS[name].head else study.test_steps or None

    def result(self, on_progress: OnProgress) -> Result:
        study = self.study
        on_progress(0, "training")
        training = self.parts({"part": "training", **self.key}, partial(self.train, on_progress))
        how: dict[str, Any] = {
            "tasks": study.test_tasks,
            "queries": study.test_queries,
            "samples": study.test_samples,
            "norm_stats": study.norm_stats,
            "which": study.which,
        }
        if self.test_steps is not None:
            how["steps"] = self.test_steps
        on_progress(self.trained_on, "testing")
        tested = self.parts({"part": "test", **self.key, **how}, partial(self.test, on_progress))
        on_progress(self.size, "looking inside")
        inside = self.parts(
            {"part": "inside", **self.key, "tasks": study.diagnosed},
            partial(self.inside, on_progress),
        )
        scores = tested.pop("scores")
        return Result(
            self.name,
            training,
            tested,
            None if scores is None else unpacked(scores),
            inside or None,
        )

    def train(self, on_progress: OnProgress) -> Numbers:
        """Train or resume to the end; training that diverges is a result, not an error."""
        failed = ""
        try:
            run = self.trained(on_progress)
        except Diverged as error:
            run, failed = self.opened(), str(error)
        log = _log(run.path)
        return {
            "machine": in_a_line(machine(pick_device(self.settings.device))),
            "data": run.data,
            "iterations": self.settings.iterations,
            "tasks a step": self.settings.tasks,
            "tasks": self.trained_on,
            "seconds": round(_seconds(log), 1),
            "validation": [
                [line["step"], line["val_nll"], line["val_accuracy"]]
                for line in log
                if "val_nll" in line
            ],
            "failed": failed,
        }

    def trained(self, on_progress: OnProgress) -> Run:
        """The complete run."""
        watch = partial(_watchers, on_progress, self.settings.tasks)
        if not (self.folder / "config.json").exists():
            run, outcome = train(self.settings, self.folder, watchers=watch)
        else:
            run = self.opened()
            if _complete(run):
                return run
            run, outcome = resume(run, watchers=watch)  # it may come from another machine
        if outcome.signal is not None:
            raise KeyboardInterrupt
        return run

    def opened(self) -> Run:
        run = open_run(self.folder)
        return replace(run, settings=of_this_machine(run.settings, self.study))

    def run_with_weights(self, on_progress: OnProgress) -> Run | None:
        """The run, trained where its folder was left behind; None where it has no weights."""
        try:
            return self.trained(on_progress)
        except Diverged:
            run = self.opened()
            return run if run.saved() else None

    def test(self, on_progress: OnProgress) -> Numbers:
        run = self.run_with_weights(on_progress)
        if run is None:
            return {"step": None, "diverged": None, "protocol": "", "scores": None}
        study = self.study
        protocol = Protocol(
            tasks=study.test_tasks,
            queries=study.test_queries,
            steps=self.test_steps,
            samples=study.test_samples,
            norm_stats=None if study.norm_stats == OWN else study.norm_stats,
            which=study.which,
            device=study.device,
        )
        judged = assess(
            run,
            protocol,
            also_transductive=False,
            on_progress=lambda _, done: on_progress(self.trained_on + done, "testing"),
        )
        if not isinstance(judged.main, ClassScores):
            raise ValueError(f"data: {judged.source.name} is regression, and classes are compared")
        ((name, diverged),) = judged.diverged.items()
        return {
            "step": judged.step,
            "diverged": diverged,
            "protocol": name,
            "scores": packed(judged.main),
        }

    def inside(self, on_progress: OnProgress) -> Numbers:
        run = self.run_with_weights(on_progress)
        if run is None:
            return {}
        source = open_test(run, Protocol(queries=self.settings.queries, device=self.study.device))
        learner, step = load_run(run, "last", pick_device(self.settings.device))
        return {"step": step, **look_inside(learner, source, self.study.diagnosed)}


def _complete(run: Run) -> bool:
    last = run.settings.iterations
    return (run.checkpoints / f"step-{last:08d}.safetensors").exists()


def _log(folder: Path) -> list[dict[str, Any]]:
    return read_log(folder / "log.jsonl")


def _seconds(log: list[dict[str, Any]]) -> float:
    """The seconds of training, summed over restarts, because each counts from its own start."""
    times = [float(line.get("seconds", 0.0)) for line in log]
    return sum(now for now, then in zip(times, [*times[1:], 0.0], strict=True) if then < now)


def _watchers(on_progress: OnProgress, tasks: int, *_: Any) -> list[_Watch]:
    return [_Watch(on_progress, tasks)]


class _Watch:
    """Reports the progress of training."""

    def __init__(self, on_progress: OnProgress, tasks: int) -> None:
        self._tell, self._tasks = on_progress, tasks

    def started(self, first: int, total: int) -> None:
        self._tell(first * self._tasks, "training")

    def stepped(self, step: Step) -> None:
        self._tell(step.step * self._tasks, f"training, loss {step.loss:.3f}")

    def validated(self, step: int, scores: dict[str, float], best: bool) -> None:
        pass

    def message(self, text: str) -> None:
        pass

    def ended(self) -> None:
        pass


def _same_data(arms_results: list[Result]) -> None:
    """Refuse to compare arms of different data (parts of one folder from two machines)."""
    digests = {result.training["data"]["digest"]: result.name for result in arms_results}
    if len(digests) > 1:
        raise RunError(
            f"the data of {' and '.join(digests.values())} differ, though their name is the same: "
            "train all of them on one (--fresh, or another --out)"
        )
