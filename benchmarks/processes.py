"""How much faster are several processes than one, and what do they send?

    python benchmarks/processes.py                                             # one
    torchrun --standalone --nproc-per-node 2 benchmarks/processes.py           # two, by gloo

Steps of `ibaml train`'s defaults on generated data, one thread a process. Other work on the machine
does not change processor time, so it is what to compare; waiting for another process is not in it.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from ibaml.speed.generated import photographs, vectors
from ibaml.tasks import EpisodeTasks
from ibaml.training import Trainer, resolve
from ibaml.training.build import build_learner, build_network, fit_network, open_tasks
from ibaml.training.processes import Processes, joined, this_process


def trainer(given: dict[str, Any], processes: Processes) -> Trainer:
    settings = resolve({"threads": 1, "device": "cpu", "train_ways": 5, **given})
    tasks = open_tasks(settings, torch.device("cpu"))
    assert isinstance(tasks, EpisodeTasks)
    settings = fit_network(settings, tasks)
    learner = build_learner(settings, build_network(settings, tasks.example_shape))
    return Trainer(settings, learner, tasks, processes=processes)


def measure(name: str, given: dict[str, Any], steps: int, processes: Processes) -> None:
    one = trainer(given, processes)
    for _ in range(2):
        one.advance()
    used, began = time.process_time(), time.perf_counter()
    for _ in range(steps):
        one.advance()
    used, passed = time.process_time() - used, time.perf_counter() - began
    with one.learner.one_meta_step() as statistics:
        sent = sum(t.numel() for t in (*one.parameters, *statistics.tensors())) + 3 + 2
    print(
        f"{name}, {one.settings.tasks} tasks a step, process {processes.rank + 1} of "
        f"{processes.world}: {1e3 * used / steps:.1f} ms of processor time a step "
        f"({1e3 * passed / steps:.1f} passed); {sent:,} numbers sent, {4 * sent / 1e3:,.0f} kB",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=6)
    steps = parser.parse_args().steps
    torch.set_num_threads(1)
    processes = this_process()
    with joined(processes, torch.device("cpu")), tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        file = str(vectors(folder / "vectors.npz"))
        measure("vectors", {"data": file, "model": "mlp", "tasks": 32}, 5 * steps, processes)
        images = str(photographs(folder / "photographs", 3000))
        measure("photographs", {"data": images, "tasks": 8}, steps, processes)


if __name__ == "__main__":
    main()
