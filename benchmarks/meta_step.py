"""Milliseconds per task of a whole meta-step (forward and backward), and its peak memory.

    python benchmarks/meta_step.py [--only NAME] [--profile]

Conv4-32, 84×84, 5-way 1-shot, 15 queries a class; S = K = L = 5 unless the name says otherwise.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch

import ibaml
from ibaml import TaskBatch, methods
from ibaml.paper.complexity.measure import picture_tasks

_WARM = 4  # the third call records, where it can

# every option is fixed here, so that measurements do not change with recommended settings
_ALL: dict[str, Any] = {"adapt": "all", "solver": "descent", "steps": 5, "lr": 0.01}
_GAUSSIAN = {"samples": 5, "noise": "independent", "beta": 1.0, "init_log_var": -6.0}
_GGN = {"curvature": "ggn", "damping": 0.0, "cg_steps": 5}
_IBAML = {**_ALL, **_GAUSSIAN, **_GGN, "block": "all"}
ARMS: dict[str, tuple[str, dict[str, Any]]] = {
    "ibaml ggn": ("ibaml", _IBAML),
    "ibaml energy": ("ibaml", {**_IBAML, "curvature": "energy"}),
    "abml": ("abml", {**_ALL, **_GAUSSIAN}),
    "maml": ("maml", _ALL),
    "imaml ggn": ("imaml", {**_ALL, **_GGN, "lam": 1.0}),
    "ibaml head": ("ibaml", {**_IBAML, "steps": 30, "samples": 10, "adapt": "head"}),
}


def make(arm: str, device: str, **extra: Any) -> ibaml.MetaLearner:
    method, options = ARMS[arm]
    torch.manual_seed(0)
    net = ibaml.nn.conv4(5).to(device)
    return getattr(methods, method)(net, **{"diagnose": False, **options, **extra})


def timed(learner: ibaml.MetaLearner, batch: TaskBatch, repeats: int) -> tuple[float, float]:
    """Median milliseconds per task, and peak gigabytes."""
    cuda = batch.support_x.is_cuda
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    spent = []
    for i in range(repeats + _WARM):
        learner.zero_grad()
        if cuda:
            torch.cuda.synchronize()
        began = time.perf_counter()
        learner(batch, torch.Generator().manual_seed(i)).backward()
        if cuda:
            torch.cuda.synchronize()
        spent.append(time.perf_counter() - began)
    spent = sorted(spent[_WARM:])
    peak = torch.cuda.max_memory_allocated() / 1e9 if cuda else float("nan")
    return 1e3 * spent[len(spent) // 2] / len(batch), peak


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--phases", action="store_true")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tasks", type=int, nargs="+", default=[16])
    parser.add_argument("--precision", default="full")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--eager", action="store_true", help="never replay a recorded meta-step")
    parser.add_argument("--sync", action="store_true", help="fail where the host waits")
    options = parser.parse_args()
    name = torch.cuda.get_device_name() if options.device == "cuda" else "CPU"
    print(f"{name}, torch {torch.__version__}")
    for tasks in options.tasks:
        batch = picture_tasks(tasks, options.device)
        for arm in ARMS:
            if options.only not in arm:
                continue
            capture = False if options.eager else None
            learner = make(arm, options.device, precision=options.precision, capture=capture)
            try:
                ms, peak = timed(learner, batch, options.repeats)
            except torch.OutOfMemoryError:
                print(f"{arm:<14} T={tasks:<3} out of memory", flush=True)
                continue
            print(
                f"{arm:<14} T={tasks:<3} {learner.strategy:<24} {ms:8.2f} ms/task {peak:6.1f} GB",
                flush=True,
            )
            if options.sync:
                watched_for_waits(learner, batch)
            if options.phases:
                phases(learner, batch)
            if options.profile:
                profile(learner, batch)


def watched_for_waits(learner: ibaml.MetaLearner, batch: TaskBatch) -> None:
    """A meta-step in which torch raises where the host waits for the device."""
    generator = torch.Generator().manual_seed(0)
    torch.cuda.set_sync_debug_mode("error")
    try:
        learner(batch, generator).backward()
        print("    the host never waits", flush=True)
    except RuntimeError as error:
        print(f"    the host waits: {str(error).splitlines()[0]}", flush=True)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def phases(learner: ibaml.MetaLearner, batch: TaskBatch) -> None:
    """Milliseconds per task of the parts of a meta-step."""
    from ibaml.energy import detached

    support, query = learner.problem(batch, 0)
    start = learner.belief.start(support.meta.prior, len(batch)).detach()
    still = detached(support)

    def clock(work, repeats: int = 3) -> float:
        work()
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(repeats):
            work()
        torch.cuda.synchronize()
        return 1e3 * (time.perf_counter() - began) / repeats / len(batch)

    seconds = {
        "noise": clock(lambda: learner.problem(batch, 0)),
        "solve": clock(lambda: learner.solver.solve(still, start, examine=False)),
    }
    v = learner.solver.solve(still, start, examine=False).value.detach()

    def forward() -> torch.Tensor:
        return detached(query).loss(v.requires_grad_()).mean()

    seconds["query forward"] = clock(lambda: forward())
    seconds["query"] = clock(lambda: torch.autograd.grad(forward(), v))
    rule = learner.gradient
    if isinstance(rule, ibaml.Implicit):
        b = torch.randn_like(v)
        seconds["linear solve"] = clock(
            lambda: rule.pull_back(
                still, v.detach(), b, [0, 1][: len(still.meta.prior)], ibaml.Record()
            )
        )
    print("   ", ", ".join(f"{name} {ms:.2f}" for name, ms in seconds.items()), flush=True)


def profile(learner: ibaml.MetaLearner, batch: TaskBatch) -> None:
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as watch

    with watch(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiler:
        learner(batch, torch.Generator().manual_seed(0)).backward()
        torch.cuda.synchronize()
    order = "self_device_time_total"
    print(profiler.key_averages().table(sort_by=order, row_limit=12, max_name_column_width=60))


if __name__ == "__main__":
    main()
