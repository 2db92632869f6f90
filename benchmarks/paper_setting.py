"""Everything adapted by K steps of descent: which change pays? docs/studies/paper-setting.md.

    python benchmarks/paper_setting.py OUT.jsonl --data pictures.zip --splits splits.json
    python benchmarks/paper_setting.py OUT.jsonl --show

An arm is a run of `ibaml train` that differs from its neighbor in one thing. It is scored on
validation tasks (`--split test` for the last look), with a temperature fitted on other validation
tasks, once with batch norm's statistics of the batch, as in the paper, and once with those that
`learner.adapt` takes. A line of OUT.jsonl is an arm; arms in it are not run again.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ibaml.assessment import Protocol
from ibaml.assessment.tasks import open_test
from ibaml.energy import Categorical
from ibaml.evaluation import ClassScores
from ibaml.evaluation.predict import fit_temperature, score_tasks
from ibaml.machine import pick_device
from ibaml.training import resolve, train
from ibaml.training.start import load_run

FITTED_ON = range(10_000, 10_100)  # validation tasks
STATISTICS = {"batch": "batch", "own": None}  # of batch norm

Settings = dict[str, Any]
EXACT: Settings = {"curvature": "energy", "block": "mean"}
OURS: Settings = {
    "method": "ibaml", "adapt": "all", "solver": "polyak", "inner_lr": 0.1, "steps": 15,
    "samples": 2, "lam": 0.1, "init_log_var": -9.0, "stopping": "auto", **EXACT,
}  # fmt: skip
MAML: Settings = {"method": "maml", "solver": "polyak", "inner_lr": 0.03}
ABML: Settings = {"method": "abml", "solver": "polyak", "inner_lr": 0.03}
LAST: Settings = {**OURS, "adapt": "last"}
GGN: Settings = {"curvature": "ggn", "block": "all"}
SOLVED: Settings = {**OURS, "stopping": "off", "cg_steps": 50}
UNROLLED: Settings = {
    **ABML, "inner_lr": 0.1, "objective": "query", "steps": 15, "samples": 2, "init_log_var": -9.0,
}  # fmt: skip


def beta(shots: int) -> float:
    """β of λ = 0.1 at ρ = −9, for methods that know only β."""
    return 0.1 * 5 * shots * math.exp(-9)


# arm: its settings, and the neighbor it is compared with
ARMS: dict[str, tuple[Settings, str]] = {
    "iBaML": (OURS, "MAML"),
    "MAML": (MAML, ""),
    "ABML": (ABML, "MAML"),
    # the step size: fixed, or Polyak's up to a limit
    "alpha 0.1": ({**OURS, "solver": "descent"}, "iBaML"),
    "alpha 0.03": ({**OURS, "solver": "descent", "inner_lr": 0.03}, "iBaML"),
    "alpha 0.01": ({**OURS, "solver": "descent", "inner_lr": 0.01}, "iBaML"),
    "Polyak up to 0.03": ({**OURS, "inner_lr": 0.03}, "iBaML"),
    "Polyak up to 0.3": ({**OURS, "inner_lr": 0.3}, "iBaML"),
    "MAML, alpha 0.1": ({**MAML, "solver": "descent", "inner_lr": 0.1}, "MAML"),
    "MAML, alpha 0.03": ({**MAML, "solver": "descent"}, "MAML"),
    "MAML, alpha 0.01": ({**MAML, "solver": "descent", "inner_lr": 0.01}, "MAML"),
    "MAML, Polyak up to 0.1": ({**MAML, "inner_lr": 0.1}, "MAML"),
    "MAML, Polyak up to 0.3": ({**MAML, "inner_lr": 0.3}, "MAML"),
    "MAML, K 15": ({**MAML, "steps": 15}, "MAML"),
    "ABML, alpha 0.03": ({**ABML, "solver": "descent"}, "ABML"),
    "ABML, alpha 0.01": ({**ABML, "solver": "descent", "inner_lr": 0.01}, "ABML"),
    "ABML, Polyak up to 0.1": ({**ABML, "inner_lr": 0.1}, "ABML"),
    "ABML, beta 1e-4": ({**ABML, "beta": 1e-4}, "ABML"),
    # the rule alone
    "first order": ({**OURS, "stopping": "1e6"}, "iBaML"),
    "unrolled": (UNROLLED, "iBaML"),
    "implicit, exact": (SOLVED, "iBaML"),
    "implicit, Gauss-Newton": ({**SOLVED, **GGN}, "iBaML"),
    "K-aware, Gauss-Newton": ({**OURS, **GGN}, "iBaML"),
    # K
    "K 5": ({**OURS, "steps": 5}, "iBaML"),
    "K 10": ({**OURS, "steps": 10}, "iBaML"),
    "K 50": ({**OURS, "steps": 50}, "iBaML"),
    # the settings, one by one
    "lambda 0.03": ({**OURS, "lam": 0.03}, "iBaML"),
    "lambda 0.3": ({**OURS, "lam": 0.3}, "iBaML"),
    "lambda 1": ({**OURS, "lam": 1.0}, "iBaML"),
    "rho -7": ({**OURS, "init_log_var": -7.0}, "iBaML"),
    "predictive": ({**OURS, "objective": "predictive"}, "iBaML"),
    "4 samples": ({**OURS, "samples": 4}, "iBaML"),
    "meta-lr 0.001": ({**OURS, "meta_lr": 0.001}, "iBaML"),
    "meta-lr 0.01": ({**OURS, "meta_lr": 0.01}, "iBaML"),
    "t learned": ({**OURS, "temperature": "learned"}, "iBaML"),
    "point": (
        {"method": "imaml", "adapt": "all", "solver": "polyak", "inner_lr": 0.1, "steps": 15,
         "lam": 0.1, "curvature": "energy", "stopping": "auto"}, "iBaML",
    ),
    # between head and all
    "last block": (LAST, "iBaML"),
    "last block, K 50": ({**LAST, "steps": 50}, "last block"),
    "head": ({"method": "ibaml"}, "last block"),
}  # fmt: skip


def meta_train(name: str, given: argparse.Namespace) -> dict[str, Any]:
    """Train an arm, score it; a row of the results."""
    torch.set_num_threads(1)
    iterations = given.train_tasks // given.batch
    chosen = ARMS[name][0]
    if name == "unrolled":
        chosen = {**chosen, "beta": beta(given.shots)}
    settings = resolve(
        {
            "data": given.data, "splits": given.splits, "shots": given.shots,
            "image_size": given.side, "channels": given.channels, "iterations": iterations,
            "tasks": given.batch, "seed": given.seed, "val_every": iterations, "keep": 1,
            "log_every": max(1, iterations // 20), "checkpoint_every": iterations,
            "device": given.device, "precision": given.precision, "tensorboard": False,
            "temperature": given.temperature, **chosen,
        }
    )  # fmt: skip
    folder = Path(tempfile.mkdtemp()) / "run"
    run, outcome = train(settings, folder)
    log = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    steps = [line for line in log if "loss" in line]
    row: dict[str, Any] = {"arm": name, **_identity(given), "last step": outcome.step}
    row["notes"] = [line["note"] for line in log if "note" in line]
    half = len(steps) // 2
    took = steps[-1]["seconds"] - steps[half]["seconds"]
    row["ms a task"] = 1000 * took / (settings.tasks * (steps[-1]["step"] - steps[half]["step"]))
    row |= {k: steps[-1].get(k) for k in ("loss", "cg_residual", "unsolved", "inner_gradient")}
    learner, _ = load_run(run, "last", pick_device(given.device))
    source = open_test(run, Protocol(device=given.device))
    for statistics in given.statistics:
        kind = STATISTICS[statistics]
        likelihood = learner.likelihood
        assert isinstance(likelihood, Categorical)
        if likelihood.log_fit is not None:
            fit_temperature(learner, source, "val", FITTED_ON, norm_stats=kind)  # type: ignore[arg-type]
        scores = score_tasks(
            learner, source, given.split, range(given.scored), norm_stats=kind  # type: ignore[arg-type]
        )  # fmt: skip
        assert isinstance(scores, ClassScores)
        figures = {name: i.value for name, i in scores.summary().items()}
        row[statistics] = {
            "t": likelihood.temperature,
            **{k: figures[k] for k in ("accuracy", "nll", "ece")},
            "nlls": [round(v, 5) for v in scores.means()["nll"].tolist()],
        }
    shutil.rmtree(folder.parent)
    return row


def _identity(given: argparse.Namespace) -> dict[str, Any]:
    names = (
        "shots",
        "seed",
        "side",
        "channels",
        "train_tasks",
        "batch",
        "split",
        "scored",
        "temperature",
    )
    return {name: getattr(given, name) for name in names}


def table(rows: Sequence[dict[str, Any]], statistics: str) -> str:
    """A row per arm. The difference in nll to its neighbor is paired over tasks (and seeds)."""
    lines = [
        f"{'arm':26} {'shots':>5} {'seeds':>5} {'acc %':>6} {'nll':>6} {'ECE %':>6} {'t':>5} "
        f"{'resid.':>7} {'ms/task':>7}   nll against its neighbor"
    ]
    for shots in sorted({row["shots"] for row in rows}):
        here = [row for row in rows if row["shots"] == shots]
        for name in (n for n in ARMS if any(row["arm"] == n for row in here)):
            mine = {row["seed"]: row for row in here if row["arm"] == name}
            other = {row["seed"]: row for row in here if row["arm"] == ARMS[name][1]}
            seeds = sorted(mine.keys() & other.keys())
            against = ""
            if seeds:
                gap = np.concatenate(
                    [
                        np.subtract(mine[s][statistics]["nlls"], other[s][statistics]["nlls"])
                        for s in seeds
                    ]
                )
                half = 1.96 * gap.std(ddof=1) / len(gap) ** 0.5
                against = f"{gap.mean():+.3f} ± {half:.3f}  ({ARMS[name][1]})"
            scored = [row[statistics] for row in mine.values()]
            acc, nll, ece, t = (
                float(np.mean([s[k] for s in scored])) for k in ("accuracy", "nll", "ece", "t")
            )
            first = next(iter(mine.values()))
            residual = first["cg_residual"]
            lines.append(
                f"{name:26} {shots:5} {len(mine):5} {100 * acc:6.1f} {nll:6.3f} {100 * ece:6.1f} "
                f"{t:5.2f} {'' if residual is None else f'{residual:.0e}':>7} "
                f"{first['ms a task']:7.1f}   {against}"
            )
    return "\n".join(lines)


def _job(job: tuple[str, argparse.Namespace]) -> dict[str, Any] | None:
    name, given = job
    if time.time() > given.until:
        return None
    try:
        return meta_train(name, given)
    except Exception as error:  # one arm that fails must not end the others
        return {"arm": name, "shots": given.shots, "failed": f"{type(error).__name__}: {error}"}
    finally:
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--data", default="glyphs")
    parser.add_argument("--splits")
    parser.add_argument("--side", type=int, help="of pictures; default 84")
    parser.add_argument("--channels", type=int, default=32)
    parser.add_argument("--shots", type=int, nargs="+", default=[1])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--train-tasks", type=int, default=2000)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--scored", type=int, default=300, help="tasks")
    parser.add_argument("--split", choices=("val", "test"), default="val")
    parser.add_argument("--temperature", default="fitted")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--precision", default="full")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=1e9, help="begin no arm after these")
    parser.add_argument("--arms", nargs="+", choices=tuple(ARMS), default=tuple(ARMS))
    parser.add_argument("--statistics", nargs="+", choices=tuple(STATISTICS), default=["batch"])
    parser.add_argument("--show", action="store_true", help="only print the tables")
    given = parser.parse_args()
    began = time.time()
    rows = []
    if given.out.exists():
        rows = [json.loads(line) for line in given.out.read_text().splitlines()]
    if not given.show:
        jobs = []
        for name in given.arms:
            for shots in given.shots:
                for seed in given.seeds:
                    changed = {"shots": shots, "seed": seed, "until": began + 60 * given.minutes}
                    one = argparse.Namespace(**{**vars(given), **changed})
                    wanted = {"arm": name, **_identity(one)}
                    if not any(all(r.get(k) == v for k, v in wanted.items()) for r in rows):
                        jobs.append((name, one))
        context = multiprocessing.get_context("spawn")
        with context.Pool(given.processes) as pool:
            for row in pool.imap_unordered(_job, jobs):
                if row is None:  # no time was left
                    continue
                rows.append(row)
                with given.out.open("a") as file:
                    file.write(json.dumps(row) + "\n")
                told = row.get("failed") or f"nll {row['batch']['nll']:.3f} {row['notes']}"
                print(
                    f"{time.time() - began:5.0f} s  {row['arm']} {row['shots']} {told}", flush=True
                )
    rows = [row for row in rows if "failed" not in row]
    for statistics in given.statistics:
        print(f"\nbatch norm's statistics: {statistics}\n{table(rows, statistics)}")


if __name__ == "__main__":
    main()
