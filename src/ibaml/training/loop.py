"""How does a run go on, from iteration to iteration? Validation, checkpoints, and what to do when
something goes wrong."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from ibaml.learner import MetaLearner
from ibaml.tasks import TaskSource
from ibaml.tasks.keyed import has_tasks
from ibaml.training.checkpoint import under, unpack
from ibaml.training.faults import (
    Diverged,
    OutOfMemory,
    TrainingError,
    diagnose,
    first_line,
    out_of_memory,
    unsolved,
    what_to_lower,
)
from ibaml.training.fitting import fit_memory, release
from ibaml.training.iteration import Iterations
from ibaml.training.outer import optimizer_tensors, restore_optimizer
from ibaml.training.pending import Idle, Pending
from ibaml.training.processes import Processes
from ibaml.training.rise import LOST, RETURNS, SHRINK, Rise, no_way_back
from ibaml.training.run import Run, RunError, settle
from ibaml.training.settings import Settings
from ibaml.training.spans import Spans
from ibaml.training.validation import validated_at_once, validation_scores
from ibaml.training.watch import Watcher
from ibaml.training.writer import Snapshot, Writer


@dataclass(frozen=True)
class Outcome:
    """How training ended: at which step, and by which signal if one stopped it."""

    step: int
    signal: int | None = None


class Trainer(Iterations):
    """Trains one learner on one source of tasks, in one run folder (or none).

    An iteration depends only on the settings, its number, and the state in checkpoints. So a run
    does not change when it is interrupted and resumed, and changes only by rounding when its tasks
    are split into micro-batches or over processes.
    """

    def __init__(
        self,
        settings: Settings,
        learner: MetaLearner,
        tasks: TaskSource,
        run: Run | None = None,
        processes: Processes | None = None,
        watchers: Sequence[Watcher] = (),
        spans: Spans | None = None,
    ) -> None:
        super().__init__(settings, learner, tasks, processes, spans)
        self.run = run
        self.watchers = list(watchers)
        self.best: float | None = None  # validation nll
        self.best_step = 0
        self.rise = Rise()
        self.watcher_error: OSError | None = None  # why a watcher failed
        self.notes: list[str] = []  # for the watchers, once the run begins
        self.pending: Pending | None = None  # the last iteration, until somebody looks at it
        self.idle = Idle()
        self.writer = Writer()

    # --- state -----------------------------------------------------------------------------------

    def state(self) -> dict[str, Tensor]:
        """All tensors that the next iteration depends on."""
        state = {f"learner/{n}": t for n, t in self.learner.state_dict().items()}
        state.update((f"optimiser/{n}", t) for n, t in optimizer_tensors(self.optimizer).items())
        if self.average is not None:
            state.update((f"average/{n}", t) for n, t in self.average.values.items())
        return state

    def facts(self) -> dict[str, Any]:
        updates = 0 if self.average is None else int(self.average.updates)
        return {
            "best": self.best, "best_step": self.best_step, "faulty": self.faulty,
            "updates": updates, "rise": self.rise.facts(), "returns": self.returns,
            "pending": None if self.pending is None else self.pending.facts(),
        }  # fmt: skip

    def restore(self, content: bytes) -> None:
        """Go back to a checkpoint; one of another network or run raises a `TrainingError`."""
        try:
            facts = self._fill(content)
            best = facts["best"]
            self.step, self.best = int(facts["step"]), None if best is None else float(best)
            self.faulty, self.returns = int(facts["faulty"]), int(facts["returns"])
            self.best_step = int(facts["best_step"])
            self.rise.restore(facts["rise"])
            self.pending = Pending.read(facts.get("pending"))
        except (KeyError, TypeError, ValueError, RuntimeError, AttributeError) as error:
            reason = f"{error} is missing" if isinstance(error, KeyError) else first_line(error)
            raise TrainingError(
                f"the newest checkpoint in {self._run_path()} is not one of this run ({reason}): "
                "move it away, and an older one is taken"
            ) from error

    def _fill(self, content: bytes) -> dict[str, Any]:
        """Restore weights, average and the optimizer's state from a checkpoint."""
        tensors, facts = unpack(content)
        self.learner.load_state_dict(under("learner", tensors))
        restore_optimizer(self.optimizer, under("optimiser", tensors))
        if self.average is not None:
            for name, value in under("average", tensors).items():
                self.average.values[name].copy_(value)
            self.average.updates.fill_(int(facts["updates"]))
        return facts

    def save(self) -> None:
        """Have a checkpoint written: from a copy, while the run goes on."""
        if self.run is not None and self.processes.first:
            with self.spans("checkpoint"):
                self._write(self.run.save, self.facts())

    def _write(self, write: Callable[..., object], facts: dict[str, Any]) -> None:
        step, snapshot = self.step, Snapshot(self.state())
        self.writer.submit(lambda: write(step, snapshot.tensors(), facts))

    # --- the run ---------------------------------------------------------------------------------

    def train(self) -> Outcome:
        """Train from the current state to the last iteration."""
        settings = self.settings
        self.fit_memory()
        validates = settings.val_every > 0 and has_tasks(self.tasks, "val")
        self._tell("started", self.step, settings.iterations)
        if self._a_watcher_failed():  # no work is lost yet
            raise RunError(f"{_reason(self.watcher_error)}: make room, or choose another place")
        for note in self.notes:
            self._tell("message", note)
        if settings.val_every > 0 and not validates:
            self._tell(
                "message", f"no validation: {self.tasks.name} has no validation tasks of this size"
            )
        try:
            with self.stop.listening(), self.writer:
                return self._loop(validates)
        finally:
            self._tell("ended")

    def _loop(self, validates: bool) -> Outcome:
        settings = self.settings
        saved = self.step
        if self.step >= settings.iterations:
            if validates and self.step == 0:
                self.validate()  # nothing is trained, but it should be known how good the start is
            self.save()  # the run is complete, perhaps with only its best state on disk
        while self.step < settings.iterations:
            before, self.pending = self.pending, self._launched()
            self.writer.check()
            if before is not None:
                self._look_at(before, validates, saved)
            last = self.step == settings.iterations
            validating = validates and (self.step % settings.val_every == 0 or last)
            saving = self.step % settings.checkpoint_every == 0 or last
            if (validating or saving) and self.pending is not None:
                # here the device is waited for: what is decided must not depend on what comes next
                newest, self.pending = self.pending, None
                self._look_at(newest, validates, saved)
            if validating:
                self.validate()
            stop = self.stop.signal(self.processes.world)
            if saving or stop:
                self._refuse_nonfinite()
                self.save()
                saved = self.step
            if stop:
                self.writer.wait()
                self._raise_watcher_error()
                return Outcome(self.step, stop)
        self.writer.wait()
        self._raise_watcher_error()
        if validates and self.best is not None and self.best_step < self.step:
            self._tell(
                "message",
                f"the best weights are from iteration {self.best_step} (validation nll "
                f"{self.best:.3f}), not from the last: evaluate and load use the best",
            )
        return Outcome(self.step)

    def launch(self) -> Pending:
        """Begin one meta-iteration; by fewer tasks at a time if memory runs out."""
        while True:
            try:
                return super().launch()
            except OutOfMemory as error:
                lacking = str(error)
            release(self.learner)
            before = self.settings.micro_batch or self.settings.tasks  # the same in every process
            if before == 1:
                raise TrainingError(
                    f"out of memory in iteration {self.step + 1} ({lacking}): lower "
                    f"{what_to_lower(self.settings)}"
                )
            now = (before + 1) // 2
            self._settle(micro_batch=now)
            self._tell(
                "message",
                f"out of memory in iteration {self.step + 1} with {before} task(s) at once "
                f"({lacking}): {now} at a time from here on, which rounds sums differently",
            )

    def _launched(self) -> Pending:
        try:
            with self.spans("step"):
                return self.launch()
        except Exception as error:
            if not out_of_memory(error):
                raise
            raise TrainingError(
                f"out of memory in iteration {self.step + 1} ({first_line(error)}): lower "
                f"{what_to_lower(self.settings)}"
            ) from error

    def _look_at(self, pending: Pending, validates: bool, saved: int) -> None:
        """Tell what an iteration did, and act if it went wrong. Usually the next one has begun."""
        begun = self.pending is not None and self.device.type == "cuda"
        if begun and (hint := self.idle.sees(pending, self.settings.tasks)):
            self._tell("message", hint)
        report = self.report(pending)
        self._tell("stepped", report)
        watched = self.settings.method != "reptile" and not pending.stale
        if watched and self.rise.watch(pending.step, report.loss):
            self._check_rise(pending, validates)  # (Reptile's loss is a distance: not watched)
        if self.faulty >= self.settings.patience:
            self._give_up(pending, saved)

    def _raise_watcher_error(self) -> None:
        """Raise for what could not be written, now that the state is saved."""
        if self._a_watcher_failed():
            raise RunError(
                f"{_reason(self.watcher_error)}: saved after iteration {self.step}. Make room, "
                f"then: ibaml train --resume {self._run_path()}"
            )

    def _a_watcher_failed(self) -> bool:
        """Whether a watcher of any process failed, so that all processes end alike."""
        return not self.processes.all_agree(self.watcher_error is None, self.device)

    def _check_rise(self, pending: Pending, validates: bool) -> None:
        """The training loss is far above its best. Validation tasks, where there are any, decide
        whether anything was lost, because harder tasks also raise the loss."""
        before = self.best
        if validates and before is not None and self.validate()["nll"] <= before + LOST:
            self.rise.accept(self.step)
        else:
            self._go_back(unsolved(pending.diagnostics))

    def _go_back(self, unsolved: str) -> None:
        """The training loss is far above its best: continue from the best weights with a smaller
        step, or stop with a diagnosis."""
        self.writer.wait()
        run, where_best = self.run, self.run is not None and self.best is not None
        content = None
        if run is not None and where_best and self.processes.first and self.returns < RETURNS:
            content = run.weights("best").content if run.best_score() else None
        content = self.processes.from_first(content, self.device)
        if content is None:
            best = run.best if run is not None and where_best else None
            raise no_way_back(self.rise, self.settings, self.step, self.returns, unsolved, best)
        what = self.rise.sentence
        facts = self._fill(content)
        step = facts["step"]
        self.rise.restore(facts["rise"])
        self.rise.begin_anew()
        self.returns += 1
        if self.pending is not None:  # it began from the weights that are given up
            self.pending = replace(self.pending, stale=True)
        self._tell(
            "message",
            f"iteration {self.step}: {what}; continuing from the best weights (iteration {step}) "
            f"with {SHRINK:g} times the step size. {unsolved}".rstrip(),
        )

    def _run_path(self) -> str:
        return "RUN" if self.run is None else shlex.quote(str(self.run.path))

    def validate(self) -> dict[str, float]:
        """Scores on the validation tasks; saves the weights if they are the best so far."""
        on_message = partial(self._tell, "message")
        averaged = nullcontext() if self.average is None else self.average.in_place()
        with self.spans("validation"), averaged:
            result = validation_scores(
                self.learner, self.tasks, self.settings, self.processes, on_message,
                self.validated_at_once,
            )  # fmt: skip
        best = result["nll"] < (float("inf") if self.best is None else self.best)
        if best:
            self.best, self.best_step = result["nll"], self.step
            if self.run is not None and self.processes.first:
                facts = {**self.facts(), "validation": result}
                with self.spans("checkpoint"):
                    self._write(self.run.save_best, facts)
        self._tell("validated", self.step, result, best)
        return result

    @cached_property
    def validated_at_once(self) -> int:
        """How many validation tasks are judged at once; measured once."""
        return validated_at_once(self.learner, self.tasks, self.settings)

    def _give_up(self, pending: Pending, saved: int) -> None:
        self.writer.wait()
        what = diagnose(self.learner, self.settings, pending.diagnostics, pending.gradients)
        where = f"The last good checkpoint is that of iteration {saved}." if saved else ""
        raise Diverged(
            f"stopped: {self.faulty} faulty iterations in a row (patience). {what} {where}".strip()
        )

    def _refuse_nonfinite(self) -> None:
        """Stop before weights that are not finite are written over good ones."""
        if not bool(torch.stack([p.isfinite().all() for p in self.parameters]).all()):
            gradients = {name: p.grad for name, p in self.learner.named_parameters()}
            what = diagnose(self.learner, self.settings, self._diagnostics(), gradients)
            raise Diverged(f"stopped. {what}")

    def _tell(self, what: str, *words: Any) -> None:
        """Call every watcher. One that cannot write (a full disk) asks the run to stop, as a signal
        does, so that the state is saved before the error is raised."""
        for watcher in self.watchers:
            try:
                with self.spans("log"):
                    getattr(watcher, what)(*words)
            except OSError as error:
                if self.watcher_error is None:
                    self.watcher_error = error
                    self.stop.ask()

    def fit_memory(self) -> None:
        """Choose the micro-batch if none was given; refuse one that does not fit."""
        if self.step >= self.settings.iterations:
            return
        resumed = self._run_path() if self.step else None
        fit = fit_memory(self.learner, self.tasks, self.settings, self.processes, resumed)
        # kept in the settings: a resumed run takes the same number, whatever memory is free then
        notes = self._settle(micro_batch=fit.micro_batch)
        for note in (*notes, *fit.notes):
            self._tell("message", note)

    def _settle(self, **choices: Any) -> list[str]:
        """Change settings, in the run's folder too. Returns notes about the changes."""
        self.settings = replace(self.settings, **choices)
        if self.run is None:
            return []
        self.run = replace(self.run, settings=self.settings)
        return settle(self.run) if self.processes.first else []


def _reason(error: OSError | None) -> str:
    if error is None:
        return "another process could not write its log"
    what = error.filename or "the log of the run"
    return f"{what} could not be written ({error.strerror or error})"
