"""What is one meta-iteration? The gradient of all its tasks, and an update of the prior."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ibaml.diagnostics import Diagnostics
from ibaml.learner import MetaLearner
from ibaml.seeding import mix
from ibaml.tasks import TaskSource
from ibaml.tasks.sending import sent
from ibaml.training.faults import OutOfMemory, first_line, out_of_memory
from ibaml.training.outer import Average, build_optimizer, rate_at, step_where
from ibaml.training.pending import Pending
from ibaml.training.processes import Processes
from ibaml.training.rise import SHRINK
from ibaml.training.settings import Settings
from ibaml.training.signals import StopRequest
from ibaml.training.spans import Spans
from ibaml.training.watch import Step

_NOISE = 7  # the meta-steps draw their seeds from this stream


class Iterations:
    """Does meta-iterations, one after the other: learner, optimizer and average are their state."""

    def __init__(
        self,
        settings: Settings,
        learner: MetaLearner,
        tasks: TaskSource,
        processes: Processes | None = None,
        spans: Spans | None = None,
    ) -> None:
        self.settings = settings
        self.learner = learner
        self.tasks = tasks
        self.processes = processes if processes is not None else Processes()
        self.spans = Spans() if spans is None else spans
        self.parameters = list(learner.parameters())
        self.device = self.parameters[0].device
        self.optimizer = build_optimizer(settings, self.parameters)
        self.average = (
            None if settings.ema is None else Average(settings.ema, learner.named_parameters())
        )
        self.step = 0
        self.faulty = 0  # faulty iterations in a row
        self.returns = 0  # how often the run went back to the best weights
        self.stop = StopRequest()

    def gradient(self, step: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Leave the meta-gradient of iteration ``step`` (0 is the first) in the parameters.

        Returns the mean loss, the number of tasks that took part, the number left out, and how
        many processes caught each signal. The gradient is that of all tasks at once:
        micro-batches and processes add up sums, and the sum is divided by the number of tasks that
        took part. `OutOfMemory` is raised in all processes if it happens in one; then nothing has
        changed.
        """
        settings = self.settings
        keys = self.processes.share(range(step * settings.tasks, (step + 1) * settings.tasks))
        like = self.parameters[0]
        sums = like.new_zeros(3)  # of losses, of tasks that took part, of tasks left out
        caught = sent(torch.tensor(self.stop.caught(), dtype=like.dtype), like.device)
        for p in self.parameters:
            p.grad = torch.zeros_like(p)
        self.learner.train()
        with self.learner.one_meta_step() as statistics:
            lacking = ""
            try:
                for chunk in _chunks(keys, settings.micro_batch or len(keys)):
                    sums += self._add_gradient(chunk, mix(settings.seed, _NOISE, step))
            except Exception as error:  # not kept beyond this block: it holds the step's tensors
                if not out_of_memory(error):
                    raise
                lacking = first_line(error)
            # the hosts agree before they add up; nobody waits for a device
            if not self.processes.all_agree(not lacking, torch.device("cpu")):
                raise OutOfMemory(lacking or "in another process")
            gradients = [p.grad for p in self.parameters if p.grad is not None]
            self.processes.add_up([*gradients, sums, caught, *statistics.tensors()])
        total, counted, left_out = sums.unbind()
        torch._foreach_div_(gradients, counted.clamp(min=1))
        return total / counted, counted, left_out, caught

    def _add_gradient(self, keys: Sequence[int], seed: int) -> Tensor:
        """Add the sum of these tasks' gradients. (The memory of one micro-batch is free before the
        next begins.)"""
        sums = self.parameters[0].new_zeros(3)
        with self.spans("data"):
            batches = self.tasks.batches("train", keys)
        for batch in batches:
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
        """One meta-iteration, and what it did."""
        return self.report(self.launch())

    def launch(self) -> Pending:
        """Begin one meta-iteration. Nothing waits for its figures: where they are not finite the
        device itself leaves the weights as they are."""
        loss, counted, left_out, caught = self.gradient(self.step)
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, self.settings.clip)
        moved = (counted > 0) & norm.isfinite()
        rate = rate_at(self.settings, self.step) * SHRINK**self.returns
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        if norm.is_cuda:
            step_where(self.optimizer, moved)
        elif bool(moved):
            self.optimizer.step()
        if self.average is not None:
            self.average.update(moved)
        self.step += 1
        logged = self.step % self.settings.log_every == 0 or self.step == self.settings.iterations
        return Pending.of(
            self.step,
            rate,
            [loss, counted, left_out, norm, *caught.unbind()],
            self._diagnostics(),
            {name: p.grad for name, p in self.learner.named_parameters()},
            logged=logged,
        )

    def report(self, pending: Pending) -> Step:
        """What an iteration did, once the device has done it; its faults are counted."""
        with self.spans("wait"):
            report, caught_by = pending.report()
        moved_enough = report.moved and 2 * report.left_out <= report.tasks
        self.faulty = 0 if moved_enough else self.faulty + 1
        self.stop.agree(caught_by)
        return report

    def _diagnostics(self) -> Diagnostics | None:
        try:
            return self.learner.diagnostics
        except RuntimeError:  # this process has no tasks
            return None


def _chunks(keys: Sequence[int], size: int) -> Iterator[Sequence[int]]:
    for begin in range(0, len(keys), max(size, 1)):
        yield keys[begin : begin + size]
