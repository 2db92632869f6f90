"""Memory that does not grow with the adaptation steps, nor with the number of adaptations."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from torch import nn

import ibaml
from ibaml import GradientDescent, Unrolled
from live_bytes import live_bytes_after, peak_bytes
from problems import class_batch, plain_learner


def network() -> nn.Module:
    torch.manual_seed(0)
    return ibaml.nn.conv4(2, channels=4, in_channels=1, image_size=16)


def batch() -> ibaml.TaskBatch:
    return class_batch((1, 16, 16), ways=2, shots=2, query=4).to(torch.float32)


def peak(steps: int, method: str, **options) -> int:
    learner = plain_learner(method, network(), steps=steps, lr=0.001, **options)
    tasks = batch()
    return peak_bytes(lambda: learner(tasks).backward())


@pytest.mark.parametrize("adapt", ["all", "head"])
@pytest.mark.parametrize("curvature", ["energy", "ggn"])
def test_implicit_memory_does_not_grow_with_steps(curvature, adapt):
    options = {"curvature": curvature, "samples": 2, "adapt": adapt}
    assert peak(50, "ibaml", **options) <= 1.05 * peak(1, "ibaml", **options)


def test_unrolled_memory_grows_and_recomputation_bounds_it():
    """The measure itself must be able to see growth."""
    one, many = (peak(k, "maml") for k in (1, 16))
    bounded = peak(16, "maml", gradient=Unrolled(recompute=True))
    assert many > 4 * one
    assert bounded < 0.6 * many


def test_a_hundred_adaptations_leave_memory_where_it_was():
    learner = plain_learner("ibaml", network(), solver=GradientDescent(2, 0.001), samples=2)
    tasks = batch()
    x, y = tasks.support_x[0], tasks.support_y[0]

    def adaptations(n: int):
        def run() -> None:
            for _ in range(n):
                learner.adapt(x, y).predict_proba(x, samples=2)

        return run

    assert live_bytes_after(adaptations(100)) <= live_bytes_after(adaptations(1)) + 1024


def test_no_graph_is_kept_by_adaptation():
    learner = plain_learner("ibaml", network(), steps=2, lr=0.001, samples=2)
    tasks = batch()
    posterior = learner.adapt(tasks.support_x[0], tasks.support_y[0])
    tensors = [*posterior.mean.values(), *posterior.log_var.values()]
    tensors += [posterior.predict_proba(tasks.query_x[0]), posterior.solution.gradient]
    assert all(not t.requires_grad for t in tensors)


def test_freed_memory_is_kept_and_what_the_user_set_stands():
    """In a process of its own: what is freed is not given back to the system."""
    code = """
import os, ibaml.machine, torch
from pathlib import Path
def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
kept = ibaml.machine.keep_freed_memory()
before = resident()
block = torch.ones(2**26)
del block
print(kept, resident() - before > 2**27)
"""
    found = {}
    for name in ("IBAML_NOTHING", "MALLOC_ARENA_MAX"):
        clean = {n: v for n, v in os.environ.items() if not n.startswith(("MALLOC_", "GLIBC_"))}
        ran = subprocess.run(
            [sys.executable, "-c", code], env={**clean, name: "2"}, check=True,
            capture_output=True, text=True,
        )  # fmt: skip
        found[name] = ran.stdout.split()
    assert found["MALLOC_ARENA_MAX"] == ["False", "False"]
    kept, larger = found["IBAML_NOTHING"]
    assert kept == larger  # another C library says that it cannot
