"""How fast is one run, and where does its time go?

The run is that of `ibaml train`: folder, logs, checkpoints, validation. Nothing waits for the
device but at the two ends of what is timed. On one CPU thread the clock is the processor's time,
which other work on the machine does not change; else it is the time that passes.
"""

from __future__ import annotations

import gc
import time
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from ibaml.assessment import Protocol, assess
from ibaml.learner import MetaLearner
from ibaml.machine import pick_device
from ibaml.speed.floor import Floor, clock_of, floor_of, wait_for
from ibaml.tasks import TaskBatch
from ibaml.training import Run, Settings, resolve, train
from ibaml.training.build import open_tasks
from ibaml.training.spans import OUTSIDE, Spans
from ibaml.training.watch import Step

PROFILED = 20  # iterations after those that are timed, in which the device's work is recorded
_BLOCKS = 3  # of meta-steps that are timed alone; the median counts
_WARM = 4  # by the third call a meta-step is recorded


@dataclass(frozen=True)
class Row:
    """One run. Times are milliseconds of a meta-iteration; validation, checkpoints and log count
    with their share.

    Attributes:
        clock: ``"passed"``, or ``"processor"`` for processor time.
        step: the whole iteration but for data, validation, checkpoint and log.
        device: in which the device works; None on a CPU, where the host does all work.
        wait: in which the host waits to read the device's figures.
        processor: milliseconds of all CPU threads, of all that was timed.
        tasks_per_second: of the whole run.
        alone: tasks a second of the meta-step by itself, on one batch that stays where it is.
        start: seconds from the begin of the run to its first step.
        loss: the mean loss of the iterations that were timed.
        evaluation: seconds of `ibaml evaluate`, without its imports, pictures and files.
    """

    name: str
    shots: int
    tasks: int
    at_once: int
    train_ways: int | None
    strategy: str
    clock: str
    tasks_per_second: float
    step: float
    host: float
    wait: float
    data: float
    validation: float
    checkpoint: float
    log: float
    processor: float
    device: float | None
    alone: float | None
    floor: Floor | None
    memory: float | None
    start: float
    loss: float
    evaluation: float | None = None

    @property
    def share(self) -> float | None:
        """The whole run's rate as a share of the meta-step's own."""
        return None if self.alone is None else self.tasks_per_second / self.alone


class _Window:
    """A watcher that notes the state of the spans where the timed iterations begin and end."""

    def __init__(self, spans: Spans, first: int, last: int, device: torch.device) -> None:
        self.spans, self.first, self.last, self.device = spans, first, last, device
        self.clock = "processor" if clock_of(device) is time.process_time else "passed"
        self.marks: list[dict[str, Any]] = []
        self.losses: list[float] = []
        self.began = time.perf_counter()
        self.until_first_step = 0.0
        self._profile: Any = None
        self.busy: float | None = None

    def stepped(self, step: Step) -> None:
        if not self.until_first_step:
            self.until_first_step = time.perf_counter() - self.began
        if self.first < step.step <= self.last:
            self.losses.append(step.loss)
        if step.step in (self.first, self.last):
            wait_for(self.device)
            self.mark()
        if self.device.type == "cuda" and step.step == self.last + 1:  # after the validation
            wait_for(self.device)
            self._profile = profile(activities=[ProfilerActivity.CUDA])
            self._profile.start()
        if self._profile is not None and step.step == self.last + 1 + PROFILED:
            wait_for(self.device)
            self._profile.stop()
            self.busy = _busy_seconds(self._profile) / PROFILED
            self._profile = None

    def mark(self) -> None:
        self.spans.settle()
        of = self.spans.processor if self.clock == "processor" else self.spans.seconds
        mark: dict[str, Any] = {"counts": dict(self.spans.counts), "seconds": dict(of)}
        mark["processor"] = sum(self.spans.processor.values())
        self.marks.append(mark)

    def started(self, *_: Any) -> None: ...

    def validated(self, *_: Any) -> None: ...

    def message(self, *_: Any) -> None: ...

    def ended(self) -> None:
        self.mark()


def measured_run(
    name: str,
    given: dict[str, Any],
    folder: Path,
    *,
    skip: int,
    iterations: int,
    alone: int,
    evaluate: int = 0,
) -> Row:
    """Train a little in a new run folder, and say where the time went.

    Args:
        given: the settings that are not left to their defaults.
        skip: iterations before those that are timed.
        alone: meta-steps that are timed alone, afterwards.
        evaluate: test tasks that are judged at the end.
    """
    device = pick_device(given["device"])
    last = skip + iterations
    profiled = 1 + PROFILED if device.type == "cuda" else 0
    settings = resolve({**given, "iterations": last + profiled})
    spans, made = Spans(), []
    window = _Window(spans, skip, last, device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)

    def watchers(run: Run, learner: MetaLearner) -> list[_Window]:
        made.append(learner)
        return [window]

    run, _ = train(settings, folder, watchers=watchers, spans=spans)
    memory = torch.cuda.max_memory_allocated(device) / 1e9 if device.type == "cuda" else None
    row = _row(name, run.settings, window, made[0])
    own, floor = None, None
    if alone:
        batch = _resident(run.settings, device)
        own = _rate_alone(made[0], batch, alone)
        floor = floor_of(made[0].model, batch) if run.settings.adapt == "head" else None
    judging = None
    if evaluate:
        began = clock_of(device)()
        assess(run, Protocol(tasks=evaluate, device=given["device"]))
        judging = clock_of(device)() - began
    made.clear()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return replace(row, alone=own, floor=floor, memory=memory, evaluation=judging)


def _row(name: str, settings: Settings, window: _Window, learner: MetaLearner) -> Row:
    """The figures of a run, from the state of its spans at the marks."""
    first, last, end = window.marks
    # as many were begun in between (one is told of when the next has begun)
    steps = last["counts"]["step"] - first["counts"]["step"]

    def each(kind: str) -> float:
        """Milliseconds of one timed iteration."""
        spent = last["seconds"].get(kind, 0.0) - first["seconds"].get(kind, 0.0)
        return 1e3 * spent / steps

    # of validations and checkpoints those in the window, else the run's own at its end
    began, ended = first, last
    if last["counts"].get("validation", 0) == first["counts"].get("validation", 0):
        began, ended = {"seconds": {}, "counts": {}}, end
    times = ended["counts"].get("validation", 0) - began["counts"].get("validation", 0)

    def share(kind: str) -> float:
        """Milliseconds of one validation, or what is saved with it, for every iteration."""
        spent = ended["seconds"].get(kind, 0.0) - began["seconds"].get(kind, 0.0)
        return 1e3 * spent / max(times, 1) / max(settings.val_every, 1)

    host, wait, data = each("step") + each(OUTSIDE), each("wait"), each("data")
    whole = host + wait + data + each("log") + share("validation") + share("checkpoint")
    used = last["processor"] - first["processor"]
    assert settings.shots is not None
    return Row(
        name=name,
        shots=settings.shots,
        tasks=settings.tasks,
        at_once=settings.micro_batch or settings.tasks,
        train_ways=settings.train_ways or settings.ways,
        strategy=learner.strategy,
        clock=window.clock,
        tasks_per_second=1e3 * settings.tasks / whole,
        step=host + wait,
        host=host,
        wait=wait,
        data=data,
        validation=share("validation"),
        checkpoint=share("checkpoint"),
        log=each("log"),
        processor=1e3 * used / steps,
        device=None if window.busy is None else 1e3 * window.busy,
        alone=None,
        floor=None,
        memory=None,
        start=window.until_first_step,
        loss=sum(window.losses) / max(len(window.losses), 1),
    )


def _resident(settings: Settings, device: torch.device) -> TaskBatch:
    """One batch of training tasks, as many as the run has at once, in the device's memory."""
    tasks = open_tasks(settings, device)
    return tasks.batches("train", range(settings.micro_batch or settings.tasks))[0]


def _rate_alone(learner: MetaLearner, batch: TaskBatch, steps: int) -> float:
    """Tasks a second of the meta-step by itself: loss and meta-gradient of one batch again and
    again, with nothing in between."""
    device = batch.support_x.device
    parameters = list(learner.parameters())
    now = clock_of(device)
    learner.train()

    def some(count: int) -> float:
        wait_for(device)
        began = now()
        for i in range(count):
            loss = learner(batch, torch.Generator().manual_seed(i))
            torch.autograd.grad(loss, parameters, allow_unused=True)
        wait_for(device)
        return now() - began

    some(_WARM)
    block = max(1, steps // _BLOCKS)
    return len(batch) * block / median(some(block) for _ in range(_BLOCKS))


def _busy_seconds(profiled: Any) -> float:
    """Seconds in which the device did anything: overlapping work counts once."""
    spans = sorted(
        (e.time_range.start, e.time_range.end)
        for e in profiled.events()
        if e.device_type == torch.autograd.DeviceType.CUDA
    )
    busy, until = 0.0, float("-inf")
    for begin, end in spans:
        busy += max(0.0, end - max(begin, until))
        until = max(until, end)
    return busy / 1e6
