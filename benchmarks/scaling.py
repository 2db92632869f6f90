"""Tasks per second and peak memory of meta-steps, one axis at a time from a base point.

    python benchmarks/scaling.py --axis all                        # tasks, samples, width, steps, cg, processes
    python benchmarks/scaling.py --axis width --device cuda --json width.json
    python benchmarks/scaling.py --unrolled-limit                  # how many steps an unrolled ResNet-12 can afford

iBaML with everything adapted, 5-way 1-shot, 15 queries a class. What does not fit is a row. A row's
time is the median of whole meta-steps (forward and backward); its memory is the peak above what was
there before, on the CPU counted over live tensors in a run of its own.
"""  # noqa: E501

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import nn

import ibaml
from ibaml.machine import free_bytes, within_free_memory
from ibaml.paper.complexity.findings import slope
from ibaml.paper.complexity.measure import picture_tasks
from ibaml.training.faults import out_of_memory
from ibaml.training.memory import Meter
from ibaml.training.processes import joined, this_process

AXES = ("tasks", "samples", "width", "steps", "cg", "processes")
NETWORKS: dict[str, Callable[[int], nn.Module]] = {
    "conv4-16": lambda side: ibaml.nn.conv4(5, channels=16, image_size=side),
    "conv4-32": lambda side: ibaml.nn.conv4(5, channels=32, image_size=side),
    "conv4-64": lambda side: ibaml.nn.conv4(5, channels=64, image_size=side),
    "conv4-128": lambda side: ibaml.nn.conv4(5, channels=128, image_size=side),
    "resnet12-16": lambda side: ibaml.nn.resnet12(5, widths=(16, 32, 64, 128)),
    "resnet12": lambda side: ibaml.nn.resnet12(5),
    "resnet12-wide": lambda side: ibaml.nn.resnet12(5, widths=(64, 160, 320, 640)),
}
_WARM = 4  # calls before a recorded meta-step is timed


@dataclass(frozen=True)
class Place:
    """Where a meta-step is measured."""

    tasks: int
    samples: int
    network: str
    steps: int
    cg_steps: int
    image_size: int
    device: str
    repeats: int
    method: str = "ibaml"
    processes: int = 1


@dataclass(frozen=True)
class Row:
    """The measurement of a place; if it failed, the problem in place of figures."""

    axis: str
    value: str
    place: Place
    weights: int = 0
    tasks_per_s: float | None = None
    peak_gb: float | None = None
    strategy: str = ""
    problem: str = ""

    def __str__(self) -> str:
        line = f"{self.axis:<10} {self.value:<14} {self.weights:>11,} weights  "
        if self.problem:
            return line + self.problem
        speed = "" if self.tasks_per_s is None else f"{self.tasks_per_s:>9.3g} tasks/s"
        return f"{line}{speed:<18} {self.peak_gb:8.3f} GB  {self.strategy}"


BASE = {
    "cpu": Place(2, 2, "conv4-32", 5, 5, 42, "cpu", 3),
    "cuda": Place(16, 5, "conv4-32", 5, 5, 84, "cuda", 5),
}
VALUES: dict[str, dict[str, tuple[int, ...]]] = {
    "cpu": {"tasks": (1, 2, 4, 8), "samples": (1, 2, 4, 8), "steps": (1, 5, 20), "cg": (1, 5, 20)},
    "cuda": {
        "tasks": (1, 2, 4, 8, 16, 32, 64),
        "samples": (1, 2, 5, 10, 20),
        "steps": (1, 5, 20, 50, 100),
        "cg": (1, 5, 20, 50),
    },
}


def places(axis: str, base: Place) -> Iterator[tuple[str, Place]]:
    """The base point with one thing changed."""
    kind = torch.device(base.device).type
    if axis == "width":
        fewer = replace(base, tasks=1, samples=min(base.samples, 2))
        yield from ((name, replace(fewer, network=name)) for name in NETWORKS)
    elif axis == "processes":
        here = torch.cuda.device_count() if kind == "cuda" else max(2, os.cpu_count() or 1)
        shared = replace(base, tasks=max(base.tasks, 8))
        for count in (1, 2, 4, 8):
            if count <= here:
                yield str(count), replace(shared, processes=count)
    else:
        field = {"cg": "cg_steps"}.get(axis, axis)
        for value in VALUES[kind][axis]:
            yield str(value), replace(base, **{field: value})


def make(place: Place) -> ibaml.MetaLearner:
    torch.manual_seed(0)
    net = NETWORKS[place.network](place.image_size).to(place.device)
    # fixed here, so that measurements do not change with recommended settings
    options = {
        "adapt": "all",
        "solver": "descent",
        "steps": place.steps,
        "lr": 1e-4,
        "samples": place.samples,
        "noise": "independent",
        "beta": 1.0,
        "init_log_var": -6.0,
        "diagnose": False,
    }
    if place.method == "ibaml":
        options |= {"cg_steps": place.cg_steps, "curvature": "ggn", "damping": 0.0, "block": "all"}
    learner: ibaml.MetaLearner = getattr(ibaml.methods, place.method)(net, **options)
    with torch.no_grad():  # a learner checks its strategy once
        learner(picture_tasks(1, place.device, image_size=place.image_size, queries=1))
    return learner


def measured(axis: str, value: str, place: Place, timed: bool = True) -> Row:
    """One row; if it runs out of memory, the row says so."""
    weights = sum(p.numel() for p in NETWORKS[place.network](place.image_size).parameters())
    row = Row(axis, value, place, weights)
    try:
        if axis == "processes":
            return _measured_in_many(row)
        with within_free_memory(torch.device(place.device)):
            return _measured_here(row, timed)
    except Exception as error:
        if not out_of_memory(error):
            raise
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return replace(row, problem="out of memory")


def _measured_here(row: Row, timed: bool) -> Row:
    place, device = row.place, torch.device(row.place.device)
    learner, batch = make(place), picture_tasks(place.tasks, device, image_size=place.image_size)

    def step() -> None:
        learner.zero_grad()
        learner(batch, torch.Generator().manual_seed(0)).backward()

    if device.type == "cuda":
        step()  # libraries try their kernels, in workspaces that are not the method's
    with Meter(device) as meter:
        for _ in range(_WARM if device.type == "cuda" and timed else 1):
            step()
        peak = meter.peak / 1e9
    measured = replace(row, peak_gb=peak, strategy=learner.strategy)
    if not timed:
        return measured
    spent = statistics.median(clocked(step, device) for _ in range(place.repeats))
    return replace(measured, tasks_per_s=place.tasks / spent)


def clocked(step: Callable[[], None], device: torch.device) -> float:
    """Seconds of a step, to its end on the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    began = time.perf_counter()
    step()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began


# --- several processes ----------------------------------------------------------------------------


def _measured_in_many(row: Row) -> Row:
    """The same batch split over processes that add up their gradients, started by torchrun."""
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    words += ["--nproc-per-node", str(row.place.processes), __file__]
    words += ["--worker", json.dumps(asdict(row.place))]
    alone = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, capture_output=True, text=True, env=alone)
    if done.returncode:
        return replace(row, problem=f"failed: {done.stderr.strip().splitlines()[-1]}")
    measured = json.loads(done.stdout.strip().splitlines()[-1])
    return replace(row, **measured)


def worker(place: Place) -> None:
    """One process of several: its share of the tasks, and the sum of all gradients."""
    processes = this_process()
    kind = torch.device(place.device).type
    device = torch.device("cuda", processes.local_rank) if kind == "cuda" else torch.device("cpu")
    torch.set_num_threads(1)
    with joined(processes, device):
        learner = make(replace(place, device=str(device)))
        whole = picture_tasks(place.tasks, device, image_size=place.image_size)
        batch = whole.select(list(processes.share(range(place.tasks))))

        def step() -> None:
            learner.zero_grad()
            loss = learner(batch, torch.Generator().manual_seed(0))
            (loss * len(batch) / place.tasks).backward()
            processes.add_up([p.grad for p in learner.parameters() if p.grad is not None])

        if kind == "cuda":
            step()  # libraries try their kernels, in workspaces that are not the method's
        with Meter(device) as meter:  # before the clock: what is replayed asks for no memory
            for _ in range(_WARM if kind == "cuda" else 1):
                step()
            peak = meter.peak / 1e9
        spent = statistics.median(clocked(step, device) for _ in range(place.repeats))
    if processes.first:
        speed = place.tasks / spent
        print(json.dumps({"tasks_per_s": speed, "peak_gb": peak, "strategy": learner.strategy}))


# --- how far does unrolling reach? ----------------------------------------------------------------


def unrolled_limit(base: Place, told: Callable[[Row], None]) -> list[str]:
    """iBaML's memory at K = 1 and 50 beside ABML's as K grows, until it no longer fits."""
    place = replace(base, network="resnet12", samples=2, tasks=1)
    implicit = []
    for steps in (1, 50):
        row = measured("iBaML, K", str(steps), replace(place, steps=steps), timed=False)
        told(row)
        implicit.append(row)
    on_cpu = torch.device(place.device).type == "cpu"
    fits = _unrolled(place, (1, 2, 4) if on_cpu else (1, 2, 4, 8, 16, 32, 64, 128, 256), told)
    lines = []
    if all(r.peak_gb for r in implicit):
        ratio = implicit[1].peak_gb / implicit[0].peak_gb
        lines.append(f"iBaML: {implicit[1].peak_gb:.2f} GB at K = 50, × {ratio:.3f} of K = 1")
    if len(fits) > 1:
        ks, peaks = [float(r.place.steps) for r in fits], [r.peak_gb or 0.0 for r in fits]
        each = slope(ks, peaks)
        first = peaks[0] - each * ks[0]
        free = (free_bytes(torch.device(place.device)) or 0) / 1e9
        lines.append(
            f"ABML: {each:.3f} GB a step, fitted to K = {', '.join(f'{k:.0f}' for k in ks)}; "
            f"extrapolated, not measured: {first + 50 * each:.1f} GB at K = 50, and "
            f"{free:.0f} GB (free here now) are full at K = {(free - first) / each:.0f}"
        )
        lines.append(f"ABML: the largest K that was run is {ks[-1]:.0f}")
    return lines


def _unrolled(place: Place, ks: tuple[int, ...], told: Callable[[Row], None]) -> list[Row]:
    """ABML at growing K; after the first that fails, by halves to the last that fits (to within a
    sixteenth)."""
    fits: list[Row] = []

    def attempt(steps: int) -> bool:
        changed = replace(place, method="abml", steps=steps)
        row = measured("ABML, K", str(steps), changed, timed=False)
        told(row)
        if row.problem:
            return False
        fits.append(row)
        return True

    low, high = 0, 0
    for k in ks:
        if not attempt(k):
            high = k
            break
        low = k
    while high - low > max(1, low // 16):
        middle = (low + high) // 2
        if attempt(middle):
            low = middle
        else:
            high = middle
    return sorted(fits, key=lambda row: row.place.steps)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--axis", choices=(*AXES, "all"), default="all")
    parser.add_argument("--unrolled-limit", action="store_true")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--image-size", type=int)
    parser.add_argument("--repeats", type=int)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker(Place(**json.loads(options.worker)))
        return
    if options.threads:
        torch.set_num_threads(options.threads)
    base = replace(BASE[torch.device(options.device).type], device=options.device)
    if options.unrolled_limit:
        base = replace(base, image_size=84)
    if options.image_size:
        base = replace(base, image_size=options.image_size)
    if options.repeats:
        base = replace(base, repeats=options.repeats)
    name = torch.cuda.get_device_name(base.device) if "cuda" in base.device else "CPU"
    print(f"{name}, torch {torch.__version__}; {base}", flush=True)
    rows: list[Row] = []

    def told(row: Row) -> None:
        rows.append(row)
        print(row, flush=True)
        if options.json:
            options.json.write_text(json.dumps([asdict(r) for r in rows], indent=1) + "\n")

    if options.unrolled_limit:
        for line in unrolled_limit(base, told):
            print(line)
        return
    for axis in AXES if options.axis == "all" else (options.axis,):
        for value, place in places(axis, base):
            told(measured(axis, value, place))


if __name__ == "__main__":
    main()
