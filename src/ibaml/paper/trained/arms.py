"""Which methods are compared, and with which settings is each trained?

An arm is an ordinary training run. All of them share network, tasks and seed, and most the paper's
protocol; the head and "our defaults" have those of `ibaml train`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

from ibaml.fields import require, setting
from ibaml.training import Settings as RunSettings
from ibaml.training import resolve
from ibaml.words import NORM_STATS


@dataclass(frozen=True)
class Arm:
    """One method: its title in tables, and what sets it apart.

    ``ours``: not the paper's protocol but the defaults of `ibaml train`, with everything adapted.
    """

    title: str
    method: str
    steps: int | None = 5
    curvature: str = "ggn"
    head: bool = False
    ours: bool = False

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
    "maml_ours": Arm("MAML, our defaults", "maml", None, ours=True),
    "abml_ours": Arm("ABML, our defaults", "abml", None, ours=True),
    "ibaml_ours": Arm("iBaML, our defaults", "ibaml", None, ours=True),
    # these run only if they are named
    "ibaml5_ours": Arm("iBaML, our defaults, K = 5", "ibaml", 5, ours=True),
    "ibaml50_ours": Arm("iBaML, our defaults, K = 50", "ibaml", 50, ours=True),
    "ibaml5_lemma": Arm("iBaML, K = 5, lemma", "ibaml", curvature="lemma"),
    "ibaml5_energy": Arm("iBaML, K = 5, energy", "ibaml", curvature="energy"),
    "ibaml15_lemma": Arm("iBaML, K = 15, lemma", "ibaml", 15, curvature="lemma"),
    "imaml_head": Arm("iMAML, head", "imaml", None, head=True),
}
USUAL = tuple(ARMS)[:11]
OWN = "own"  # batch norm's statistics as learner.adapt takes them


def _each_once(names: Sequence[str]) -> str | None:
    return None if len(set(names)) == len(names) else "must name each once"


@dataclass(frozen=True)
class Settings:
    """A comparison of arms. The defaults are the paper's protocol."""

    seed: int = 0
    arms: tuple[str, ...] = setting(
        USUAL, "The arms to compare, in this order.", choices=tuple(ARMS), check=_each_once
    )
    data: str = setting("miniimagenet", "As for `ibaml train`.")
    root: str = setting("", "Likewise; left out where empty.")
    splits: str = setting("", "Likewise.")
    image_size: int = setting(0, "Likewise; 0: the data's own.", least=0)
    ways: int = 5
    shots: int = 5
    queries: int = setting(15, "Queries per class in training.")
    channels: int = setting(32, "Channels of Conv4.")
    train_tasks: int = setting(80_000, "Of every arm (the paper: 40,000 steps of 2).", least=1)
    batch: int = setting(2, "Tasks of a meta-step.", least=1)
    head_tasks: int = setting(80_000, "`train_tasks` of arms that adapt the head.", least=1)
    head_batch: int = setting(8, "`batch` of arms that adapt the head.", least=1)
    our_batch: int = setting(8, "`batch` of arms with our defaults.", least=1)
    head_steps: int = setting(0, "Their Newton steps; 0: as `ibaml train`.", least=0)
    head_beta: float = setting(0.0, "Their β; 0: as `ibaml train`.", least=0)
    meta_lr: float = setting(
        0.001, "β_meta; this and what follows down to λ: of arms with the paper's protocol."
    )
    inner_lr: float = setting(0.01, "α, the step size of adaptation.")
    samples: int = setting(5, "Monte-Carlo samples S in training.")
    beta: float = setting(1.0, "β, the weight of the KL term.")
    init_log_var: float = setting(-6.0, "ρ at the start, the log-variance of the prior.")
    cg_steps: int = setting(5, "Steps of conjugate gradients, L.")
    lam: float = setting(0.5, "iMAML's λ.")
    validations: int = setting(20, "How often validation looks in training; 0: never.", least=0)
    val_tasks: int = setting(100, "Tasks it looks at.", least=1)
    test_tasks: int = setting(1000, "Test tasks.", least=1)
    test_samples: int = setting(10, "Samples in the test.", least=1)
    test_steps: int = setting(
        0, "K in the test, of arms that adapt everything; 0: as in training.", least=0
    )
    test_queries: int = setting(15, "Queries per class in the test.", least=1)
    norm_stats: str = setting(
        "batch",
        "Batch norm's statistics in the test: of the batch (the literature's, transductive), the "
        "support set, the running ones, or own: what `learner.adapt` takes.",
        choices=(*NORM_STATS, OWN),
    )
    which: str = setting(
        "best", "The weights that are tested, best by validation nll.", choices=("best", "last")
    )
    diagnosed: int = setting(16, "Tasks on which the last meta-gradient is looked into.", least=1)
    device: str = "auto"
    precision: str = "full"
    threads: int = setting(1, "Threads of torch.", least=1)

    def __post_init__(self) -> None:
        require(self)
        for arm in self.arms:
            run_settings(ARMS[arm], self)  # a wrong setting fails now, not after others are trained


def run_settings(arm: Arm, study: Settings) -> RunSettings:
    """The training run of an arm."""
    tasks, batch = study.train_tasks, study.batch
    if arm.head:
        tasks, batch = study.head_tasks, study.head_batch
    elif arm.ours:
        batch = study.our_batch
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
    }
    if arm.ours:
        return resolve({**given, "adapt": "all", "steps": arm.steps})
    own = _head(arm, study) if arm.head else _everything(arm, study)
    return resolve({**given, "temperature": "1", **own})


def _head(arm: Arm, study: Settings) -> dict[str, Any]:
    """The head adapted by Newton steps, with the paper's posterior."""
    given: dict[str, Any] = {"adapt": "head", "steps": study.head_steps or None}
    if arm.gaussian:
        given.update(noise="antithetic", beta=study.head_beta or None)
    if arm.method == "ibaml":
        given["posterior"] = "diagonal"
    return given


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


def of_this_machine(settings: RunSettings, study: Settings) -> RunSettings:
    """The settings of a run folder, perhaps from another machine, with this machine's settings."""
    ours = {name: getattr(study, name) for name in ("data", "device", "threads")}
    places: dict[str, Any] = {name: getattr(study, name) or None for name in ("root", "splits")}
    return dataclasses.replace(settings, **ours, **places)
