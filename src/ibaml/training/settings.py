"""What is a training run? Every setting, its default and its meaning.

One table serves the command line, the TOML file and the run folder; `rules` fills in what was not
given and refuses contradictions. It needs no torch, so that --help is fast.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ibaml import fields
from ibaml.fields import SettingsError, fields_of, setting
from ibaml.kinds import IMAGE_SIZE, QUERIES
from ibaml.words import (
    BACKBONES,
    CURVATURES,
    EXECUTIONS,
    GAUSSIAN,
    IMPLICIT,
    METHODS,
    NOISE_KINDS,
    OBJECTIVES,
    POSTERIORS,
    PRECISIONS,
    PRETRAINED,
    READ_BY,
    SOLVERS,
    UNROLLED,
)

__all__ = ["FIELDS", "Settings", "SettingsError", "read_toml"]

_DATA, _NET, _METHOD = "Tasks", "Network", "Method: how a task is learned"
_TENTH = "200; with other tasks as many as have 1600 tasks (regression 3200)"
_OUTER, _RUN = "Meta-training: how the prior is learned", "Run"


def _widths(hidden: str) -> str | None:
    parts = hidden.split(",") if hidden.strip() else []
    fine = all(re.fullmatch(r"\s*0*[1-9]\d{0,8}\s*", part) for part in parts)
    return None if fine else "must be widths such as 40,40"


@dataclass(frozen=True)
class Settings:
    """A training run. `resolve` makes one; ``None`` means that a setting does not apply."""

    # --- tasks
    data: str = setting(
        "glyphs", "A name from `ibaml data list`, sinusoids, an image folder or zip (or several, "
        "with : between), a CSV list of images, an .npz of features x and labels y, or a table "
        "(with --target).", _DATA
    )  # fmt: skip
    root: str | None = setting(
        None, "Folder of the files of a named dataset or a CSV list.", _DATA,
        shown="$IBAML_DATA/NAME; a list: its own folder",
    )  # fmt: skip
    splits: str | None = setting(
        None, "JSON file with the classes (or tasks) of train, val and test, for your own data.",
        _DATA, shown="as in the data, else by a hash of names",
    )  # fmt: skip
    class_level: int | None = setting(
        None, "Folder: 1 takes the folders directly in it as classes, 2 those in them, …", _DATA,
        least=1, shown="the innermost folders",
    )  # fmt: skip
    backbone: str | None = setting(
        None, "Embed images with a pre-trained network and learn from the vectors: "
        f"{' or '.join(PRETRAINED)}.", _DATA, choices=PRETRAINED,
    )  # fmt: skip
    image_size: int | None = setting(
        None, "Side in pixels of your own images (folder or list).", _DATA, least=4,
        shown=str(IMAGE_SIZE),
    )  # fmt: skip
    task: str | None = setting(None, "Table: the column that names the task.", _DATA)
    features: str | None = setting(None, "Table: the input columns, comma-separated.", _DATA)
    target: str | None = setting(None, "Table: the column to predict.", _DATA)
    first_rows: bool = setting(
        False, "Table: learn from a task's first rows, in the order of the first feature, and "
        "predict the later ones, instead of random rows.", _DATA,
    )  # fmt: skip
    ways: int | None = setting(None, "W, classes per task.", _DATA, least=2, shown="5")
    shots: int | None = setting(
        None, "Support examples per class (regression: per task).", _DATA, least=1,
        shown="1; regression 5",
    )  # fmt: skip
    queries: int | None = setting(
        None, "Queries per class (regression: per task) in training.", _DATA, least=1,
        shown=f"{QUERIES}; a table: all other rows",
    )  # fmt: skip
    train_ways: int | None = setting(
        None, "Classes per task in training, if other than in the test (with --tie-head); of each "
        "there are then fewer queries.", _DATA, least=2,
        shown="posterior full: up to 20, at most half of the training classes; else ways",
    )  # fmt: skip
    train_shots: int | None = setting(
        None, "Shots in training, if other than in the test.", _DATA, least=1,
        shown="shots; reptile at least 5",
    )  # fmt: skip
    rotations: bool = setting(False, "Add quarter turns of training classes as new classes.", _DATA)
    augment: bool = setting(False, "Flip and shift training images.", _DATA)

    # --- network
    model: str | None = setting(
        None,
        "Network: conv4, resnet12, mlp, or discriminant (vectors, from the base classes).",
        _NET,
        choices=tuple(BACKBONES),
        shown="conv4 for images, discriminant for an .npz of features, else mlp",
    )
    channels: int | None = setting(
        None,
        "Channels of conv4, or of resnet12's first block.",
        _NET,
        least=1,
        shown="32; resnet12 64",
    )
    hidden: str | None = setting(
        None,
        "Widths of mlp's hidden layers, comma-separated.",
        _NET,
        shown="40,40",
        check=_widths,
    )
    norm: str | None = setting(
        None, "Normalization of conv4 and resnet12: batch, group or none.", _NET,
        choices=("batch", "group", "none"), shown="batch",
    )  # fmt: skip

    # --- method
    method: str = setting(
        "ibaml", "ibaml, abml, imaml, maml, fomaml, reptile: see `ibaml methods`.", _METHOD,
        choices=METHODS,
    )  # fmt: skip
    adapt: str | None = setting(
        None, "Which weights a task adapts: all, head (the last layer), last (that and the last "
        "block of layers), or a name pattern.",
        _METHOD, shown="head for ibaml and imaml, else all",
    )  # fmt: skip
    tie_head: bool = setting(
        False, "Share one prior row among all classes, for any number of classes.", _METHOD,
        shown="yes for posterior full, else no",
    )  # fmt: skip
    posterior: str | None = setting(
        None, "What is believed about the adapted weights: full (any covariance, of a linear head, "
        "in closed form), diagonal (the paper's), low_rank, class_means (of model discriminant); "
        "to compare with: point, prototypes (ProtoNet), ridge (R2-D2), gp.",
        _METHOD, choices=POSTERIORS,
        only=READ_BY["posterior"],
        shown="full for a head, unless an option of the others is given; else diagonal",
    )  # fmt: skip
    solver: str | None = setting(
        None, "newton (converges in a few steps), descent (takes exactly K), natural, adam; "
        "of a head: dual (posterior full) or head (noise on outputs).", _METHOD, choices=SOLVERS,
        shown="dual, head or newton for an implicit head, polyak for labels, else descent",
    )  # fmt: skip
    steps: int | None = setting(
        None, "K, steps of adaptation; of solver dual at most so many.", _METHOD, least=0,
        shown="newton 8, dual 40, head 16, descent with stopping auto 15, else 5",
    )  # fmt: skip
    inner_lr: float | None = setting(
        None, "α, the step size of adaptation (newton has none).", _METHOD, above=0,
        shown="0.1 for a head, or if it reads at most 128 features, else 0.03; the longest step of "
        "polyak 0.3, else 0.1 or (maml, abml, fomaml) 0.03; in regression "
        "0.1·σ²; adam 0.01",
    )  # fmt: skip
    learn_inner_lr: bool | None = setting(
        None, "Meta-learn α, one for each weight tensor.", _METHOD, only=UNROLLED, shown="no"
    )
    cg_steps: int | None = setting(
        None, "L, conjugate-gradient steps of the implicit gradient.", _METHOD, least=1,
        only=IMPLICIT, shown="as many as it takes, up to 64",
    )  # fmt: skip
    curvature: str | None = setting(
        None, "H: ggn (never indefinite), energy (exact) or lemma (the paper's).", _METHOD,
        choices=CURVATURES, only=IMPLICIT, shown="energy where stopping is auto, else ggn",
    )  # fmt: skip
    damping: float | None = setting(
        None,
        "μ, added to H, relative to the prior's precision.",
        _METHOD,
        least=0,
        only=IMPLICIT,
        shown="0",
    )
    block: str | None = setting(
        None, "all, or mean: the loss's curvature for the means only.", _METHOD,
        choices=("all", "mean"), only=("ibaml",), shown="mean where stopping is auto, else all",
    )  # fmt: skip
    stopping: str | None = setting(
        None, "Whether the implicit gradient knows that descent was stopped early, after K steps: "
        "auto, off, or the precision δ of the start instead of 1/(αK).", _METHOD, only=IMPLICIT,
        shown="auto for descent, unless a curvature is given; else off",
    )  # fmt: skip
    samples: int | None = setting(
        None,
        "S, Monte-Carlo samples (or points) of the energy.",
        _METHOD,
        least=1,
        only=GAUSSIAN,
        shown="4; noise on outputs 64",
    )
    noise: str | None = setting(
        None, "Noise on weights, independent or antithetic (in pairs ±ε), or on the outputs of a "
        "linear head, by fixed points.", _METHOD, choices=NOISE_KINDS, only=GAUSSIAN,
        shown="outputs for a diagonal head, else antithetic",
    )  # fmt: skip
    beta: float | None = setting(
        None, "β of the KL's weight β/N: 1 is Bayes, less tempers the posterior.", _METHOD, above=0,
        only=GAUSSIAN,
        shown="posterior full: lam (regression 1); 0.002 for a head, else 0.001 (regression 0.01)",
    )  # fmt: skip
    init_log_var: float | None = setting(
        None, "ρ, the prior's log-variance at the start.", _METHOD, least=-80, most=80,
        only=GAUSSIAN,
        shown="posterior full -5 (regression -1); -5 for a head, else -9 (regression -6)",
    )  # fmt: skip
    lam: float | None = setting(
        None, "λ, strength of the prior, for the mean nll: of iMAML's proximal term; for ibaml "
        "instead of β, so that κ = λ·exp(ρ).", _METHOD, above=0, only=READ_BY["lam"],
        shown="imaml 0.05; posterior full 0.3 (regression none)",
    )  # fmt: skip
    objective: str | None = setting(
        None, "The meta-loss: query (nll), predictive (nll of the averaged prediction) or abml.",
        _METHOD, choices=OBJECTIVES,
        only=READ_BY["objective"], shown="query; posterior full predictive; abml: abml",
    )  # fmt: skip
    temperature: str | None = setting(
        None, "t of predictions softmax(t·z), not of adaptation: learned with the prior, fitted "
        "on validation tasks, both, or a number.", _METHOD,
        shown="learned for many training classes, else fitted",
    )  # fmt: skip
    noise_std: float | None = setting(
        None, "σ, noise of the observations (regression).", _METHOD, above=0, shown="0.3"
    )
    learn_noise: bool | None = setting(
        None, "Meta-learn σ (regression).", _METHOD, shown="yes; reptile no"
    )

    # --- meta-training
    pretrain: int = setting(
        0, "Before the first iteration, train the network as a plain classifier of all training "
        "classes in so many passes over their examples; its last layer is thrown away.", _OUTER,
        least=0,
    )  # fmt: skip
    label_smoothing: float | None = setting(
        None, "Pre-training: the share of every label that is spread over all classes.", _OUTER,
        least=0, most=1, shown="0.1",
    )  # fmt: skip
    iterations: int = setting(
        2000,
        "Number of meta-iterations.",
        _OUTER,
        least=0,
        shown="for 16000 tasks (regression 32000), so 2000; model discriminant 0",
    )
    tasks: int = setting(
        8, "Tasks per meta-iteration, over all processes.", _OUTER, least=1,
        shown="8; regression 16",
    )  # fmt: skip
    micro_batch: int | None = setting(
        None, "Tasks in memory at once; does not change the result.", _OUTER, least=1,
        shown="as many as fit",
    )  # fmt: skip
    optimizer: str = setting(
        "adam", "Optimizer: adam, adamw, sgd, rmsprop, radam, nadam, adagrad.", _OUTER,
        choices=("adam", "adamw", "sgd", "rmsprop", "radam", "nadam", "adagrad"),
    )  # fmt: skip
    meta_lr: float | None = setting(
        None, "Step size of the optimizer.", _OUTER, above=0, shown="0.01 for a head, else 0.003"
    )
    momentum: float | None = setting(
        None, "Momentum of sgd and rmsprop.", _OUTER, least=0, shown="0"
    )
    weight_decay: float = setting(0.0, "Weight decay.", _OUTER, least=0)
    schedule: str = setting(
        "cosine", "How the step size falls: constant, linear or cosine.", _OUTER,
        choices=("constant", "linear", "cosine"),
    )  # fmt: skip
    warmup: int = setting(
        0, "Iterations at the start in which the step size rises.", _OUTER, least=0
    )
    clip: float = setting(10.0, "Clip the meta-gradient to this norm.", _OUTER, above=0)
    ema: float | None = setting(
        None, "Average the meta-parameters with this decay, e.g. 0.99.", _OUTER, above=0, most=1,
        shown="off",
    )  # fmt: skip

    # --- run
    seed: int = setting(
        0, "Seed of the initial weights, the tasks and the noise.", _RUN, least=0, most=2**63 - 1
    )
    device: str = setting("auto", "Device: auto, cpu, cuda or cuda:N.", _RUN)
    dtype: str = setting(
        "float32", "Number format: float32 or float64.", _RUN, choices=("float32", "float64")
    )
    threads: int | None = setting(
        None, "CPU threads per process.", _RUN, least=1, most=1024, shown="torch's"
    )
    execution: str = setting(
        "auto", "How tasks run at once: auto, loop (the reference), single, vmap, fold or head.",
        _RUN, choices=EXECUTIONS,
    )  # fmt: skip
    precision: str = setting(
        "full", "Activations: full, or bfloat16 where tasks are folded (GPU).", _RUN,
        choices=PRECISIONS,
    )  # fmt: skip
    capture: bool = setting(True, "Record meta-steps as CUDA graphs (GPU).", _RUN)
    val_every: int = setting(
        200, "Validate every so many iterations; 0: never.", _RUN, least=0, shown=_TENTH
    )
    val_tasks: int = setting(100, "Number of validation tasks.", _RUN, least=1)
    checkpoint_every: int = setting(
        200, "Save every so many iterations.", _RUN, least=1, shown=_TENTH
    )
    keep: int = setting(3, "Checkpoints to keep, besides the best.", _RUN, least=1)
    log_every: int = setting(
        20, "Log every so many iterations.", _RUN, least=1, shown="20; with other tasks likewise"
    )
    tensorboard: bool = setting(True, "Write TensorBoard files.", _RUN)
    patience: int = setting(
        20, "Stop after this many faulty iterations in a row (diverged tasks, gradients that are "
        "not finite).", _RUN, least=1,
    )  # fmt: skip

    @property
    def regression(self) -> bool:
        return self.ways is None


FIELDS = fields_of(Settings)


def read_toml(path: Path) -> dict[str, Any]:
    """Settings of a TOML file, the names as on the command line, with dashes or underscores."""
    return fields.read_toml(path, Settings)
