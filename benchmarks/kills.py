"""Is a run the same, bit for bit, however often it is killed? SIGKILL at random moments.

    python benchmarks/kills.py --kills 50          # over three kinds of runs; about ten minutes
    python benchmarks/kills.py --kills 50 --slow   # every write takes 50 ms: it is always at work

Every kind is trained once without kills, and once with its share of them, resumed after each.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from ibaml.training.checkpoint import unpack

SHORT = "--checkpoint-every 5 --no-tensorboard --threads 1 --keep 2"
KINDS = {
    "sinusoids, iBaML's head by Newton, ema": (
        "--data sinusoids --hidden 8 --queries 5 --tasks 4 --iterations 400 --val-every 20 "
        "--val-tasks 4 --ema 0.9"
    ),
    "vectors, MAML, micro-batches": (
        "--data {vectors} --method maml --ways 3 --queries 4 --hidden 8 --tasks 6 --micro-batch 4 "
        "--iterations 400 --val-every 20 --val-tasks 6"
    ),
    "glyphs, iBaML with batch norm": (
        "--data glyphs --channels 4 --queries 3 --tasks 2 --iterations 120 --val-every 20 "
        "--val-tasks 2"
    ),
}


def vectors(path: Path) -> Path:
    rng = np.random.default_rng(0)
    x = 2 * rng.normal(size=(60, 1, 4)) + 0.4 * rng.normal(size=(60, 12, 4))
    np.savez(path, x=x.reshape(-1, 4).astype(np.float32), y=np.repeat(np.arange(60), 12))
    return path


SLOW = """
import os, time
real = os.fsync
os.fsync = lambda handle: (time.sleep(0.05), real(handle))
from ibaml.cli import app
app()
"""


def start(*words: str, slow: bool = False) -> subprocess.Popen[bytes]:
    program = ["-c", SLOW] if slow else ["-m", "ibaml"]
    return subprocess.Popen(
        [sys.executable, *program, "train", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def finish(process: subprocess.Popen[bytes]) -> None:
    said, _ = process.communicate()
    if process.returncode:
        sys.exit(said.decode())


def newest(run: Path) -> int:
    return max((int(p.stem[5:]) for p in (run / "checkpoints").glob("step-*")), default=0)


def state(run: Path, name: str) -> dict[str, torch.Tensor]:
    return unpack((run / "checkpoints" / name).read_bytes())[0]


def survives(
    words: list[str], folder: Path, kills: int, chance: random.Random, slow: bool
) -> tuple[int, bool]:
    """How often the run was killed, and whether it equals the undisturbed run bit for bit."""
    whole, cut = folder / "whole", folder / "cut"
    finish(start(*words, "--out", str(whole)))
    end = newest(whole)
    process, done = start(*words, "--out", str(cut), slow=slow), 0
    while done < kills:
        goal = chance.randrange(0, max(5, end - newest(cut) - 10) // max(1, kills - done) * 2 + 5)
        goal += newest(cut)
        while newest(cut) < min(goal, end - 5) and process.poll() is None:
            time.sleep(0.002)
        if process.poll() is None and not (cut / "checkpoints").exists():
            time.sleep(0.05)  # a run that has not begun has nothing to resume
            continue
        time.sleep(chance.random() * 0.05)
        if process.poll() is not None:
            break
        process.kill()
        process.communicate()
        done += 1
        again = ["--resume", str(cut)] if newest(cut) else [*words, "--out", str(cut)]
        process = start(*again, slow=slow)
    finish(process)
    last = f"step-{end:08d}.safetensors"
    same = all(
        (a := state(whole, name)).keys() == (b := state(cut, name)).keys()
        and all(torch.equal(a[n], b[n]) for n in a)
        for name in (last, "best.safetensors")
    )
    return done, same


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--slow", action="store_true", help="with a slow disk")
    given = parser.parse_args()
    chance, total, good = random.Random(given.seed), 0, 0
    for i, (name, words) in enumerate(KINDS.items()):
        share = (given.kills * (i + 1)) // len(KINDS) - (given.kills * i) // len(KINDS)
        with tempfile.TemporaryDirectory() as folder:
            place = Path(folder)
            split = f"{words} {SHORT}".format(vectors=vectors(place / "vectors.npz")).split()
            began = time.monotonic()
            kills, same = survives(split, place, share, chance, given.slow)
            total, good = total + kills, good + kills * same
            verdict = "last and best state bit-identical" if same else "DIFFERENT"
            print(
                f"{name}: {kills} kills, {verdict} ({time.monotonic() - began:.0f} s)", flush=True
            )
    print(f"{good} of {total} kills left no trace")


if __name__ == "__main__":
    main()
