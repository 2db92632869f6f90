"""How are time and memory measured? Interleaved runs, medians, and memory by itself."""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from ibaml import methods, nn
from ibaml.capture import Recording
from ibaml.energy import task_roots
from ibaml.learner import MetaLearner
from ibaml.machine import machine, threads, within_free_memory
from ibaml.paper.complexity.result import Cost, Measured, Point
from ibaml.paper.complexity.sweep import POINT_OF, Arm, Sweep
from ibaml.paper.study import Progress
from ibaml.tasks import TaskBatch
from ibaml.training.faults import out_of_memory
from ibaml.training.memory import Meter

_LR = 1e-3  # small enough that nothing diverges at any K; costs do not depend on it
_WARM_UPS = 4  # calls before a recorded meta-step is timed
# fixed here, so that the measurement does not change with the recommended settings
_GAUSSIAN = {"noise": "independent", "beta": 1.0, "init_log_var": -6.0}


def picture_tasks(
    tasks: int,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    *,
    image_size: int = 84,
    ways: int = 5,
    queries: int = 15,
) -> TaskBatch:
    """One-shot tasks that need no download: a class is a smooth random picture, its examples have
    noise."""
    rng = torch.Generator().manual_seed(0)
    coarse = torch.randn(tasks * ways, 3, 7, 7, generator=rng)
    classes = F.interpolate(coarse, size=image_size, mode="bilinear")
    classes = classes.to(device, dtype).unflatten(0, (tasks, ways))

    def seen(each: int) -> Tensor:
        shape = (tasks, ways, each, 3, image_size, image_size)
        noise = torch.randn(shape, generator=rng).to(device, dtype)
        return (classes[:, :, None] + 0.5 * noise).flatten(1, 2)

    support, query = seen(1), seen(queries)
    labels = torch.arange(ways, device=device)
    return TaskBatch(
        support,
        labels.expand(tasks, -1),
        query,
        labels.repeat_interleave(queries).expand(tasks, -1),
        range(tasks),
        validate=False,
        classes=ways,
    )


def measure(sweep: Sweep, progress: Progress | None = None) -> Measured:
    """Measure every arm of the sweep.

    First the memory of each, in a run that is not timed. Then the time of forward and backward, in
    rounds over all arms in changing order, so that other load on the machine affects all alike. On
    CUDA the times are those of replays, arm by arm, because many small kernels launched one by one
    take as long as their launches. An arm that does not fit is a point without costs.
    """
    device, batch = sweep.torch_device, _tasks_that_fit(sweep)
    benches = [Bench(sweep, arm, batch) for arm in sweep.arms()]
    work: list[tuple[Bench, Callable[[], None], str]] = [
        (b, b.measure_memory, "memory") for b in benches
    ]
    if device.type == "cuda":
        work += [(b, b.time_replays, "replay") for b in benches]
    else:
        order = random.Random(0)
        for _ in range(sweep.repeats):
            work += [(b, b.time_phases, "time") for b in order.sample(benches, len(benches))]
    with threads(sweep.threads), within_free_memory(device):
        for done, (bench, run, name) in enumerate(work):
            if progress is not None:
                progress(done, len(work), f"{name}: {bench.words}")
            bench.attempt(run, name)
        if progress is not None:
            progress(len(work), len(work), "done")
        return Measured(sweep, _where(device), tuple(b.point() for b in benches))


def _where(device: torch.device) -> dict[str, str]:
    places = machine(device)
    if device.type == "cuda":
        places["times"] = "of replays, unless the strategy says launched"
    return places


def _tasks_that_fit(sweep: Sweep) -> TaskBatch:
    try:
        with within_free_memory(sweep.torch_device):
            return picture_tasks(sweep.tasks, sweep.torch_device, image_size=sweep.image_size)
    except Exception as error:
        if not out_of_memory(error):
            raise
        raise ValueError(
            f"tasks: the pictures of {sweep.tasks} tasks alone do not fit into memory; take fewer"
        ) from error


class Bench:
    """One arm: its learner, and its measurements."""

    def __init__(self, sweep: Sweep, arm: Arm, batch: TaskBatch) -> None:
        self.sweep, self.arm, self.batch = sweep, arm, batch
        self.device = sweep.torch_device
        self.learner: MetaLearner | None = None
        self.seconds: list[tuple[float, float]] = []
        self.bytes: dict[str, int] = {}
        self.replayed: list[float] = []
        self.partial_point = Point(arm)

    @property
    def words(self) -> str:
        cg = "" if self.arm.cg_steps is None else f", L = {self.arm.cg_steps}"
        return f"{self.arm.label}, K = {self.arm.steps}{cg}"

    def attempt(self, run: Callable[[], None], name: str) -> None:
        """Run, unless it failed before; out of memory is recorded and ends nothing."""
        if self.partial_point.problem:
            return
        try:
            run()
        except Exception as error:
            if not out_of_memory(error):
                raise
            self.partial_point = replace(self.partial_point, problem=f"out of memory ({name})")
        if self.partial_point.problem:
            self.learner = None
            self._free_memory()

    def build(self, capture: bool | None) -> MetaLearner:
        arm, sweep = self.arm, self.sweep
        torch.manual_seed(0)
        net = nn.conv4(5, channels=sweep.channels, image_size=sweep.image_size).to(self.device)
        options = {
            "adapt": "all",
            "solver": "descent",
            "steps": arm.steps,
            "lr": _LR,
            "execution": sweep.execution,
            "precision": sweep.precision,
            "diagnose": False,
            "capture": capture,
        }
        if arm.cg_steps is not None:
            options |= {"cg_steps": arm.cg_steps, "curvature": sweep.curvature, "damping": 0.0}
            options |= {"stopping": sweep.stopping}
        if arm.method in POINT_OF:
            options |= {"samples": arm.samples, **_GAUSSIAN}
        if arm.method == "imaml":
            options |= {"lam": 1.0}
        learner: MetaLearner = getattr(methods, arm.method)(net, **options)
        return learner

    def loss(self, learner: MetaLearner) -> Tensor:
        return learner(self.batch, torch.Generator().manual_seed(0))

    def measure_memory(self) -> None:
        """Measure the peaks of forward and backward; nothing here is timed."""
        learner = self.learner = self.build(capture=False)
        few = replace(
            self.batch, query_x=self.batch.query_x[:, :5], query_y=self.batch.query_y[:, :5]
        )
        first = learner(few, torch.Generator().manual_seed(0))  # checks its batch, once
        if self.device.type == "cuda":
            first.backward()  # libraries allocate their workspaces once
        del first
        learner.zero_grad()
        with Meter(self.device) as meter:
            loss = self.loss(learner)
            self.bytes["forward"], self.bytes["kept"] = meter.peak, meter.live
            meter.restart()
            loss.backward()
            self.bytes["backward"] = meter.peak
        self.bytes["together"] = max(self.bytes["forward"], self.bytes["backward"])
        self.partial_point = replace(self.partial_point, strategy=learner.strategy)
        if diverged := int(learner.diagnostics.left_out.sum()):
            self.partial_point = replace(self.partial_point, problem=f"{diverged} tasks diverged")

    def time_phases(self) -> None:
        """Time one forward and one backward pass, each by itself."""
        learner = self.learner
        assert learner is not None
        learner.zero_grad()
        began = self.now()
        loss = self.loss(learner)
        between = self.now()
        loss.backward()
        self.seconds.append((between - began, self.now() - between))

    def time_replays(self) -> None:
        """On CUDA: time the phases by replays, and the whole meta-step as in a training loop."""
        self.seconds = self._phases()
        note = ""
        if not self.seconds:
            note = "; phases launched one by one"
            for _ in range(self.sweep.repeats):
                self.time_phases()
        self.learner = None
        learner = self.build(capture=None)
        with Meter(self.device) as meter:
            for call in range(_WARM_UPS + self.sweep.repeats):
                learner.zero_grad()
                began = self.now()
                self.loss(learner).backward()
                if call >= _WARM_UPS:
                    self.replayed.append(self.now() - began)
            self.bytes["together"] = meter.peak
        self.partial_point = replace(self.partial_point, strategy=learner.strategy + note)
        del learner
        self._free_memory()

    def _phases(self) -> list[tuple[float, float]]:
        """Seconds of forward and backward, replay by replay: the forward pass alone is recorded,
        then the whole, and the backward pass is what the whole takes beyond it. Empty where they
        cannot be recorded."""
        learner = self.learner
        assert learner is not None  # `weigh` came before, so that kernels are chosen
        roots = task_roots(0, self.batch.task_keys, self.device)
        measured: list[list[float]] = []
        for backward in (False, True):  # one recording's memory at a time
            try:
                recording = Recording(
                    learner, learner.meta_step, self.batch, roots, backward=backward
                )
            except RuntimeError:
                self._free_memory()
                return []
            measured.append([self._replayed(recording) for _ in range(1 + self.sweep.repeats)][1:])
            del recording
            self._free_memory()
        return [(alone, whole - alone) for alone, whole in zip(*measured, strict=True)]

    def _replayed(self, recording: Recording) -> float:
        began = self.now()
        recording.replay()
        return self.now() - began

    def _free_memory(self) -> None:
        """Return the memory of deleted recordings and learners to the device."""
        gc.collect()
        if self.device.type == "cuda":
            with suppress(RuntimeError):  # torch before 2.12, after a recording that failed
                torch.cuda.empty_cache()

    def now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def point(self) -> Point:
        """What was found; where something failed, what was found before that."""
        point = self.partial_point
        if self.seconds:
            forward, backward = zip(*self.seconds, strict=True)
            point = replace(
                point,
                forward=self._cost("forward", forward),
                backward=self._cost("backward", backward),
                kept_mb=self.bytes["kept"] / 1e6 / self.sweep.tasks,
            )
        both = [sum(pair) for pair in self.seconds]
        if self.device.type == "cuda":
            both = self.replayed
        return replace(point, together=self._cost("together", both)) if both else point

    def _cost(self, phase: str, seconds: Sequence[float]) -> Cost:
        tasks = self.sweep.tasks
        return Cost(1e3 * statistics.median(seconds) / tasks, self.bytes[phase] / 1e6 / tasks)
