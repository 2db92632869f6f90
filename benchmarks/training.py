"""How fast is a whole run on a CPU, from the command to the steps, beside the floor of its sums?

    python benchmarks/training.py [start] [embeddings] [photographs]

One thread, processor time (wall time of the start too). `start`: 60,000 small JPEGs of 64 classes,
written into a temporary folder and cached, then the command in a new process, with parts of it.
`embeddings`: vectors of 1,280 numbers, steps and validation. `photographs`: 84×84, Conv4, beside
its convolutions alone. To compare with another checkout: PYTHONPATH=THERE/src.
"""

from __future__ import annotations

import argparse
import io
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

import ibaml.machine
import ibaml.training as training
from ibaml.machine import in_a_line, machine

START = """
import sys, time
began = time.perf_counter()
import torch
from ibaml.training import resolve, train
def told(what):
    wall, used = time.perf_counter() - began, time.process_time()
    print(f"  {what:24s} {wall:6.2f} s, processor {used:6.2f} s")
told("imports")
from ibaml.tasks import image_folder
image_folder(sys.argv[1]).moments
told("dataset and its moments")
"""


class Clock:
    """A watcher that notes the processor time of every step and validation."""

    def __init__(self) -> None:
        self.steps: list[float] = []
        self.validation = 0.0

    def stepped(self, step: Any) -> None:
        self.steps.append(time.process_time())

    def validated(self, step: int, *_: Any) -> None:
        self.validation = time.process_time() - self.steps[-1]

    def started(self, *_: Any) -> None: ...

    def message(self, *_: Any) -> None: ...

    def ended(self, *_: Any) -> None: ...

    def per_step(self) -> float:
        """Seconds of one step, the median."""
        return float(np.median(np.diff(self.steps)))


def run(scratch: Path, name: str, **given: Any) -> tuple[Clock, training.Settings]:
    clock = Clock()
    settings = training.resolve({"threads": 1, "device": "cpu", "tensorboard": False, **given})
    done, _ = training.train(settings, scratch / name, watchers=lambda *_: [clock])
    return clock, done.settings


def start(scratch: Path) -> None:
    folder = photographs(scratch / "many", 64, 60_000)
    command = [sys.executable, "-m", "ibaml", "train", "--data", str(folder), "--iterations", "1"]
    command += ["--val-every", "0", "--threads", "1", "--no-tensorboard"]
    print("start: 60,000 photographs, 84×84, default settings, through the first step (8 tasks)")
    for turn in ("first time, decoding", "cached", "cached again"):
        before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        place = scratch / turn.replace(" ", "-")
        subprocess.run([*command, "--out", str(place)], check=True, stdout=subprocess.DEVNULL)
        wall = time.perf_counter() - began
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        print(f"  {turn:24s} {wall:6.2f} s, processor {used:6.2f} s")
    subprocess.run([sys.executable, "-c", START, str(folder)], check=True)


def embeddings(scratch: Path) -> None:
    rng = np.random.default_rng(0)
    classes = rng.normal(size=(100, 40)) @ rng.normal(size=(40, 1280)) / 2
    x = np.repeat(classes, 60, 0) + 4 * rng.normal(size=(6000, 1280))
    file = scratch / "vectors.npz"
    np.savez(file, x=x.astype(np.float32), y=np.repeat(np.arange(100), 60).astype(str))
    print("embeddings: 1,280 numbers, 5-way 1-shot, 15 queries a class")
    for ways, tasks in ((5, 8), (5, 32), (20, 8)):
        clock, _ = run(
            scratch, f"e{ways}-{tasks}", data=str(file), model="mlp", train_ways=ways, tasks=tasks,
            iterations=60,
        )  # fmt: skip
        rate = tasks / clock.per_step()
        print(
            f"  trained {ways}-way, {tasks:2d} tasks a step: {rate:6.0f} tasks/s; "
            f"a validation of 100 tasks {clock.validation:5.2f} s"
        )


def few_photographs(scratch: Path) -> None:
    folder = photographs(scratch / "few", 64, 3_000)
    print("photographs: Conv4-32, 84×84, 5-way 1-shot, 15 queries a class, 4 tasks a step")
    clock, settings = run(
        scratch, "photographs", data=str(folder), train_ways=5, tasks=4, iterations=8, val_every=0
    )
    assert settings.channels is not None
    step = clock.per_step() / settings.tasks
    floor = convolutions(80, settings.channels)
    print(
        f"  a step {1e3 * step:6.1f} ms a task; its convolutions alone, forward and backward, "
        f"channels last {1e3 * floor:6.1f} ms; ratio {step / floor:.2f}"
    )


def convolutions(images: int, channels: int) -> float:
    """Seconds of the convolutions of Conv4 alone, forward and backward; the least of five."""
    times = []
    for _ in range(6):
        total = 0.0
        for inputs, size in ((3, 84), (channels, 42), (channels, 21), (channels, 10)):
            x = torch.randn(images, inputs, size, size, requires_grad=inputs > 3)
            x = x.contiguous(memory_format=torch.channels_last)
            w = torch.randn(channels, inputs, 3, 3, requires_grad=True)
            began = time.process_time()
            y = torch.nn.functional.conv2d(x, w, padding=1)
            torch.autograd.grad(y, [w, x] if inputs > 3 else [w], torch.ones_like(y))
            total += time.process_time() - began
        times.append(total)
    return min(times[1:])


def photographs(folder: Path, classes: int, count: int) -> Path:
    """Small JPEGs of blurs; each class has twenty, again and again."""
    from PIL import Image

    rng = np.random.default_rng(0)
    for c in range(classes):
        (folder / f"class{c:02d}").mkdir(parents=True)
        contents = []
        for _ in range(20):
            blur = rng.integers(0, 256, (3, 3, 3), dtype=np.uint8)
            file = io.BytesIO()
            image = Image.fromarray(blur).resize((84, 84), Image.Resampling.BILINEAR)
            image.save(file, "JPEG", quality=30)
            contents.append(file.getvalue())
        for i in range(count // classes + (c < count % classes)):
            (folder / f"class{c:02d}" / f"{i:05d}.jpg").write_bytes(contents[i % 20])
    return folder


def main() -> None:
    parts = {"start": start, "embeddings": embeddings, "photographs": few_photographs}
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", choices=[[], *parts], default=list(parts))
    torch.set_num_threads(1)
    if hasattr(ibaml.machine, "keep_freed_memory"):  # as `ibaml train` does; not in old checkouts
        ibaml.machine.keep_freed_memory()
    os.environ["OMP_NUM_THREADS"] = "1"
    print(in_a_line(machine()))
    with tempfile.TemporaryDirectory() as scratch:
        os.environ["IBAML_CACHE"] = f"{scratch}/cache"
        for name in parser.parse_args().parts:
            parts[name](Path(scratch))


if __name__ == "__main__":
    main()
