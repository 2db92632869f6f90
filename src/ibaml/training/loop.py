"""How does a run go on, step by step? Meta-steps, validation, checkpoints, and what to do when
something goes wrong."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ibaml.learner import MetaLearner
from ibaml.seeding import mix
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
from ibaml.training.outer import (
    Average,
    build_optimizer,
    optimizer_tensors,
    rate_at,
    restore_optimizer,
)
from ibaml.training.processes import Processes
from ibaml.training.rise import LOST, RETURNS, SHRINK, Rise, no_way_back
from ibaml.training.run import Run, RunError, settle
from ibaml.training.settings import Settings
from ibaml.training.signals import StopRequest
from ibaml.training.validation import validation_scores
from ibaml.training.watch import Step, Watcher

_NOISE = 7  # the meta-steps draw their seeds from this stream


@dataclass(frozen=True)
class Outcome:
    """How training ended: at which step, and by which signal if one stopped it."""

    step: int
    signal: int | None = None


class Trainer:
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
    ) -> None:
        self.settings = settings
        self.learner = learner
        self.tasks = tasks
        self.run = run
        self.processes = processes if processes is not None else Processes()
        self.watchers = list(watchers)
        self.parameters = list(learner.parameters())
        self.device = self.parameters[0].device
        self.optimizer = build_optimizer(settings, self.parameters)
        self.average = (
            None if settings.ema is None else Average(settings.ema, learner.named_parameters())
        )
        self.step = 0
        self.best: float | None = None  # validation nll
        self.best_step = 0
        self.faulty = 0  # faulty iterations in a row
        self.rise = Rise()
        self.returns = 0  # how often it went back to the best weights
        self.watcher_error: OSError | None = None  # why a watcher failed
        self.notes: list[str] = []  # for the watchers, once the run begins
        self.stop = StopRequest()

    # --- state -----------------------------------------------------------------------------------

    def state(self) -> dict[str, Tensor]:
        """All tensors that the next iteration depends on."""
        state = {f"learner/{n}": t for n, t in self.learner.state_dict().items()}
        state.update((f"optimiser/{n}", t) for n, t in optimizer_tensors(self.optimizer).items())
        if self.average is not None:
            state.update((f"average/{n}", t) for n, t in self.average.values.items())
        return state

    def facts(self) -> dict[str, Any]:
        updates = 0 if self.average is None else self.average.updates
        return {
            "best": self.best, "best_step": self.best_step, "faulty": self.faulty,
            "updates": updates, "rise": self.rise.facts(), "returns": self.returns,
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
            self.average.updates = int(facts["updates"])
        return facts

    def save(self) -> None:
        if self.run is not None and self.processes.first:
            self.run.save(self.step, self.state(), self.facts())

    # --- one iteration ---------------------------------------------------------------------------

    def gradient(self, step: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Leave the meta-gradient of iteration ``step`` (0 is the first) in the parameters.

        Returns the mean loss, the number of tasks that took part, the number left out, and how
        many processes caught each signal. The gradient is that of all tasks at once:
        micro-batches and processes add up sums, and the sum is divided by the number of tasks that
        took part.
        """
        settings = self.settings
        keys = self.processes.share(range(step * settings.tasks, (step + 1) * settings.tasks))
        like = self.parameters[0]
        sums = like.new_zeros(3)  # of losses, of tasks that took part, of tasks left out
        caught = like.new_tensor(self.stop.caught())
        for p in self.parameters:
            p.grad = torch.zeros_like(p)
        self.learner.train()
        with self.learner.one_meta_step() as statistics:
            lacking = ""
            try:
                for chunk in _chunks(keys, settings.micro_batch or len(keys)):
                    sums += self._add_gradient(chunk, mix(settings.seed, _NOISE, step))
            except Exception as error:  # no longer kept after this block: it holds the tensors
                if not out_of_memory(error):
                    raise
                lacking = first_line(error)
            gradients = [p.grad for p in self.parameters if p.grad is not None]
            failed = like.new_tensor(float(bool(lacking)))
            self.processes.add_up([*gradients, sums, caught, failed, *statistics.tensors()])
            if lacking or (self.processes.world > 1 and float(failed)):  # else nothing to wait for
                raise OutOfMemory(lacking or "in another process")
        total, counted, left_out = sums.unbind()
        torch._foreach_div_(gradients, counted.clamp(min=1))
        return total / counted, counted, left_out, caught

    def _gradient_that_fits(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The gradient of the next iteration; by fewer tasks at a time if memory runs out."""
        while True:
            try:
                return self.gradient(self.step)
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

    def _add_gradient(self, keys: Sequence[int], seed: int) -> Tensor:
        """Add the sum of these tasks' gradients. (The memory of one micro-batch is free before the
        next begins.)"""
        sums = self.parameters[0].new_zeros(3)
        for batch in self.tasks.batches("train", keys):
            loss = self.learner(batch, torch.Generator().manual_seed(seed))
            counted_before = len(batch) - self.learner.diagnostics.left_out.sum()
            total = loss * counted_before
            gradients = torch.autograd.grad(total, self.parameters, allow_unused=True)
            # the backward pass may have left out more
            left_out = self.learner.diagnostics.left_out.sum()
            counted = len(batch) - left_out
            share = counted / counted_before.clamp(min=1)  # 1 unless the backward pass did
            for p, g in zip(self.parameters, gradients, strict=True):
                if g is not None and p.grad is not None:
                    p.grad += g * share
            zero = torch.zeros_like(loss)
            sums += torch.stack(
                [torch.where(counted > 0, loss.detach() * counted, zero), counted, left_out]
            )
        return sums

    def advance(self) -> Step:
        """One meta-iteration."""
        loss, counted, left_out, caught = self._gradient_that_fits()
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, self.settings.clip)
        parts = [loss, counted, left_out, norm, *caught]
        figures = torch.stack([t.to(norm.dtype) for t in parts]).tolist()
        mean_loss, taking_part, without, gradient_norm, *caught_by = figures
        rate = rate_at(self.settings, self.step) * SHRINK**self.returns
        moved = taking_part > 0 and math.isfinite(gradient_norm)
        if moved:
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            self.optimizer.step()
            if self.average is not None:
                self.average.update()
        self.step += 1
        tasks = taking_part + without
        moved_enough = moved and 2 * without <= tasks
        self.faulty = 0 if moved_enough else self.faulty + 1
        self.stop.agree(caught_by)
        report = Step(self.step, mean_loss, int(tasks), int(without), gradient_norm, moved, rate)
        every, last = self.settings.log_every, self.settings.iterations
        is_logged = self.step % every == 0 or self.step == last
        return self._with_diagnostics(report) if is_logged else report

    def _with_diagnostics(self, report: Step) -> Step:
        """The report with the diagnostics of this process's last call."""
        try:
            last = self.learner.diagnostics
        except RuntimeError:  # this process has no tasks
            return report
        residual, norms, unsolved = last.cg_residual, last.gradient_norm, last.unsolved
        return replace(
            report,
            cg_residual=None if residual is None else float(residual.nanmean()),
            unsolved=None if unsolved is None else float(unsolved.double().mean()),
            inner_gradient=None
            if norms is None
            else {name: float(n.nanmean()) for name, n in norms.items()},
        )

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
            with self.stop.listening():
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
            try:
                report = self.advance()
            except Exception as error:
                if not out_of_memory(error):
                    raise
                raise TrainingError(
                    f"out of memory in iteration {self.step + 1} ({first_line(error)}): lower "
                    f"{what_to_lower(settings)}"
                ) from error
            self._tell("stepped", report)
            if settings.method != "reptile" and self.rise.watch(self.step, report.loss):
                self._check_rise(validates)  # (Reptile's loss is a distance: not watched)
            if self.faulty >= settings.patience:
                self._give_up(saved)
            last = self.step == settings.iterations
            if validates and (self.step % settings.val_every == 0 or last):
                self.validate()
            stop = self.stop.signal(self.processes.world)
            if self.step % settings.checkpoint_every == 0 or last or stop:
                self._refuse_nonfinite()
                self.save()
                saved = self.step
            if stop:
                self._raise_watcher_error()
                return Outcome(self.step, stop)
        self._raise_watcher_error()
        if validates and self.best is not None and self.best_step < self.step:
            self._tell(
                "message",
                f"the best weights are from iteration {self.best_step} (validation nll "
                f"{self.best:.3f}), not from the last: evaluate and load use the best",
            )
        return Outcome(self.step)

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

    def _check_rise(self, validates: bool) -> None:
        """The training loss is far above its best. Validation tasks, where there are any, decide
        whether anything was lost, because harder tasks also raise the loss."""
        before = self.best
        if validates and before is not None and self.validate()["nll"] <= before + LOST:
            self.rise.accept(self.step)
        else:
            self._go_back()

    def _go_back(self) -> None:
        """The training loss is far above its best: continue from the best weights with a smaller
        step, or stop with a diagnosis."""
        run, where_best = self.run, self.run is not None and self.best is not None
        content = None
        if run is not None and where_best and self.processes.first and self.returns < RETURNS:
            content = run.weights("best").content if run.best_score() else None
        content = self.processes.from_first(content, self.device)
        if content is None:
            best = run.best if run is not None and where_best else None
            raise no_way_back(
                self.rise, self.settings, self.step, self.returns, unsolved(self.learner), best
            )
        what = self.rise.sentence
        facts = self._fill(content)
        step = facts["step"]
        self.rise.restore(facts["rise"])
        self.rise.begin_anew()
        self.returns += 1
        self._tell(
            "message",
            f"iteration {self.step}: {what}; continuing from the best weights (iteration {step}) "
            f"with {SHRINK:g} times the step size. {unsolved(self.learner)}".rstrip(),
        )

    def _run_path(self) -> str:
        return "RUN" if self.run is None else shlex.quote(str(self.run.path))

    def validate(self) -> dict[str, float]:
        """Scores on the validation tasks; saves the weights if they are the best so far."""
        on_message = partial(self._tell, "message")
        with nullcontext() if self.average is None else self.average.in_place():
            result = validation_scores(
                self.learner, self.tasks, self.settings, self.processes, on_message
            )
        best = result["nll"] < (float("inf") if self.best is None else self.best)
        if best:
            self.best, self.best_step = result["nll"], self.step
            if self.run is not None and self.processes.first:
                facts = {**self.facts(), "validation": result}
                self.run.save_best(self.step, self.state(), facts)
        self._tell("validated", self.step, result, best)
        return result

    def _give_up(self, saved: int) -> None:
        what = diagnose(self.learner, self.settings)
        where = f"The last good checkpoint is that of iteration {saved}." if saved else ""
        raise Diverged(
            f"stopped: {self.faulty} faulty iterations in a row (patience). {what} {where}".strip()
        )

    def _refuse_nonfinite(self) -> None:
        """Stop before weights that are not finite are written over good ones."""
        if not all(bool(p.isfinite().all()) for p in self.parameters):
            raise Diverged(f"stopped. {diagnose(self.learner, self.settings)}")

    def _tell(self, what: str, *words: Any) -> None:
        """Call every watcher. One that cannot write (a full disk) asks the run to stop, as a signal
        does, so that the state is saved before the error is raised."""
        for watcher in self.watchers:
            try:
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


def _chunks(keys: Sequence[int], size: int) -> Iterator[Sequence[int]]:
    for begin in range(0, len(keys), max(size, 1)):
        yield keys[begin : begin + size]


def _reason(error: OSError | None) -> str:
    if error is None:
        return "another process could not write its log"
    what = error.filename or "the log of the run"
    return f"{what} could not be written ({error.strerror or error})"
