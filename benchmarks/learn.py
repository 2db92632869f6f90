"""Does every method learn? Each is meta-trained for a minute or three and tested on new classes.

    make learn          (python benchmarks/learn.py; at most 20 minutes on 2 cores)

5-way 1-shot glyphs for every method, and Omniglot for iBaML where its files are ($IBAML_DATA).
Each has to be at least 10 points above nearest centroids on pixels, on the same 400 test tasks. The
table goes to benchmarks/results/learn_cpu.txt, the runs to runs/learn/; a finished run is not
trained again.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ibaml.assessment import Protocol, assess
from ibaml.evaluation import Interval, mean_interval
from ibaml.tasks import EpisodeTasks
from ibaml.tasks.inspect import nearest_centroid
from ibaml.training import Run, RunError, open_run, resolve, train

MARGIN = 0.10
TASKS = 400
COMMON: dict[str, Any] = {"channels": 16, "val_every": 0, "tensorboard": False, "threads": 1}
ALL: dict[str, Any] = {"adapt": "all", "tasks": 4}
ARMS: dict[str, dict[str, Any]] = {
    "ibaml, head": {"method": "ibaml", "iterations": 400},
    "imaml, head": {"method": "imaml", "iterations": 400},
    "maml, all": {"method": "maml", "steps": 3, "inner_lr": 0.4, "iterations": 300, **ALL},
    "fomaml, all": {"method": "fomaml", "steps": 5, "inner_lr": 0.1, "iterations": 400, **ALL},
    "reptile, all": {"method": "reptile", "steps": 8, "inner_lr": 0.1, "iterations": 300, **ALL},
    "ibaml, all": {"method": "ibaml", "samples": 2, "iterations": 250, **ALL},
    "abml, all": {
        "method": "abml", "steps": 3, "inner_lr": 0.4, "samples": 2, "beta": 0.0001,
        "iterations": 250, **ALL,
    },
}  # fmt: skip
OMNIGLOT = {"ibaml, head (Omniglot)": {"method": "ibaml", "data": "omniglot", "iterations": 400}}


@dataclass(frozen=True)
class Row:
    """One arm: accuracy and nll with batch norm inductive, accuracy transductive, the floor."""

    name: str
    seconds: float
    tasks: int
    inductive: Interval
    nll: Interval
    ece: Interval
    transductive: Interval
    floor: Interval
    lead: Interval


def run_arm(name: str, given: dict[str, Any], folder: Path) -> Row:
    settings = resolve({**COMMON, **given})
    path = folder / name.replace(", ", "-").replace(" ", "-").replace("(", "").replace(")", "")
    began = time.monotonic()
    run = finished(path)
    if run is None:
        shutil.rmtree(path, ignore_errors=True)
        run, _ = train(settings, path)
        (path / "seconds").write_text(f"{time.monotonic() - began:.1f}")
    assessment = assess(run, Protocol(tasks=TASKS))
    inductive, transductive = assessment.scores.values()
    source = assessment.source
    assert isinstance(source, EpisodeTasks)
    floor = nearest_centroid(source.data, "test", source.ways, source.shots, 15, TASKS)
    summary = inductive.summary()
    ours = inductive.means()["accuracy"]
    return Row(
        name,
        float((path / "seconds").read_text()),
        settings.iterations * settings.tasks,
        summary["accuracy"],
        summary["nll"],
        summary["ece"],
        transductive.summary()["accuracy"],
        mean_interval(floor),
        mean_interval(ours - np.asarray(floor)),
    )


def finished(path: Path) -> Run | None:
    """The run in a folder, where it came to its end."""
    try:
        run = open_run(path)
    except RunError:
        return None
    last = run.checkpoints / f"step-{run.settings.iterations:08d}.safetensors"
    return run if last.exists() and (path / "seconds").exists() else None


def percent(value: Interval) -> str:
    return f"{100 * value.value:.1f} ± {100 * (value.high - value.value):.1f}"


def table(rows: list[Row]) -> str:
    head = (
        f"{'method, adapted':<26}{'tasks':>6}{'time':>7}{'accuracy %':>14}{'transductive':>14}"
        f"{'nll':>8}{'ECE %':>7}{'pixels %':>14}{'lead':>14}"
    )
    lines = [head]
    for r in rows:
        lines.append(
            f"{r.name:<26}{r.tasks:>6}{r.seconds:>6.0f}s{percent(r.inductive):>14}"
            f"{percent(r.transductive):>14}{r.nll.value:>8.3f}{100 * r.ece.value:>7.1f}"
            f"{percent(r.floor):>14}{percent(r.lead):>14}"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", help="arms whose name contains this")
    parser.add_argument("--out", type=Path, default=Path("runs/learn"))
    parser.add_argument(
        "--results", type=Path, default=Path(__file__).parent / "results" / "learn_cpu.txt"
    )
    options = parser.parse_args()
    arms = dict(ARMS)
    if os.environ.get("IBAML_DATA") or Path("data/omniglot").exists():
        arms.update(OMNIGLOT)
    else:
        print("Omniglot is not here (IBAML_DATA, or data/omniglot): glyphs only")
    chosen = {n: a for n, a in arms.items() if not options.only or options.only in n}
    began = time.monotonic()
    rows = []
    for name, given in chosen.items():
        rows.append(run_arm(name, given, options.out))
        print(table(rows[-1:]).splitlines()[1], flush=True)
    poor = [r.name for r in rows if r.lead.value < MARGIN]
    verdict = f"below {100 * MARGIN:.0f} points above the pixels: {', '.join(poor) or 'none'}"
    text = (
        f"$ make learn   # {os.cpu_count()} cores, torch {torch.__version__}, "
        f"Python {platform.python_version()}; {time.monotonic() - began:.0f} s\n"
        f"5-way 1-shot, {TASKS} test tasks of new classes, 15 queries a class, 10 samples; ± is "
        "the 95 % interval over tasks.\naccuracy, nll, ECE: inductive (no query's answer depends "
        "on another query); transductive: batch norm sees all queries.\n"
        f"lead: accuracy minus that of nearest centroids on pixels, task by task.\n\n"
        f"{table(rows)}\n\n{verdict}\n"
    )
    print(text)
    if not options.only:
        options.results.write_text(text)
    sys.exit(1 if poor else 0)


if __name__ == "__main__":
    main()
