"""Does `ibaml train` learn with its defaults, whatever the seed? Four kinds of data, five seeds.

    python benchmarks/learns.py --photographs caltech101-84.zip --splits splits.json \\
        --table gapminder.tsv --out runs/learns

Each run is the shipped command, shortened by --iterations alone (ITERATIONS below); embeddings take
none. It is judged as `ibaml evaluate` does, best weights, on TASKS test tasks of new classes.

A run has learned if, on those tasks, both of these hold:

1. its accuracy's 95 % interval lies more than 10 points above chance (a table: its RMSE's interval
   lies below 1, where 1 is the spread of the training tasks' targets);
2. it beats the rival task by task, the 95 % interval of the paired difference excluding 0. The
   rival of glyphs, photographs and the table is the same command with --iterations 0, the untrained
   prior, by nll; that of embeddings is nearest centroids on the vectors, by accuracy.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import torch

from ibaml.assessment import Protocol, assess
from ibaml.evaluation import Interval, mean_interval
from ibaml.tasks import EpisodeTasks
from ibaml.tasks.inspect import nearest_centroid
from ibaml.tasks.keyed import TableTasks
from ibaml.training import open_run

ITERATIONS = {"glyphs": 60, "photographs": 40, "embeddings": None, "table": 300}
TASKS = {"glyphs": 200, "photographs": 100, "embeddings": 200, "table": 200}
ABOVE = 0.10


def command(*words: str | Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "ibaml", *map(str, words)],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    if done.returncode:
        sys.exit(done.stdout + done.stderr)


def trained(kind: str, words: list[str], seed: int, untrained: bool, out: Path) -> Path:
    """The folder of the run; one that is there goes on, if it was not at its end."""
    folder = out / f"{kind}-{'untrained' if untrained else 'run'}-{seed}"
    iterations = 0 if untrained else ITERATIONS[kind]
    shortened = [] if iterations is None else ["--iterations", str(iterations)]
    if list(folder.glob("checkpoints/step-*")):
        command("train", "--resume", folder)
    else:
        command("train", *words, "--seed", str(seed), *shortened, "--no-tensorboard",
                "--threads", "1", "--out", folder)  # fmt: skip
    return folder


def scores(folder: Path, tasks: int) -> tuple[object, dict[str, np.ndarray]]:
    judged = assess(open_run(folder), Protocol(tasks=tasks), also_transductive=False)
    rows = judged.main.rows()
    names = [n for n in ("nll", "accuracy", "mse") if n in rows[0]]
    return judged.source, {n: np.array([r[n] for r in rows], float) for n in names}


def row(kind: str, words: list[str], seed: int, out: Path) -> tuple[str, bool]:
    began, processor = time.monotonic(), os.times().children_user
    folder = trained(kind, words, seed, False, out)
    spent = time.monotonic() - began, os.times().children_user - processor
    source, ours = scores(folder, TASKS[kind])
    if kind == "embeddings":
        assert isinstance(source, EpisodeTasks)
        rival = nearest_centroid(source.data, "test", source.ways, source.shots, 15, TASKS[kind])
        lead = mean_interval(ours["accuracy"] - np.asarray(rival))
        by = "accuracy"
    else:
        _, before = scores(trained(kind, words, seed, True, out), TASKS[kind])
        lead, by = mean_interval(before["nll"] - ours["nll"]), "nll"
    if kind == "table":
        assert isinstance(source, TableTasks)
        level = mean_interval(ours["mse"] / source.target.unit**2)
        figure, clear = f"RMSE {level.value**0.5:.3f} spreads", level.high < 1
    else:
        level = mean_interval(ours["accuracy"])
        clear = level.low > 1 / open_run(folder).settings.ways + ABOVE
        figure = f"accuracy {shown(level, 100)} %"
    good = clear and lead.low > 0
    text = (
        f"{kind:<12}{seed:>4}   {figure:<26} {by} ahead by {shown(lead, 1)}   "
        f"{spent[0]:>4.0f} s, {spent[1]:>4.0f} of the processor   "
        f"{'learned' if good else 'NOT LEARNED'}"
    )
    return text, good


def shown(value: Interval, scale: float) -> str:
    digits = 1 if scale == 100 else 3
    half = scale * (value.high - value.low) / 2
    return f"{scale * value.value:.{digits}f} ± {half:.{digits}f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--photographs", type=Path, required=True)
    parser.add_argument("--splits", type=Path)
    parser.add_argument("--table", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--only", nargs="*", choices=ITERATIONS)
    parser.add_argument("--out", type=Path, default=Path("runs/learns"))
    given = parser.parse_args()
    torch.set_num_threads(1)
    given.out.mkdir(parents=True, exist_ok=True)
    split = ["--splits", str(given.splits)] if given.splits else []
    vectors = given.out / "embeddings.npz"
    kinds = {
        "table": ["--data", str(given.table), "--task", "country", "--features", "year",
                  "--target", "lifeExp", "--shots", "3"],
        "glyphs": ["--data", "glyphs"],
        "embeddings": ["--data", str(vectors), *split],
        "photographs": ["--data", str(given.photographs), *split],
    }  # fmt: skip
    learned = total = 0
    for kind, words in kinds.items():
        if given.only and kind not in given.only:
            continue
        if kind == "embeddings" and not vectors.exists():
            command("embed", given.photographs, "--out", vectors)
        for seed in range(given.seeds):
            text, good = row(kind, words, seed, given.out)
            learned, total = learned + good, total + 1
            print(text, flush=True)
    print(f"{learned} of {total} learned")
    sys.exit(0 if learned == total else 1)


if __name__ == "__main__":
    main()
