"""Does the doctor name what was planted, and stay silent where nothing was?

    python benchmarks/doctor.py [--only TEXT] [--seeds 2]

Eight faults and five healthy runs, then the same faults in other strengths, on other data and with
other seeds, and more healthy runs. Nothing is tuned to them: every threshold is in
`ibaml/doctor/readings.py`, with its reason in docs/doctor.md. For every fault the last table has
the largest reading of a healthy run and the smallest of a planted one, both over the threshold.
The tables go to benchmarks/results/doctor_cpu.txt, the runs to runs/doctor/; a finished run is not
trained again.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

import ibaml
from ibaml.doctor import RULES, Checkup, examine
from ibaml.tasks import EpisodeTasks, TaskBatch
from ibaml.training import TrainingError, open_run, resolve, train

FAULTS = (
    "β too large", "prior too wide", "inner step too long", "too few steps", "CG starved",
    "batch norm misused", "labels shuffled", "data leak",
)  # fmt: skip
COMMON: dict[str, Any] = {"threads": 1, "tensorboard": False, "val_tasks": 40}
GLYPHS = {**COMMON, "data": "glyphs", "channels": 8, "tasks": 4, "val_every": 50}
HEAD = {**GLYPHS, "channels": 16, "tasks": 8, "iterations": 150}
VECTORS = {**COMMON, "data": "vectors.npz", "hidden": "32", "queries": 10, "iterations": 100,
           "val_every": 50}  # fmt: skip
WAVES = {**COMMON, "data": "sinusoids", "val_every": 100}
TABLE = {**COMMON, "data": "table.csv", "task": "task", "features": "a,b", "target": "y",
         "iterations": 300, "val_every": 100}  # fmt: skip
DIAGONAL = {**VECTORS, "posterior": "diagonal"}
ALL = {**VECTORS, "adapt": "all"}
MAML = {**VECTORS, "method": "maml", "iterations": 200}


@dataclass(frozen=True)
class Planted:
    """A run, and the fault planted in it (None: healthy). ``main`` are the eight and the five."""

    name: str
    fault: str | None
    settings: dict[str, Any] = field(default_factory=dict)
    main: bool = False
    norm_stats: str | None = None
    direct: Callable[[int], Checkup] | None = None  # instead of a run: `ibaml.check`


# --- data ----------------------------------------------------------------------------------------


def vectors(classes: int = 100, each: int = 20, nuisance: int = 12) -> tuple[np.ndarray, ...]:
    """Clusters in four dimensions, beside dimensions that tell nothing."""
    rng = np.random.default_rng(0)
    centers = 2 * rng.normal(size=(classes, 1, 4))
    told = centers + 0.4 * rng.normal(size=(classes, each, 4))
    x = np.concatenate([told, 2 * rng.normal(size=(classes, each, nuisance))], -1)
    return x.astype(np.float32).reshape(classes * each, -1), np.repeat(np.arange(classes), each)


def write_data(folder: Path) -> None:
    rng = np.random.default_rng(1)
    x, y = vectors()
    np.savez(folder / "vectors.npz", x=x, y=y)
    np.savez(folder / "shuffled.npz", x=x, y=rng.permutation(y))
    names = [f"c{c}" for c in range(100)]
    splits = {"train": names[:64], "val": names[64:80], "test": names[80:]}
    (folder / "splits.json").write_text(json.dumps(splits))
    for name, copied, share in (("leak", 20, 1.0), ("leak_class", 1, 1.0), ("leak_few", 20, 0.05)):
        leaking = x.copy()
        for c in range(copied):  # test classes that are training classes under other names
            rows = np.where(y == 80 + c)[0][: max(1, int(20 * share))]
            leaking[rows] = x[np.where(y == c)[0][: len(rows)]]
        np.savez(folder / f"{name}.npz", x=leaking, y=np.array([f"c{c}" for c in y]))
    rows, shuffled = ["task,a,b,y"], ["task,a,b,y"]
    for t in range(60):
        a, b = rng.uniform(-2, 2, (2, 25))
        slope, turn = rng.normal(size=2)
        target = slope * a + np.sin(b + turn) + 0.1 * rng.normal(size=25)
        for lines, values in ((rows, target), (shuffled, rng.permutation(target))):
            lines += [f"t{t},{p:.5f},{q:.5f},{v:.5f}" for p, q, v in zip(a, b, values, strict=True)]
    (folder / "table.csv").write_text("\n".join(rows) + "\n")
    (folder / "table_shuffled.csv").write_text("\n".join(shuffled) + "\n")


# --- without a run folder ------------------------------------------------------------------------


def episodes(seed: int) -> EpisodeTasks:
    return EpisodeTasks(ibaml.tasks.glyphs(), 5, 1, queries=15, seed=seed)


def never_filled(seed: int) -> Checkup:
    """A plain loop whose author called learner.eval() before it."""
    torch.manual_seed(seed)
    tasks = episodes(seed)
    learner = ibaml.methods.ibaml(ibaml.nn.conv4(5, 8, 1, 28), data=tasks).eval()
    optimizer = torch.optim.Adam(learner.parameters(), 0.01)
    for step in range(30):
        (batch,) = tasks.batches("train", range(8 * step, 8 * step + 8))
        optimizer.zero_grad()
        learner(batch, torch.Generator().manual_seed(step)).backward()
        optimizer.step()
    return ibaml.check(learner, tasks.batches("val", range(16))[0])


def relabelled(seed: int) -> Checkup:
    """A sampler that numbers the classes of support and query set each for itself."""
    torch.manual_seed(seed)
    tasks = episodes(seed)
    rng = np.random.default_rng(seed)

    def broken(split: str, keys: range) -> TaskBatch:
        (b,) = tasks.batches(split, keys)
        orders = torch.from_numpy(np.stack([rng.permutation(5) for _ in keys]))
        return TaskBatch(b.support_x, b.support_y, b.query_x, orders.gather(1, b.query_y))

    learner = ibaml.methods.ibaml(ibaml.nn.conv4(5, 8, 1, 28), data=tasks)
    optimizer = torch.optim.Adam(learner.parameters(), 0.01)
    for step in range(10):
        optimizer.zero_grad()
        learner(broken("train", range(8 * step, 8 * step + 8))).backward()
        optimizer.step()
    return ibaml.check(learner, broken("val", range(16)))


CASES = (
    Planted("glyphs, the head", None, HEAD, True),
    Planted("glyphs, all adapted", None, {**GLYPHS, "adapt": "all", "iterations": 150}, True),
    Planted("glyphs, MAML", None, {**GLYPHS, "method": "maml", "iterations": 150}, True),
    Planted("sinusoids", None, {**WAVES, "iterations": 500}, True),
    Planted("vectors, the head", None, VECTORS, True),
    Planted("β 1", "β too large", {**DIAGONAL, "beta": 1.0}, True),
    Planted("ρ −2, glyphs", "prior too wide",
            {**GLYPHS, "channels": 4, "adapt": "all", "init_log_var": -2.0, "iterations": 20},
            True),
    Planted("α 3, glyphs, MAML", "inner step too long",
            {**GLYPHS, "method": "maml", "solver": "descent", "inner_lr": 3.0, "iterations": 60},
            True),
    Planted("K 1, α .01, glyphs, MAML", "too few steps",
            {**GLYPHS, "method": "maml", "steps": 1, "inner_lr": 0.01, "iterations": 80}, True),
    Planted("L 1", "CG starved", {**DIAGONAL, "cg_steps": 1}, True),
    Planted("statistics of lone queries, glyphs", "batch norm misused",
            HEAD, True, "batch"),
    Planted("shuffled, vectors", "labels shuffled", {**VECTORS, "data": "shuffled.npz"}, True),
    Planted("test classes copied, vectors", "data leak",
            {**VECTORS, "data": "leak.npz", "splits": "splits.json"}, True),
    # other strengths, other data
    Planted("β .3", "β too large", {**DIAGONAL, "beta": 0.3}),
    Planted("λ 30, everything", "β too large", {**ALL, "lam": 30.0, "inner_lr": 0.03}),
    Planted("λ 30, iMAML", "β too large", {**VECTORS, "method": "imaml", "lam": 30.0}),
    Planted("λ 100, full", "β too large", {**VECTORS, "lam": 100.0}),
    Planted("ρ −2, vectors", "prior too wide", {**ALL, "init_log_var": -2.0}),
    Planted("ρ 0, vectors", "prior too wide", {**ALL, "init_log_var": 0.0}),
    Planted("α 10, everything", "inner step too long", {**ALL, "inner_lr": 10.0}),
    Planted("α 10, MAML", "inner step too long", {**MAML, "solver": "descent", "inner_lr": 10.0}),
    Planted("α 3, MAML", "inner step too long", {**MAML, "solver": "descent", "inner_lr": 3.0}),
    Planted("K 1, the head", "too few steps",
            {**DIAGONAL, "solver": "descent", "steps": 1, "inner_lr": 0.1}),
    Planted("K 1, α .01, everything", "too few steps", {**ALL, "steps": 1, "inner_lr": 0.01}),
    Planted("K 1, α .01, MAML", "too few steps", {**MAML, "steps": 1, "inner_lr": 0.01}),
    Planted("L 2", "CG starved", {**DIAGONAL, "cg_steps": 2}),
    Planted("L 1, iMAML", "CG starved", {**VECTORS, "method": "imaml", "cg_steps": 1}),
    Planted("running statistics never filled", "batch norm misused", direct=never_filled),
    Planted("statistics of lone queries, MAML", "batch norm misused",
            {**GLYPHS, "method": "maml", "iterations": 150}, norm_stats="batch"),
    Planted("targets shuffled, table", "labels shuffled", {**TABLE, "data": "table_shuffled.csv"}),
    Planted("support and query numbered apart", "labels shuffled", direct=relabelled),
    Planted("one test class copied", "data leak",
            {**VECTORS, "data": "leak_class.npz", "splits": "splits.json"}),
    Planted("one example of each copied", "data leak",
            {**VECTORS, "data": "leak_few.npz", "splits": "splits.json"}),
    # healthy too
    Planted("vectors, diagonal", None, DIAGONAL),
    Planted("vectors, iMAML", None, {**VECTORS, "method": "imaml"}),
    Planted("vectors, discriminant", None, {**COMMON, "data": "vectors.npz", "queries": 10}),
    Planted("vectors, everything adapted", None, ALL),
    Planted("vectors, MAML", None, MAML),
    Planted("vectors, FOMAML", None, {**VECTORS, "method": "fomaml", "iterations": 400}),
    Planted("vectors, ABML", None, {**VECTORS, "method": "abml", "iterations": 400}),
    Planted("a table", None, TABLE),
)  # fmt: skip


def examined(case: Planted, seed: int, folder: Path, tasks: int) -> Checkup:
    if case.direct is not None:
        return case.direct(seed)
    given = {**case.settings, "seed": seed}
    for name in ("data", "splits"):
        if (folder / str(given.get(name))).exists():
            given[name] = str(folder / given[name])
    key = "-".join(str(v) for k, v in sorted(given.items()) if k not in ("data", "splits", *COMMON))
    stem = Path(given["data"]).stem
    path = folder / "runs" / f"{stem}-{key}".replace("/", "").replace(",", "_")
    if not (path / "finished").exists():
        shutil.rmtree(path, ignore_errors=True)
        try:
            if train(resolve(given), path)[1].signal is not None:
                raise SystemExit("stopped")
        except TrainingError as error:  # as planted: the doctor is asked all the same
            print(f"    {str(error)[:90]} …", flush=True)
        (path / "finished").touch()
    return examine(open_run(path), tasks=tasks, norm_stats=case.norm_stats)  # type: ignore[arg-type]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--tasks", type=int, default=16)
    parser.add_argument("--out", type=Path, default=Path("runs/doctor"))
    parser.add_argument(
        "--results", type=Path, default=Path(__file__).parent / "results" / "doctor_cpu.txt"
    )
    given = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    given.out.mkdir(parents=True, exist_ok=True)
    write_data(given.out)
    began = time.monotonic()
    rows: list[tuple[Planted, int, Checkup]] = []
    for seed in range(given.seeds):
        for case in CASES:
            slow = case.direct is not None or case.settings["data"] == "glyphs"
            if given.only in case.name and not (slow and seed):  # pictures with one seed
                checkup = examined(case, seed, given.out, given.tasks)
                rows.append((case, seed, checkup))
                print(line(*rows[-1]), flush=True)
                text = report(rows, time.monotonic() - began, given)
                if (
                    not given.only
                ):  # after every run: a benchmark that is stopped leaves what it has
                    given.results.write_text(text)
    print(text)


def line(case: Planted, seed: int, checkup: Checkup) -> str:
    mark = "  " if checkup.fault == case.fault else "X "
    found = checkup.fault or "–"
    reading = checkup.readings.get(case.fault or "", max(checkup.readings.values()))
    also = ", ".join(f.fault for f in checkup.findings[1:])
    return (
        f"{mark}{case.name:<36}{seed:>3}  {case.fault or '–':<22}{found:<22}{reading:>8.2f}"
        f"{'   also: ' + also if also else ''}"
    )


def report(rows: list[tuple[Planted, int, Checkup]], seconds: float, given: Any) -> str:
    parts = [
        f"$ python benchmarks/doctor.py --seeds {given.seeds}   # torch {torch.__version__}, one "
        f"thread of {os.cpu_count()} cores beside other jobs, {seconds:.0f} s (runs that were "
        "trained before not counted)",
        f"reading: of the fault planted (healthy: the largest of all), over its threshold, on "
        f"{given.tasks} validation tasks; 1 and above is a finding. X: not what was planted.",
        "",
        f"  {'run':<36}{'seed':>4}  {'planted':<22}{'verdict':<22}{'reading':>8}",
    ]
    parts += [line(*row) for row in rows]
    for title, chosen in (
        ("the eight and the five, seed 0", [r for r in rows if r[0].main and r[1] == 0]),
        ("all", rows),
    ):
        right = [c.fault == p.fault for p, _, c in chosen if p.fault]
        alarms = [c.fault is not None for p, _, c in chosen if not p.fault]
        parts.append(
            f"{title}: {sum(right)} of {len(right)} planted faults named, {sum(alarms)} false "
            f"alarms of {len(alarms)}"
        )
    parts += ["", f"{'fault':<28}{'healthy, largest':>18}{'planted, smallest':>20}{'median':>10}"]
    for rule in RULES:
        healthy = [c.readings[rule.fault] for p, _, c in rows if not p.fault]
        planted = [c.readings[rule.fault] for p, _, c in rows if p.fault == rule.fault]
        low, middle = (f"{n:.2f}" for n in (min(planted), np.median(planted))) if planted else "––"
        parts.append(f"{rule.fault:<28}{max(healthy, default=0):>18.2f}{low:>20}{middle:>10}")
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    main()
