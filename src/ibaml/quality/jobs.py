"""How is every method trained, chosen and tested exactly once, even if the comparison is stopped?

Training leaves ordinary run folders: a complete one is not trained again, a stopped one goes on.
Figures are kept as parts. Pre-training is done once a seed and copied into the other runs.
"""

from __future__ import annotations

import gc
import shutil
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ibaml.assessment import Protocol, norm_protocols, open_test
from ibaml.energy import Categorical
from ibaml.evaluation import ClassScores
from ibaml.evaluation.packed import packed, unpacked
from ibaml.evaluation.predict import fit_temperature, score_tasks
from ibaml.fields import SettingsError
from ibaml.machine import in_a_line, machine, pick_device, threads
from ibaml.parts import Parts
from ibaml.quality.arms import ARMS
from ibaml.quality.options import QualityOptions
from ibaml.training import Run, Settings, Step, open_run, resolve, resume, train
from ibaml.training.faults import Diverged
from ibaml.training.identity import identity
from ibaml.training.pretraining import FILE
from ibaml.training.pretraining import identity as features_of
from ibaml.training.rules import is_regression
from ibaml.training.start import load_run
from ibaml.training.watch import read_log

OnProgress = Callable[[int, int, str], None]  # arguments: done, of how many, what comes next
_CHOSEN_ON = 10_000  # the first validation task that chooses; training validates on others


class OutOfTime(Exception):
    """The minutes are over."""


@dataclass(frozen=True)
class Row:
    """One method at one number of shots.

    Attributes:
        tried: each candidate's settings, with its nll and accuracy on validation tasks.
        settings: the chosen ones.
        scores: of the test tasks, by seed; empty where training failed.
        runs: seconds, temperature, statistics of batch norm and learning curve, by seed.
    """

    arm: str
    shots: int
    tried: list[dict[str, Any]]
    settings: dict[str, Any]
    scores: dict[int, ClassScores]
    runs: dict[int, dict[str, Any]]

    @property
    def title(self) -> str:
        return ARMS[self.arm].title


@dataclass(frozen=True)
class Comparison:
    """All rows that are complete, and how many are not."""

    data: str
    options: QualityOptions
    machine: str
    rows: list[Row] = field(default_factory=list)
    missing: int = 0


def compare(data: str, options: QualityOptions, folder: Path, progress: OnProgress) -> Comparison:
    """Train, choose and test every method. Ctrl-C stops it; the same command continues."""
    if is_regression({"data": data}):
        raise SettingsError(f"bench quality compares classes, and {data} is regression")
    jobs = _Jobs(data, options, folder, progress)
    found = Comparison(data, options, in_a_line(machine(pick_device(options.device))))
    wanted = [(arm, shots) for shots in options.shots for arm in options.arms]
    for arm, shots in wanted:  # a wrong setting fails now, not after others are trained
        for candidate in jobs.candidates(arm):
            jobs.settings(arm, candidate, shots, 0)
    with threads(options.threads):
        for place, (arm, shots) in enumerate(wanted):
            try:
                found.rows.append(jobs.row(arm, shots))
            except OutOfTime:
                return Comparison(data, options, found.machine, found.rows, len(wanted) - place)
    return found


class _Jobs:
    """The runs of a comparison, each done once."""

    def __init__(
        self, data: str, options: QualityOptions, folder: Path, progress: OnProgress
    ) -> None:
        self.data, self.options, self.folder = data, options, folder
        self.parts = Parts(folder / "parts", "quality")
        self.progress, self.done = progress, set[str]()
        self.until = None if options.minutes is None else time.monotonic() + 60 * options.minutes

    @property
    def is_over(self) -> bool:
        return self.until is not None and time.monotonic() > self.until

    @cached_property
    def total(self) -> int:
        options, runs = self.options, 0
        for arm in options.arms:
            runs += len(self.candidates(arm)) + (options.seeds - 1 if ARMS[arm].often else 0)
        return runs * len(options.shots)

    def candidates(self, arm: str) -> tuple[dict[str, Any], ...]:
        return ARMS[arm].candidates if self.options.tune else ARMS[arm].candidates[:1]

    def settings(self, arm: str, candidate: Mapping[str, Any], shots: int, seed: int) -> Settings:
        """A training run."""
        options = self.options
        iterations = -(-options.train_tasks // options.tasks)
        common = {
            name: getattr(options, name)
            for name in (
                "root", "splits", "image_size", "ways", "model", "channels", "tasks", "queries",
                "pretrain", "augment", "rotations", "ema", "weight_decay", "device", "precision",
                "threads",
            )
        }  # fmt: skip
        if self.data == "glyphs":
            common["image_size"] = None  # they have their own
        between = max(1, iterations // options.validations)
        length = {
            "iterations": iterations, "val_every": between, "checkpoint_every": between, "keep": 1,
            "log_every": max(1, iterations // 100), "tensorboard": False,
            "val_tasks": min(100, options.val_tasks),
        }  # fmt: skip
        of_arm = {**ARMS[arm].own, **candidate}
        return resolve(
            {"data": self.data, "shots": shots, "seed": seed, **common, **length, **of_arm}
        )

    def row(self, arm: str, shots: int) -> Row:
        """Every candidate is trained with the first seed; the best on validation tasks is tested,
        with all seeds."""
        tried = []
        for candidate in self.candidates(arm):
            judged = self.trained(arm, candidate, shots, 0)
            figures = {name: judged[name] for name in ("nll", "accuracy", "failed")}
            tried.append({"settings": dict(candidate), **figures})
        fine = [one for one in tried if not one["failed"]]
        best = min(fine, key=lambda one: one["nll"])["settings"] if fine else tried[0]["settings"]
        scores, runs = {}, {}
        for seed in range(self.options.seeds if ARMS[arm].often else 1):
            runs[seed] = self.trained(arm, best, shots, seed)
            if runs[seed]["failed"]:
                continue
            settings = self.settings(arm, best, shots, seed)
            test = partial(self._test, arm, settings, runs[seed]["log_fit"])
            scores[seed] = unpacked(self.parts(self._key("test", settings), test)["scores"])
        self._tidy(arm, best, shots)
        return Row(arm, shots, tried, best, scores, runs)

    def _tidy(self, arm: str, best: Mapping[str, Any], shots: int) -> None:
        """Delete the runs that were not chosen, whose figures are kept, and of the others what only
        more training would need."""
        for candidate in self.candidates(arm):
            if candidate != best:
                folder = self._folder(arm, self.settings(arm, candidate, shots, 0))
                shutil.rmtree(folder, ignore_errors=True)
        for seed in range(self.options.seeds if ARMS[arm].often else 1):
            checkpoints = self._folder(arm, self.settings(arm, best, shots, seed)) / "checkpoints"
            if (checkpoints / "best.safetensors").exists():
                for file in checkpoints.glob("step-*"):
                    file.unlink()

    def trained(
        self, arm: str, candidate: Mapping[str, Any], shots: int, seed: int
    ) -> dict[str, Any]:
        """A run's figures on validation tasks, with the temperature that is fitted there."""
        settings = self.settings(arm, candidate, shots, seed)
        changes = ", ".join(f"{name} {value}" for name, value in candidate.items())
        what = ", ".join([ARMS[arm].title, f"{shots} shots", *([changes] if changes else [])])
        self.progress(len(self.done), self.total, f"{what}, seed {seed}")
        found = self.parts(
            self._key("training", settings), partial(self._train, arm, settings, what)
        )
        self.done.add(f"{what}, seed {seed}")
        return found

    def _key(self, part: str, settings: Settings) -> dict[str, Any]:
        options = self.options
        how: dict[str, Any] = {"val_tasks": options.val_tasks, "norm_stats": options.norm_stats}
        if part == "test":
            how |= {"tasks": options.test_tasks, "queries": options.test_queries}
        return {"part": part, "run": identity(settings), **how}

    def _folder(self, arm: str, settings: Settings) -> Path:
        return self.parts.run_folder(f"{arm}-{settings.shots}", {"run": identity(settings)})

    def _train(self, arm: str, settings: Settings, what: str) -> dict[str, Any]:
        if self.is_over:
            raise OutOfTime
        try:
            run = self._complete(arm, settings, what)
        except Diverged as error:
            nothing = {"nll": None, "accuracy": None, "log_fit": None, "temperature": None}
            return {"failed": str(error), **nothing, "seconds": None, "curve": [], "norm": ""}
        learner, source, norm = self._opened(run)
        scores = fit_temperature(
            learner, source, "val", range(_CHOSEN_ON, _CHOSEN_ON + self.options.val_tasks),
            norm_stats=self.options.norm_stats,  # type: ignore[arg-type]
        )  # fmt: skip
        assert isinstance(scores, ClassScores)
        likelihood = learner.likelihood
        assert isinstance(likelihood, Categorical)
        assert likelihood.log_fit is not None
        gc.collect()  # learners and their recordings go in circles
        if likelihood.log_fit.is_cuda:
            torch.cuda.empty_cache()
        curve, seconds = _curve(run)
        return {
            "failed": "",
            "nll": float(scores.nll.mean()),
            "accuracy": float(scores.correct.mean()),
            "log_fit": float(likelihood.log_fit),
            "temperature": likelihood.temperature,
            "seconds": seconds,
            "curve": curve,
            "norm": norm,
        }

    def _complete(self, arm: str, settings: Settings, what: str) -> Run:
        """The run, trained to its end."""
        folder = self._folder(arm, settings)

        def tell(text: str) -> None:
            self.progress(len(self.done), self.total, f"{what}: {text}")
            listened = signal.getsignal(signal.SIGTERM) not in (signal.SIG_DFL, None)
            if self.is_over and listened:  # the run saves itself and stops
                signal.raise_signal(signal.SIGTERM)

        def watchers(*_: Any) -> list[_Watch]:
            return [_Watch(tell)]

        if (folder / "config.json").exists():
            run = open_run(folder)
            last = f"step-{run.settings.iterations:08d}.safetensors"
            if (run.checkpoints / last).exists():
                return run
            run, outcome = resume(run, watchers=watchers)
        else:
            shared = self._pretrained(settings)
            if shared.exists():
                folder.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(shared, folder / FILE)
            run, outcome = train(settings, folder, watchers=watchers)
        if outcome.signal is not None:
            raise OutOfTime if self.is_over else KeyboardInterrupt
        if (run.path / FILE).exists():
            if not (shared := self._pretrained(settings)).exists():
                shared.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(run.path / FILE, shared.with_suffix(".half"))
                shared.with_suffix(".half").replace(shared)
            (run.path / FILE).unlink()  # the complete run does not need it
        return run

    def _pretrained(self, settings: Settings) -> Path:
        own = {name: getattr(settings, name) for name in ("root", "splits", "image_size")}
        key = {"data": settings.data, **own, **features_of(settings)}
        return self.parts.run_folder("pretraining", key).with_suffix(".safetensors")

    def _opened(self, run: Run) -> tuple[Any, Any, str]:
        """Learner, tasks, and the statistics of batch norm that its figures use."""
        options = self.options
        source = open_test(run, Protocol(queries=options.test_queries, device=options.device))
        learner, _ = load_run(run, "best", pick_device(options.device))
        likelihood = learner.likelihood
        assert isinstance(likelihood, Categorical)
        if likelihood.log_fit is None:  # one temperature for every method, from the same tasks
            at = likelihood.log_temperature
            likelihood.log_fit = torch.zeros((), dtype=at.dtype, device=at.device)
        ((norm, _),) = norm_protocols(learner, options.norm_stats, False).items()
        return learner, source, norm

    def _test(self, arm: str, settings: Settings, log_fit: float) -> dict[str, Any]:
        learner, source, _ = self._opened(open_run(self._folder(arm, settings)))
        learner.likelihood.log_fit.fill_(log_fit)
        scores = score_tasks(
            learner, source, "test", range(self.options.test_tasks),
            norm_stats=self.options.norm_stats,  # type: ignore[arg-type]
        )  # fmt: skip
        assert isinstance(scores, ClassScores)
        return {"scores": packed(scores)}


class _Watch:
    """Reports the progress of a run."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell, self._total = tell, 0

    def started(self, first: int, total: int) -> None:
        self._total = total

    def stepped(self, step: Step) -> None:
        self._tell(f"iteration {step.step} of {self._total}")

    def validated(self, step: int, scores: dict[str, float], best: bool) -> None: ...

    def message(self, text: str) -> None:
        self._tell(text)

    def ended(self) -> None: ...


def _curve(run: Run) -> tuple[list[list[float]], float]:
    """Validations of a run as (tasks, seconds, nll, accuracy), and the seconds of all of it. Each
    restart counts its seconds from zero."""
    before, last, curve = 0.0, 0.0, []
    for line in read_log(run.path / "log.jsonl"):
        now = float(line.get("seconds", last))
        before += last if now < last else 0.0
        last = now
        if line.get("val_nll") is not None:
            tasks = line["step"] * run.settings.tasks
            curve.append([tasks, round(before + now, 1), line["val_nll"], line["val_accuracy"]])
    return curve, round(before + last, 1)


def merged(scores: list[ClassScores]) -> ClassScores:
    """The scores of several seeds on the same tasks as those of one learner with as many answers
    more."""
    arrays = ("nll", "confidence", "correct", "brier")
    nll, confidence, correct, brier = (
        np.concatenate([getattr(s, name) for s in scores], 1) for name in arrays
    )
    return ClassScores(scores[0].keys, nll, confidence, correct, brier)
