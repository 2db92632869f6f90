"""Which methods are compared, and with which settings is each trained?

An arm is an ordinary training run. All of them share network, tasks, seed and, but for the arms
that adapt the head alone, the paper's protocol; the head has the defaults of `ibaml train`.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any

from ibaml.execution import NORM_STATS
from ibaml.training import Settings as RunSettings
from ibaml.training import resolve


@dataclass(frozen=True)
class Arm:
    """One method: its title in tables, and what sets it apart."""

    title: str
    method: str
    steps: int | None = 5
    curvature: str = "ggn"
    head: bool = False

    @property
    def implicit(self) -> bool:
        return self.method in ("ibaml", "imaml")

    @property
    def gaussian(self) -> bool:
        return self.method in ("ibaml", "abml")


ARMS = {
    "maml5": Arm("MAML, K = 5", "maml"),
    "abml5": Arm("ABML, K = 5", "abml"),
    "ibaml5": Arm("iBaML, K = 5", "ibaml"),
    "ibaml10": Arm("iBaML, K = 10", "ibaml", 10),
    "ibaml15": Arm("iBaML, K = 15", "ibaml", 15),
    "fomaml5": Arm("FOMAML, K = 5", "fomaml"),
    "imaml5": Arm("iMAML, K = 5", "imaml"),
    "ibaml_head": Arm("iBaML, head", "ibaml", None, head=True),
    # to be asked for by name
    "ibaml5_lemma": Arm("iBaML, K = 5, lemma", "ibaml", curvature="lemma"),
    "ibaml5_energy": Arm("iBaML, K = 5, energy", "ibaml", curvature="energy"),
    "ibaml15_lemma": Arm("iBaML, K = 15, lemma", "ibaml", 15, curvature="lemma"),
    "imaml_head": Arm("iMAML, head", "imaml", None, head=True),
}
USUAL = tuple(ARMS)[:8]
OWN = "own"  # batch norm's statistics as learner.adapt takes them
# what does not change a result, or belongs to one machine
_OF_THE_MACHINE = (
    "root", "device", "threads", "execution", "micro_batch", "checkpoint_every", "keep",
    "log_every", "tensorboard", "patience",
)  # fmt: skip


@dataclass(frozen=True)
class Settings:
    """A comparison of arms. The defaults are the paper's protocol.

    Attributes:
        data, root, splits, image_size: as `ibaml train` takes them; "" and 0 leave them out.
        queries: a class of a training task; test tasks have 15.
        train_tasks, batch: of every arm, and of one meta-step (the paper: 40,000 steps of 2).
        head_tasks, head_batch: the same for arms that adapt the head.
        head_steps, head_beta: their Newton steps and β; 0: the defaults of `ibaml train`.
        meta_lr, inner_lr, samples, beta, init_log_var, cg_steps, lam: β_meta, α, S, β, ρ, L, λ of
            arms that adapt everything.
        validations: how often validation looks at ``val_tasks`` tasks during training.
        test_steps: K in the test, of arms that adapt everything; 0: as in training.
        which: the weights that are tested, ``"best"`` by validation nll or ``"last"``.
        norm_stats: batch norm's statistics in the test: ``"batch"`` (the literature's, which is
            transductive), ``"support"``, ``"running"``, or ``"own"``, what `learner.adapt` takes.
        diagnosed: tasks on which the meta-gradient at the end of training is looked into.
    """

    seed: int = 0
    arms: tuple[str, ...] = USUAL
    data: str = "miniimagenet"
    root: str = ""
    splits: str = ""
    image_size: int = 0
    ways: int = 5
    shots: int = 5
    queries: int = 15
    channels: int = 32
    train_tasks: int = 80_000
    batch: int = 2
    head_tasks: int = 80_000
    head_batch: int = 8
    head_steps: int = 0
    head_beta: float = 0.0
    meta_lr: float = 0.001
    inner_lr: float = 0.01
    samples: int = 5
    beta: float = 1.0
    init_log_var: float = -6.0
    cg_steps: int = 5
    lam: float = 0.5
    validations: int = 20
    val_tasks: int = 100
    test_tasks: int = 1000
    test_samples: int = 10
    test_steps: int = 0
    test_queries: int = 15
    norm_stats: str = "batch"
    which: str = "best"
    diagnosed: int = 16
    device: str = "auto"
    precision: str = "full"
    threads: int = 1

    def __post_init__(self) -> None:
        for name in self.arms:
            if name not in ARMS:
                raise ValueError(f"arms: there is no {name!r}; there are {', '.join(ARMS)}")
        if not self.arms or len(set(self.arms)) < len(self.arms):
            raise ValueError("arms: name at least one, and each once")
        for name in ("train_tasks", "head_tasks", "batch", "head_batch", "val_tasks", "test_tasks",
                     "test_samples", "test_queries", "diagnosed", "threads"):  # fmt: skip
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be 1 or more, got {getattr(self, name)}")
        if self.test_steps < 0:
            raise ValueError(f"test_steps must be 0 (as in training) or more: {self.test_steps}")
        for name, choices in (
            ("norm_stats", (*NORM_STATS, OWN)), ("which", ("best", "last")),
        ):  # fmt: skip
            if getattr(self, name) not in choices:
                raise ValueError(
                    f"{name} must be one of {', '.join(choices)}; got {getattr(self, name)!r}"
                )
        for arm in self.arms:
            run_settings(ARMS[arm], self)  # refused now, not when others are trained


def run_settings(arm: Arm, study: Settings) -> RunSettings:
    """The training run of an arm."""
    tasks, batch = study.train_tasks, study.batch
    if arm.head:
        tasks, batch = study.head_tasks, study.head_batch
    iterations = ceil(tasks / batch)
    between = max(1, iterations // study.validations) if study.validations > 0 else 0
    given: dict[str, Any] = {
        "method": arm.method,
        "data": study.data,
        "root": study.root or None,
        "splits": study.splits or None,
        "image_size": study.image_size or None,
        "ways": study.ways,
        "shots": study.shots,
        "queries": study.queries,
        "channels": study.channels,
        "iterations": iterations,
        "tasks": batch,
        "seed": study.seed,
        "device": study.device,
        "precision": study.precision,
        "threads": study.threads,
        "val_every": between,
        "val_tasks": study.val_tasks,
        "checkpoint_every": max(1, min(500, iterations // 10)),
        "keep": 1,
        "log_every": max(1, min(100, iterations // 20)),
        "tensorboard": False,
        "temperature": "1",
    }
    return resolve({**given, **(_head(arm, study) if arm.head else _everything(arm, study))})


def _head(arm: Arm, study: Settings) -> dict[str, Any]:
    """The head adapted by Newton steps, as `ibaml train` does unasked."""
    beta = study.head_beta if arm.gaussian else 0.0
    return {"adapt": "head", "steps": study.head_steps or None, "beta": beta or None}


def _everything(arm: Arm, study: Settings) -> dict[str, Any]:
    """All weights adapted by K steps of descent, as in the paper."""
    given: dict[str, Any] = {
        "adapt": "all",
        "solver": "descent",
        "steps": arm.steps,
        "inner_lr": study.inner_lr,
        "meta_lr": study.meta_lr,
        "schedule": "constant",
    }
    if arm.implicit:
        given.update(cg_steps=study.cg_steps, curvature=arm.curvature)
    if arm.gaussian:
        given.update(
            samples=study.samples,
            noise="independent",
            beta=study.beta,
            init_log_var=study.init_log_var,
        )
    if arm.method == "imaml":
        given["lam"] = study.lam
    return given


def identity(settings: RunSettings) -> dict[str, Any]:
    """What a training run is, wherever it runs: the settings without those of a machine, and the
    data by its name, not by its place."""
    found = dataclasses.asdict(settings)
    for name in _OF_THE_MACHINE:
        del found[name]
    for name in ("data", "splits"):
        found[name] = found[name] and Path(found[name]).name
    return found


def of_this_machine(settings: RunSettings, study: Settings) -> RunSettings:
    """The settings of a run folder that may come from elsewhere, with this machine's own."""
    ours = {name: getattr(study, name) for name in ("data", "device", "threads")}
    places: dict[str, Any] = {name: getattr(study, name) or None for name in ("root", "splits")}
    return dataclasses.replace(settings, **ours, **places)
