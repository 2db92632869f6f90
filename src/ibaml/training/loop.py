"""The loop: meta-steps, validation, checkpoints, and what to do when something goes wrong."""

from __future__ import annotations

import math
import shlex
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ibaml.energy import Categorical
from ibaml.evaluation import Scores
from ibaml.evaluation.predict import fit_temperature, score_tasks
from ibaml.learner import MetaLearner
from ibaml.machine import free_bytes
from ibaml.seeding import mix
from ibaml.tasks import TaskSource
from ibaml.tasks.keyed import has_tasks
from ibaml.training.checkpoint import under, unpack
from ibaml.training.faults import (
    Diverged,
    TrainingError,
    diagnose,
    out_of_memory,
    what_to_lower,
)
from ibaml.training.memory import peak_bytes
from ibaml.training.outer import (
    Average,
    build_optimiser,
    optimiser_tensors,
    rate_at,
    restore_optimiser,
)
from ibaml.training.processes import Processes
from ibaml.training.rise import WINDOW, Rise
from ibaml.training.run import Run, RunError, settle
from ibaml.training.settings import Settings
from ibaml.training.watch import Step, Watcher

_NOISE = 7  # the stream of seeds the meta-steps draw from
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_SHRINK = 0.3  # the step size after a run went back to its best weights
_RETURNS = 3  # how often it does
_LOST = 0.3  # nats of validation nll above the best from which on something was lost


@dataclass(frozen=True)
class Outcome:
    """How training ended: at which step, and by which signal, if one stopped it."""

    step: int
    signal: int | None = None


class Trainer:
    """Trains one learner on one source of tasks, in one run folder (or none).

    Everything an iteration does is a function of the settings, its number, and the state that
    checkpoints hold: a run does not change when it is interrupted and resumed, when its tasks go
    through in micro-batches, or when they are spread over processes (but for rounding).
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
        self.optimiser = build_optimiser(settings, self.parameters)
        self.average = (
            None if settings.ema is None else Average(settings.ema, learner.named_parameters())
        )
        self.step = 0
        self.best: float | None = None  # validation nll
        self.best_step = 0
        self.faulty = 0  # iterations in a row
        self.rise = Rise()
        self.returns = 0  # to the best weights
        self.unheard: OSError | None = None  # why a watcher failed
        self.notes: list[str] = []  # to be told once the run begins
        self._asked = 0  # the signal this process caught
        self._agreed = 0  # the signal all processes know of

    # --- state -----------------------------------------------------------------------------------

    def state(self) -> dict[str, Tensor]:
        """All tensors that the next iteration depends on."""
        found = {f"learner/{n}": t for n, t in self.learner.state_dict().items()}
        found.update((f"optimiser/{n}", t) for n, t in optimiser_tensors(self.optimiser).items())
        if self.average is not None:
            found.update((f"average/{n}", t) for n, t in self.average.values.items())
        return found

    def facts(self) -> dict[str, Any]:
        updates = 0 if self.average is None else self.average.updates
        return {
            "best": self.best, "best_step": self.best_step, "faulty": self.faulty,
            "updates": updates, "rise": self.rise.facts(), "returns": self.returns,
        }  # fmt: skip

    def restore(self, content: bytes) -> None:
        """Go back to a checkpoint."""
        facts = self._fill(content)
        self.step, self.best, self.faulty = facts["step"], facts["best"], facts["faulty"]
        self.best_step, self.returns = facts["best_step"], facts["returns"]
        self.rise.restore(facts["rise"])

    def _fill(self, content: bytes) -> dict[str, Any]:
        """Take weights, average and the optimiser's memory from a checkpoint."""
        tensors, facts = unpack(content)
        self.learner.load_state_dict(under("learner", tensors))
        restore_optimiser(self.optimiser, under("optimiser", tensors))
        if self.average is not None:
            for name, value in under("average", tensors).items():
                self.average.values[name].copy_(value)
            self.average.updates = facts["updates"]
        return facts

    def save(self) -> None:
        if self.run is not None and self.processes.first:
            self.run.save(self.step, self.state(), self.facts())

    # --- one iteration ---------------------------------------------------------------------------

    def gradient(self, step: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Leave the meta-gradient of iteration ``step`` (0 is the first) in the parameters.

        Returns the mean loss, the number of tasks that took part, those left out, and by how many
        processes each of the signals was caught. The gradient is that of all tasks at once:
        micro-batches and processes add up sums, and the sum is divided by the number of tasks that
        took part.
        """
        settings = self.settings
        mine = self.processes.share(range(step * settings.tasks, (step + 1) * settings.tasks))
        like = self.parameters[0]
        sums = like.new_zeros(3)  # of losses, of tasks that took part, of tasks left out
        caught = like.new_tensor([self._asked == number for number in _SIGNALS])
        for p in self.parameters:
            p.grad = torch.zeros_like(p)
        self.learner.train()
        with self.learner.one_meta_step() as statistics:
            for chunk in _chunks(mine, settings.micro_batch or len(mine)):
                sums += self._add_gradient(chunk, mix(settings.seed, _NOISE, step))
            gradients = [p.grad for p in self.parameters if p.grad is not None]
            self.processes.add_up([*gradients, sums, caught, *statistics.tensors()])
        total, kept, out = sums.unbind()
        torch._foreach_div_(gradients, kept.clamp(min=1))
        return total / kept, kept, out, caught

    def _add_gradient(self, keys: Sequence[int], seed: int) -> Tensor:
        """Add the gradients of these tasks, summed over them. (Nothing of one micro-batch lives on
        when the next begins.)"""
        sums = self.parameters[0].new_zeros(3)
        for batch in self.tasks.batches("train", keys):
            loss = self.learner(batch, torch.Generator().manual_seed(seed))
            before = len(batch) - self.learner.diagnostics.left_out.sum()
            found = torch.autograd.grad(loss * before, self.parameters, allow_unused=True)
            # the way back may have left out more
            out = self.learner.diagnostics.left_out.sum()
            kept = len(batch) - out
            share = kept / before.clamp(min=1)  # 1 but for those, and then the sum of the others
            for p, g in zip(self.parameters, found, strict=True):
                if g is not None and p.grad is not None:
                    p.grad += g * share
            zero = torch.zeros_like(loss)
            sums += torch.stack([torch.where(kept > 0, loss.detach() * kept, zero), kept, out])
        return sums

    def advance(self) -> Step:
        """One meta-iteration."""
        loss, kept, out, caught = self.gradient(self.step)
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, self.settings.clip)
        parts = [loss, kept, out, norm, *caught]
        seen = torch.stack([t.to(norm.dtype) for t in parts]).tolist()
        rate = rate_at(self.settings, self.step) * _SHRINK**self.returns
        moved = seen[1] > 0 and math.isfinite(seen[3])
        if moved:
            for group in self.optimiser.param_groups:
                group["lr"] = rate
            self.optimiser.step()
            if self.average is not None:
                self.average.update()
        self.step += 1
        sound = moved and 2 * seen[2] <= seen[1] + seen[2]
        self.faulty = 0 if sound else self.faulty + 1
        caught_by = dict(zip(_SIGNALS, seen[4:], strict=True))
        self._agreed = next((number for number, count in caught_by.items() if count), 0)
        report = Step(
            self.step, seen[0], int(seen[1] + seen[2]), int(seen[2]), seen[3], moved, rate
        )
        wanted = self.step % self.settings.log_every == 0 or self.step == self.settings.iterations
        return self._with_diagnostics(report) if wanted else report

    def _with_diagnostics(self, report: Step) -> Step:
        """What the last call of this process saw inside its tasks."""
        try:
            seen = self.learner.diagnostics
        except RuntimeError:  # this process has no tasks
            return report
        residual, norms, unsolved = seen.cg_residual, seen.gradient_norm, seen.unsolved
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
        """Go on from where the state is to the last iteration."""
        settings = self.settings
        self.fit_memory()
        validates = settings.val_every > 0 and has_tasks(self.tasks, "val")
        self._tell("started", self.step, settings.iterations)
        if self._unheard_anywhere():  # nothing is lost yet
            raise RunError(f"{_reason(self.unheard)}: make room, or choose another place")
        for note in self.notes:
            self._tell("told", note)
        if settings.val_every > 0 and not validates:
            self._tell("told", f"{self.tasks.name} has no validation tasks of this size: none done")
        try:
            with self._signals():
                return self._loop(validates)
        finally:
            self._tell("ended")

    def _loop(self, validates: bool) -> Outcome:
        settings = self.settings
        saved = self.step
        if self.step >= settings.iterations:
            self.save()  # nothing to do, or nothing but the best state was left of the last step
        while self.step < settings.iterations:
            try:
                report = self.advance()
            except Exception as error:
                if not out_of_memory(error):
                    raise
                raise TrainingError(
                    f"out of memory in iteration {self.step + 1} ({_first_line(error)}): lower "
                    f"{what_to_lower(settings)}"
                ) from error
            self._tell("stepped", report)
            if settings.method != "reptile" and self.rise.watch(self.step, report.loss):
                self._question(validates)  # (Reptile's loss is a distance)
            if self.faulty >= settings.patience:
                self._give_up(saved)
            last = self.step == settings.iterations
            if validates and (self.step % settings.val_every == 0 or last):
                self.validate()
            stop = self._stop()
            if self.step % settings.checkpoint_every == 0 or last or stop:
                self._refuse_ill()
                self.save()
                saved = self.step
            if stop:
                self._complain()
                return Outcome(self.step, stop)
        self._complain()
        if validates and self.best is not None and self.best_step < self.step:
            self._tell(
                "told",
                f"the best weights are those after iteration {self.best_step} (validation nll "
                f"{self.best:.3f}), not the last: evaluate and load take the best",
            )
        return Outcome(self.step)

    def _complain(self) -> None:
        """Say what could not be written, now that what was learned is saved."""
        if self._unheard_anywhere():
            raise RunError(
                f"{_reason(self.unheard)}: saved after iteration {self.step}. Make room, then: "
                f"ibaml train --resume {self._place()}"
            )

    def _unheard_anywhere(self) -> bool:
        """Whether a watcher of any process failed: all end with the same sentence."""
        return not self.processes.all_agree(self.unheard is None, self.device)

    def _question(self, validates: bool) -> None:
        """The training loss is far above its best. Validation tasks, where there are any, say
        whether anything was lost: the same loss may come of harder tasks."""
        before = self.best
        if validates and before is not None and self.validate()["nll"] <= before + _LOST:
            self.rise.accept(self.step)
        else:
            self._go_back()

    def _go_back(self) -> None:
        """The training loss is far above its best: on from the best weights with a smaller step, or
        an end with a diagnosis."""
        rise = self.rise
        assert rise.loss is not None
        assert rise.best is not None
        what = (
            f"the training loss rose to {rise.loss:.3g} (median of {WINDOW} iterations), far above "
            f"its best, {rise.best:.3g} around iteration {rise.step}"
        )
        here = self.run is not None and self.processes.first and self.best is not None
        content = None
        if here and self.returns < _RETURNS:
            assert self.run is not None
            content = self.run.weights("best").content if self.run.best_score() else None
        content = self.processes.from_first(content, self.device)
        if content is None:
            assert self.settings.meta_lr is not None
            smaller = f"{self.settings.meta_lr * _SHRINK ** (self.returns + 1):.1g}"
            why = f" after {self.returns} returns to the best weights" if self.returns else ""
            kept = (
                f"The best weights on the validation tasks are kept ({self.run.best})."
                if self.run is not None and self.best is not None
                else "No weights were validated before it; with validation tasks (val_every) a run "
                "goes back to its best ones."
            )
            raise Diverged(
                f"stopped in iteration {self.step}: {what}{why}. Lower meta_lr (now "
                f"{self.settings.meta_lr:g}, try {smaller}). {self._unsolved()}{kept}"
            )
        facts = self._fill(content)
        step = facts["step"]
        self.rise.restore(facts["rise"])
        self.rise.begin_anew()
        self.returns += 1
        self._tell(
            "told",
            f"iteration {self.step}: {what}; going on from the best weights (iteration {step}) "
            f"with {_SHRINK:g} times the step. {self._unsolved()}".rstrip(),
        )

    def _unsolved(self) -> str:
        """A sentence where the linear systems behind the last gradient were not solved."""
        try:
            seen = self.learner.diagnostics
        except RuntimeError:
            return ""
        unsolved, residual = seen.unsolved, seen.cg_residual
        if unsolved is None or residual is None or not bool(unsolved.any()):
            return ""
        return (
            f"The linear systems behind the meta-gradient are not solved in "
            f"{100 * float(unsolved.double().mean()):.0f} % of the tasks (relative residual up to "
            f"{float(residual[unsolved].max()):.1g}): raise cg_steps, or damping. "
        )

    def _place(self) -> str:
        return "RUN" if self.run is None else shlex.quote(str(self.run.path))

    def _stop(self) -> int:
        """The signal to stop by: at once in one process, when all know of it in several."""
        return self._asked if self.processes.world == 1 else self._agreed

    @torch.no_grad()
    def validate(self) -> dict[str, float]:
        """Scores on the validation tasks; the best weights so far are kept."""
        keys = self.processes.share(range(self.settings.val_tasks))
        averaged = nullcontext() if self.average is None else self.average.in_place()
        with averaged:
            sums = {"nll": 0.0, "tasks": 0.0}
            second = "rmse" if self.settings.regression else "accuracy"
            sums[second] = 0.0
            for row in self._validation_rows(keys):
                sums["nll"] += row["nll"]
                sums[second] += row["mse" if second == "rmse" else "accuracy"]
                sums["tasks"] += 1
            values = torch.tensor(list(sums.values()), dtype=torch.float64, device=self.device)
            self.processes.add_up([values])
            found = dict(zip(sums, values.tolist(), strict=True))
            count = found.pop("tasks")
            result = {name: value / count for name, value in found.items()}
            if second == "rmse":
                result["rmse"] = result["rmse"] ** 0.5
            if isinstance(self.learner.likelihood, Categorical):
                result["temperature"] = self.learner.likelihood.temperature
        best = result["nll"] < (float("inf") if self.best is None else self.best)
        if best:
            self.best, self.best_step = result["nll"], self.step
            if self.run is not None and self.processes.first:
                facts = {**self.facts(), "validation": result}
                self.run.save_best(self.step, self.state(), facts)
        self._tell("validated", self.step, result, best)
        return result

    def _validation_rows(self, keys: Sequence[int]) -> list[dict[str, int | float]]:
        at_once = min(self.settings.micro_batch or 16, 16)
        likelihood = self.learner.likelihood
        fits = isinstance(likelihood, Categorical) and likelihood.log_fit is not None
        if not keys and not fits:
            return []
        scores: Scores | None
        try:
            if fits:
                add_up = self.processes.add_up
                scores = fit_temperature(
                    self.learner, self.tasks, "val", keys, batch=at_once, add_up=add_up
                )
            else:
                scores = score_tasks(self.learner, self.tasks, "val", keys, batch=at_once)
        except FloatingPointError as error:  # the next steps may mend it, or patience will end
            self._tell("told", f"validation: {error}")
            return [{"nll": math.nan, "mse": math.nan, "accuracy": math.nan}]
        return [] if scores is None else scores.rows()

    def _give_up(self, saved: int) -> None:
        what = diagnose(self.learner, self.settings)
        kept = f"The last good checkpoint is that of iteration {saved}." if saved else ""
        raise Diverged(
            f"stopped: {self.faulty} faulty iterations in a row (patience). {what} {kept}".strip()
        )

    def _refuse_ill(self) -> None:
        """Never write weights that are not finite over good ones."""
        if not all(bool(p.isfinite().all()) for p in self.parameters):
            raise Diverged(f"stopped. {diagnose(self.learner, self.settings)}")

    def _tell(self, what: str, *words: Any) -> None:
        """A watcher that cannot write (a full disk) asks for an end, as a signal does: what was
        learned is saved before anybody complains."""
        for watcher in self.watchers:
            try:
                getattr(watcher, what)(*words)
            except OSError as error:
                if self.unheard is None:
                    self.unheard = error
                    self._asked = self._asked or signal.SIGTERM

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """A first Ctrl-C or SIGTERM asks for an end after this iteration; a second one is obeyed at
        once."""

        def ask(number: int, _: Any) -> None:
            self._asked = number
            signal.signal(number, before.get(number) or signal.SIG_DFL)

        before: dict[int, Any] = {}
        try:
            for wanted in _SIGNALS:
                before[wanted] = signal.signal(wanted, ask)
        except ValueError:  # not the main thread: signals are somebody else's
            pass
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    # --- memory ----------------------------------------------------------------------------------

    def fit_memory(self) -> None:
        """Estimate a meta-step's memory from one task and two; choose the micro-batch where none
        was given, and refuse what cannot fit."""
        if self.step >= self.settings.iterations:
            return
        world = self.processes.world
        mine = -(-self.settings.tasks // world)  # the most that one process has
        free = free_bytes(self.device)
        wanted = min(self.settings.micro_batch or mine, mine)
        each, fixed, fits = 1, 0, wanted
        if free is not None:
            if self.device.type != "cuda":
                free //= self.processes.local_world
            one = self._probe(1)
            two = self._probe(2) if wanted > 1 else 2 * one
            each = max(two - one, 1)
            fixed = max(one - each, 0)
            fits = int((0.9 * free - fixed) / each)
        fits = self.processes.least(fits, self.device)  # the same in all: sums are rounded alike
        if fits < 1 or (self.settings.micro_batch is not None and fits < wanted):
            least = wanted if fits >= 1 else 1
            need = f"{least} task(s) at once need about {_size(fixed + each * least)} and " + (
                "less" if free is None else _size(free)
            )
            if self.step:
                raise TrainingError(
                    f"{need} is free. The run goes through {wanted} at a time: free some memory, "
                    "or choose another number, whose sums are rounded differently (ibaml train "
                    f"--resume {self._place()} --micro-batch {max(fits, 1)})"
                )
            raise TrainingError(f"{need} is free: lower {what_to_lower(self.settings)}")
        chosen = min(wanted, fits)
        self.settings = replace(self.settings, micro_batch=chosen)
        if self.run is not None:
            # a resumed run takes the same number, whatever is free then
            self.run = replace(self.run, settings=self.settings)
            if self.processes.first:
                settle(self.run)
        if chosen < mine:
            self._tell("told", f"{mine} tasks go through {chosen} at a time")
        if free is None:
            return
        self._tell(
            "told",
            f"execution: {self.learner.strategy}; memory: about {_size(fixed + each * chosen)} for "
            f"{chosen} task(s) at once, {_size(free)} free",
        )

    def _probe(self, count: int) -> int:
        self.learner.eval()  # no statistics
        batches = self.tasks.batches("train", range(count))

        def meta_gradient() -> None:
            for batch in batches:
                self.learner(batch, torch.Generator().manual_seed(0)).backward()

        try:
            for batch in batches:
                self.learner.examine(batch)  # done once, so it is not to be measured
            return peak_bytes(meta_gradient, self.device)
        except Exception as error:
            if not out_of_memory(error):
                raise
            raise TrainingError(
                f"{count} task(s) do not fit into memory ({_first_line(error)}): lower "
                f"{what_to_lower(self.settings)}"
            ) from error
        finally:
            for p in self.parameters:
                p.grad = None
            self.learner.train()


def _chunks(keys: Sequence[int], size: int) -> Iterator[Sequence[int]]:
    for begin in range(0, len(keys), max(size, 1)):
        yield keys[begin : begin + size]


def _reason(error: OSError | None) -> str:
    if error is None:
        return "what happens in the run could not be written by another process"
    what = error.filename or "what happens in the run"
    return f"{what} could not be written ({error.strerror or error})"


def _size(count: float) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:120]
