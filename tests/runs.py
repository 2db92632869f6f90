"""Tiny runs that the tests of the engine share."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ibaml.training import Settings, Trainer, resolve
from ibaml.training.build import build_learner, build_network, fit_network, open_tasks
from ibaml.training.checkpoint import unpack
from ibaml.training.fitting import meta_step_bytes

WAVES: dict[str, Any] = {
    "data": "sinusoids",
    "hidden": "8",
    "queries": 5,
    "tasks": 4,
    "tensorboard": False,
    "val_tasks": 4,
    "threads": 1,
}


def waves(**given: Any) -> Settings:
    """Sinusoids and a network of 8 units: a few milliseconds a step."""
    return resolve({**WAVES, **given})


def make(settings: Settings, **parts: Any) -> Trainer:
    """A trainer without a run folder."""
    tasks = open_tasks(settings, torch.device("cpu"))
    settings = fit_network(settings, tasks)
    learner = build_learner(settings, build_network(settings, tasks.example_shape))
    return Trainer(settings, learner, tasks, **parts)


def gradient(trainer: Trainer, step: int = 0) -> torch.Tensor:
    trainer.gradient(step)
    return torch.cat([p.grad.reshape(-1) for p in trainer.parameters])


def features_file(path: Path, classes: int = 24, each: int = 12, nuisance: int = 2) -> str:
    """An .npz of class clusters in four dimensions, beside dimensions that tell nothing: what a
    learner of many tasks can find out, and one of a single task cannot."""
    rng = np.random.default_rng(0)
    centers = 2 * rng.normal(size=(classes, 1, 4))
    told = centers + 0.4 * rng.normal(size=(classes, each, 4))
    x = np.concatenate([told, 2 * rng.normal(size=(classes, each, nuisance))], -1)
    x = x.astype(np.float32).reshape(classes * each, -1)
    np.savez(path, x=x, y=np.repeat(np.arange(classes), each))
    return str(path)


def words(given: dict[str, Any]) -> list[str]:
    """Settings as command-line words."""
    arguments = []
    for name, value in given.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            arguments.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            arguments += [f"--{flag}", str(value)]
    return arguments


def ibaml(*arguments: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run the command line in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "ibaml", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=300,
        **{"env": environment(), **options},
    )


def environment(**extra: str) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200", **extra}


def final_state(run: Path) -> dict[str, torch.Tensor]:
    """The tensors of the newest checkpoint."""
    newest = max((run / "checkpoints").glob("step-*.safetensors"))
    return unpack(newest.read_bytes())[0]


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    """Equal bit by bit."""
    return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)


def bytes_of(trainer: Trainer, count: int) -> int:
    """The peak memory of a meta-step of a trainer over so many tasks."""
    return meta_step_bytes(trainer.learner, trainer.tasks, trainer.settings, count)
