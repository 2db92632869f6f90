"""Which words may a person type? The names of methods, solvers and the other choices.

Nothing here needs torch, so that --help is fast.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

METHODS = ("ibaml", "abml", "imaml", "maml", "fomaml", "reptile")
GAUSSIAN = ("ibaml", "abml")
IMPLICIT = ("ibaml", "imaml")
UNROLLED = ("abml", "maml")
# which methods read an option; all methods read the options that are not listed
READ_BY: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("samples", "noise", "beta", "learn_beta", "init_log_var", "belief"), GAUSSIAN),
    **dict.fromkeys(("cg_steps", "curvature", "damping", "stopping"), IMPLICIT),
    "block": ("ibaml",),
    "lam": ("imaml", "ibaml"),
    "posterior": ("ibaml",),
    "objective": ("ibaml", "abml", "imaml", "maml", "fomaml"),
}


@dataclass(frozen=True)
class Backbone:
    """A backbone that may be named: `ibaml.nn.NAME.for_inputs` builds it.

    Attributes:
        images: whether it reads images alone.
        reads: the settings it reads, with their defaults.
    """

    images: bool
    reads: Mapping[str, Any]


BACKBONES: Mapping[str, Backbone] = {
    "conv4": Backbone(images=True, reads={"channels": 32, "norm": "batch"}),
    "resnet12": Backbone(images=True, reads={"channels": 64, "norm": "batch"}),
    "mlp": Backbone(images=False, reads={"hidden": "40,40"}),
    "discriminant": Backbone(images=False, reads={}),
}

# networks with weights, for embeddings; the first is the default (benchmarks/backbones.py)
PRETRAINED = ("efficientnet_lite2", "efficientnet_lite0")
SolverName = Literal["newton", "descent", "polyak", "natural", "adam", "dual", "head"]
SOLVERS: tuple[SolverName, ...] = (
    "newton", "descent", "polyak", "natural", "adam", "dual", "head",
)  # fmt: skip
DESCENTS: tuple[SolverName, ...] = ("descent", "polyak", "natural")  # with a step size α
ObjectiveName = Literal["query", "predictive", "abml"]
OBJECTIVES: tuple[ObjectiveName, ...] = ("query", "predictive", "abml")
SimpleHeadName = Literal["point", "prototypes", "ridge", "gp"]
SIMPLE_HEADS: tuple[SimpleHeadName, ...] = ("point", "prototypes", "ridge", "gp")
PosteriorName = Literal["diagonal", "low_rank", "full", "class_means"] | SimpleHeadName
POSTERIORS: tuple[PosteriorName, ...] = (
    "diagonal", "low_rank", "full", "class_means", *SIMPLE_HEADS,
)  # fmt: skip
IN_CLOSED_FORM: tuple[PosteriorName, ...] = ("full", "class_means", *SIMPLE_HEADS)  # linear heads
WITHOUT_PRIOR: tuple[PosteriorName, ...] = ("class_means", "prototypes")  # that is given
# how a posterior is computed that is not full; one of them, given, selects the diagonal one
NOT_OF_FULL = (
    "samples", "noise", "cg_steps", "curvature", "damping", "block", "stopping", "solver", "steps",
    "inner_lr",
)  # fmt: skip
Inference = Literal["laplace", "variational"]
INFERENCES: tuple[Inference, ...] = ("laplace", "variational")
NoiseKind = Literal["independent", "antithetic", "outputs"]
NOISE_KINDS: tuple[NoiseKind, ...] = ("independent", "antithetic", "outputs")
CurvatureKind = Literal["energy", "ggn", "lemma"]
CURVATURES: tuple[CurvatureKind, ...] = ("energy", "ggn", "lemma")
StoppingWord = Literal["auto", "off"]
STOPPINGS: tuple[StoppingWord, ...] = ("auto", "off")
NormStats = Literal["batch", "support", "running"]
NORM_STATS: tuple[NormStats, ...] = ("batch", "support", "running")
Execution = Literal["auto", "loop", "single", "vmap", "fold", "head"]
EXECUTIONS: tuple[Execution, ...] = ("auto", "loop", "single", "vmap", "fold", "head")
Precision = Literal["full", "bfloat16"]
PRECISIONS: tuple[Precision, ...] = ("full", "bfloat16")
