"""The same meta-gradients by ibaml, by a plain autograd loop and by its peers, timed in turns.

    python benchmarks/peers.py [--only maml84] [--tasks 4] [--rounds 7] [--threads 2] [--json FILE]
    python benchmarks/peers.py --device cuda --peers carry/peers --only 28

Every contender gets the same weights, data, noise and hyper-parameters (`contenders/case.py`), and
is compared with the plain loop twice before it is timed: in float64 on a small case, where a
difference above 1e-6 puts it out of the race, and in float32 on the timed case, where the relative
difference is printed. A round runs every contender once, in rotated order. "x ours" is its median
time over ours: above 1, ibaml is faster; the range is over the rounds. Peers normalize by the batch
and keep no running statistics; ibaml keeps them.

Arms: METHOD84 is Conv4-32 on 84×84×3, METHOD28 is Conv4-32 on 28×28×1 (Omniglot's shape), both
5-way 1-shot with 15 queries a class, K = L = S = 5. The peers:

    pip install -c constraints.txt -e '.[peers]'                                # higher, torchopt
    pip install --no-deps --ignore-requires-python betty-ml==0.2.1

or a folder of them for a machine where nothing can be installed (here for Python 3.12):

    pip install --target carry/peers --no-deps --no-compile --ignore-requires-python \\
        --only-binary=:all: --python-version 3.12 --platform manylinux_2_28_x86_64 \\
        --platform manylinux_2_27_x86_64 --platform manylinux2014_x86_64 \\
        higher==0.2.1 torchopt==0.7.3 optree==0.20.0 typing_extensions betty-ml==0.2.1
    pip download --no-deps -d /tmp/l2l learn2learn==0.2.0  # only unpacked: it does not build
    tar xzf /tmp/l2l/learn2learn-0.2.0.tar.gz -C carry/peers --strip-components=1 --wildcards \\
        'learn2learn-0.2.0/learn2learn/*.py'
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from contenders import METHODS, Case, Gradients, Method, Step

import ibaml
from ibaml import TaskBatch

WAYS, QUERIES = 5, 15
CLOSE = 1e-6  # in float64, to the plain loop
WARM_UP = {"cpu": 1, "cuda": 4}
PEERS: dict[Method, tuple[str, ...]] = {
    "maml": ("with_higher", "with_torchopt", "with_learn2learn"),
    "imaml": ("with_torchopt", "with_betty"),
    "abml": (),
    "ibaml": (),
}
ONE_STEP = {"with_betty"}  # whose CG is CG for one step only
NOTES = dict.fromkeys(ONE_STEP, "   [equal for L = 1 alone, see contenders/]")


@dataclass(frozen=True)
class Arm:
    """A method on images of one shape."""

    method: Method
    size: int
    channels: int
    tasks: int
    options: dict[str, Any] = field(default_factory=dict)


ARMS: dict[str, Arm] = {
    f"{method}{size}": Arm(method, size, channels, tasks)
    for size, channels, tasks in ((84, 3, 4), (28, 1, 32))
    for method in METHODS
} | {
    f"ibaml{size}-ggn": Arm("ibaml", size, channels, tasks, {"curvature": "ggn"})
    for size, channels, tasks in ((84, 3, 4), (28, 1, 32))
}


@dataclass
class Result:
    """The results of a contender: why it does not run, or its accuracy and speed."""

    name: str
    trouble: str = ""
    double: float = float("nan")
    single: float = float("nan")
    seconds: list[float] = field(default_factory=list)


# --- the cases -----------------------------------------------------------------------------------


def episodes(
    tasks: int, size: int, channels: int, queries: int, device: str, dtype: torch.dtype
) -> TaskBatch:
    """Classes are smooth pictures of their own, seen through noise."""
    rng = torch.Generator().manual_seed(0)
    coarse = torch.randn(tasks * WAYS, channels, 7, 7, generator=rng)
    classes = torch.nn.functional.interpolate(coarse, size=size, mode="bilinear")
    classes = classes.unflatten(0, (tasks, WAYS))

    def seen(each: int) -> torch.Tensor:
        noise = torch.randn(tasks, WAYS, each, channels, size, size, generator=rng)
        return (classes[:, :, None] + 0.5 * noise).flatten(1, 2).to(device, dtype)

    labels = torch.arange(WAYS, device=device)
    return TaskBatch(
        seen(1),
        labels.expand(tasks, -1),
        seen(queries),
        labels.repeat_interleave(queries).expand(tasks, -1),
        classes=WAYS,
    )


def timed_case(arm: Arm, tasks: int, device: str) -> Case:
    torch.manual_seed(0)
    net = ibaml.nn.conv4(WAYS, in_channels=arm.channels, image_size=arm.size).to(device)
    batch = episodes(tasks, arm.size, arm.channels, QUERIES, device, torch.float32)
    return Case(arm.method, net, batch, **arm.options)


def small_case(arm: Arm, device: str) -> Case:
    """The same in float64: two tasks, 16×16, 8 channels, 3 queries a class."""
    torch.manual_seed(0)
    net = ibaml.nn.conv4(WAYS, 8, in_channels=arm.channels, image_size=16).to(device).double()
    batch = episodes(2, 16, arm.channels, 3, device, torch.float64)
    return Case(arm.method, net, batch, samples=2, **arm.options)


# --- equal, then timed ---------------------------------------------------------------------------


def prepare(name: str, case: Case) -> Step:
    step: Step = import_module(f"contenders.{name}").prepare(case)
    return step


def difference(gradients: Gradients, oracle: Gradients) -> float:
    """The larger of the relative differences of the means' and of the log-variances' gradients."""
    if gradients.keys() != oracle.keys():
        raise ValueError(f"no gradient for {sorted(oracle.keys() - gradients.keys())}")

    def block(variances: bool) -> float:
        names = [n for n in oracle if n.startswith("log_var.") == variances]
        if not names:
            return 0.0
        a, b = (torch.cat([g[n].reshape(-1) for n in names]) for g in (gradients, oracle))
        return float((a - b).norm() / b.norm())

    return max(block(False), block(True))


def copied(gradients: Gradients) -> Gradients:
    return {name: g.detach().clone() for name, g in gradients.items()}


def enter(name: str, arm: Arm, case: Case, oracle: Gradients) -> tuple[Result, Step | None]:
    """Check a contender in both precisions; None as its step if it is not timed."""
    result = Result(name)
    try:
        small = small_case(arm, case.batch.support_x.device.type)
        if name in ONE_STEP:
            small = replace(small, cg_steps=1)
        result.double = difference(prepare(name, small)(), prepare("plain", small)())
        if not result.double <= CLOSE:
            result.trouble = f"its gradient differs by {result.double:.1e} in float64"
            return result, None
        step = prepare(name, case)
        result.single = difference(step(), oracle)
    except Exception as error:  # whatever a peer fails with is its line in the table
        result.trouble = f"{type(error).__name__}: {str(error).strip().splitlines()[-1][:160]}"
        return result, None
    return result, step


def clock(step: Callable[[], Any], device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    began = time.perf_counter()
    step()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began


def race(steps: dict[str, Step], results: dict[str, Result], rounds: int, device: str) -> None:
    """Time every contender once per round, starting with another one each round."""
    for step in steps.values():
        for _ in range(WARM_UP[device] - 1):  # the check was the first call
            step()
    names = list(steps)
    for turn in range(rounds):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            results[name].seconds.append(clock(steps[name], device))


def run(arm: Arm, tasks: int, rounds: int, device: str) -> dict[str, Result]:
    case = timed_case(arm, tasks, device)
    oracle = copied(prepare("plain", case)())
    entered = {n: enter(n, arm, case, oracle) for n in ("ours", "plain", *PEERS[arm.method])}
    results = {name: result for name, (result, _) in entered.items()}
    steps = {name: step for name, (_, step) in entered.items() if step is not None}
    race(steps, results, rounds, device)
    return results


# --- the table -----------------------------------------------------------------------------------


def row(result: Result, ours: Result, tasks: int) -> str:
    name = f"  {result.name.removeprefix('with_'):<12}"
    if result.trouble:
        return f"{name} did not run: {result.trouble}"
    ms = [1e3 * s / tasks for s in result.seconds]
    line = (
        f"{name}{statistics.median(ms):10.2f} ms/task ({min(ms):.2f} … {max(ms):.2f})"
        f"   float64 {result.double:.0e}   float32 {result.single:.0e}"
    )
    if ours.seconds and result is not ours:
        ratios = [a / b for a, b in zip(result.seconds, ours.seconds, strict=True)]
        middle = statistics.median(result.seconds) / statistics.median(ours.seconds)
        line += f"   {middle:6.2f} x ours ({min(ratios):.2f} … {max(ratios):.2f})"
    return line + NOTES.get(result.name, "")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", default=[""], help="arms, or parts of their names")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--tasks", type=int, help="default: 4 at 84×84, 32 at 28×28")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2, help="of torch, on the CPU")
    parser.add_argument("--peers", type=Path, action="append", default=[], help="a folder of peers")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    sys.path += [str(folder.resolve()) for folder in options.peers]
    torch.set_num_threads(options.threads)
    torch.backends.cudnn.benchmark = True  # for everyone: shapes do not change
    warnings.filterwarnings("ignore")  # of the peers
    machine = torch.cuda.get_device_name() if options.device == "cuda" else "CPU"
    print(f"{machine}, torch {torch.__version__}, {options.threads} threads", flush=True)
    actual: dict[str, Any] = {}
    for name, arm in ARMS.items():
        if not any(part == name if part in ARMS else part in name for part in options.only):
            continue
        tasks = options.tasks or arm.tasks
        print(f"{name}, {tasks} tasks, {options.rounds} rounds", flush=True)
        results = run(arm, tasks, options.rounds, options.device)
        for result in results.values():
            print(row(result, results["ours"], tasks), flush=True)
        actual[name] = {"tasks": tasks} | {n: vars(r) for n, r in results.items()}
    if options.json:
        options.json.write_text(json.dumps({"machine": machine, "arms": actual}, indent=1))


if __name__ == "__main__":
    main()
