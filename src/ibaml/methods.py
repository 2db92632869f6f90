"""Which recipe of the literature: every method is one row of choices, and this file is the table.

| method  | adapted weights           | energy               | differentiate           | meta-loss |
|---------|---------------------------|----------------------|-------------------------|-----------|
| maml    | point                     | nll                  | unrolled                | query nll |
| fomaml  | point                     | nll                  | first order             | query nll |
| reptile | point                     | nll                  | towards the solution    | –         |
| imaml   | point, isotropic prior λ  | nll + λ/2·‖w − θ‖²   | implicit                | query nll |
| abml    | diagonal Gaussian         | nll + κ·KL           | unrolled                | ABML's    |
| ibaml   | diagonal Gaussian         | nll + κ·KL           | implicit                | query nll |

Options common to all: ``steps`` (K) and ``lr`` (α) of gradient descent, or a ``solver`` object in
their place; ``gradient``, ``objective`` and ``likelihood`` objects; and what `MetaLearner` takes
(``adapt``, ``freeze``, ``tie_head``, ``execution``, …).
"""

from __future__ import annotations

import math
from difflib import get_close_matches
from typing import Any

from torch import nn

from ibaml.curvature import Block, Curvature, Kind
from ibaml.energy import NllFunction, NoiseKind
from ibaml.gradient import FirstOrder, GradientRule, Implicit, Reptile, Unrolled
from ibaml.learner import MetaLearner
from ibaml.linalg import ConjugateGradient
from ibaml.objectives import Abml, Objective
from ibaml.solve import GradientDescent, Rate, Solver
from ibaml.weights import DiagonalGaussian, Point


def maml(
    model: nn.Module,
    *,
    steps: int | None = None,
    lr: Rate | None = None,
    solver: Solver | None = None,
    gradient: GradientRule | None = None,
    objective: Objective | None = None,
    likelihood: NllFunction | None = None,
    **options: Any,
) -> MetaLearner:
    """Model-agnostic meta-learning (Finn et al., 2017): differentiate through K steps.

    >>> import ibaml
    >>> learner = ibaml.methods.maml(ibaml.nn.mlp(1, 1), steps=5, lr=0.01)
    """
    return MetaLearner(
        model,
        Point(),
        _solver(solver, steps, lr),
        gradient if gradient is not None else Unrolled(),
        objective,
        likelihood,
        **_known("maml", options),
    )


def fomaml(model: nn.Module, **options: Any) -> MetaLearner:
    """First-order MAML: the gradient at the solution, as if it were the prior's own.

    Options as for `maml`.
    """
    return maml(model, **{"gradient": FirstOrder(), **options})


def reptile(model: nn.Module, **options: Any) -> MetaLearner:
    """Reptile (Nichol et al., 2018): move the prior towards the solution of the support set.

    The loss is ½‖θ − v̂‖², whose gradient θ − v̂ is Reptile's direction. Options as for `maml`.
    """
    return maml(model, **{"gradient": Reptile(), **options})


def imaml(
    model: nn.Module,
    *,
    lam: float = 1.0,
    steps: int | None = None,
    lr: Rate | None = None,
    cg_steps: int | None = None,
    curvature: Kind | None = None,
    damping: float | None = None,
    solver: Solver | None = None,
    gradient: GradientRule | None = None,
    objective: Objective | None = None,
    likelihood: NllFunction | None = None,
    **options: Any,
) -> MetaLearner:
    """Implicit MAML (Rajeswaran et al., 2019): a proximal term λ/2·‖w − θ‖² and its implicit
    gradient.

    Args:
        lam: λ, on the mean nll.
        cg_steps: L, the steps of conjugate gradients (default: as many as it takes, up to 64).
        curvature: ``"energy"`` (default, exact) or ``"ggn"``.
    """
    if not 0 <= lam < math.inf:
        raise ValueError(f"lam must be a finite number, 0 or more; got {lam}")
    return MetaLearner(
        model,
        Point(lam=lam),
        _solver(solver, steps, lr),
        _implicit(gradient, cg_steps, curvature, damping, None, default="energy"),
        objective,
        likelihood,
        **_known("imaml", options),
    )


def abml(
    model: nn.Module,
    *,
    steps: int | None = None,
    lr: Rate | None = None,
    samples: int = 5,
    noise: NoiseKind = "independent",
    beta: float = 1.0,
    init_log_var: float = -6.0,
    solver: Solver | None = None,
    gradient: GradientRule | None = None,
    objective: Objective | None = None,
    likelihood: NllFunction | None = None,
    **options: Any,
) -> MetaLearner:
    """Amortized Bayesian meta-learning (Ravi & Beatson, 2019): a Gaussian posterior, unrolled."""
    return MetaLearner(
        model,
        DiagonalGaussian(),
        _solver(solver, steps, lr),
        gradient if gradient is not None else Unrolled(),
        objective if objective is not None else Abml(),
        likelihood,
        samples=samples,
        noise=noise,
        beta=beta,
        init_log_var=init_log_var,
        **_known("abml", options),
    )


def ibaml(
    model: nn.Module,
    *,
    steps: int | None = None,
    lr: Rate | None = None,
    cg_steps: int | None = None,
    curvature: Kind | None = None,
    damping: float | None = None,
    block: Block | None = None,
    samples: int = 5,
    noise: NoiseKind = "independent",
    beta: float = 1.0,
    init_log_var: float = -6.0,
    solver: Solver | None = None,
    gradient: GradientRule | None = None,
    objective: Objective | None = None,
    likelihood: NllFunction | None = None,
    **options: Any,
) -> MetaLearner:
    """Implicit Bayesian meta-learning (Zhang et al., 2023): a Gaussian posterior and its implicit
    meta-gradient, in time and memory that do not grow with K.

    Args:
        steps, lr: K steps of gradient descent with step size α (defaults 5, 0.01).
        cg_steps: L, the steps of conjugate gradients (default: as many as it takes, up to 64).
        curvature: ``"ggn"`` (default, safe), ``"energy"`` (exact) or ``"lemma"`` (the paper's).
        damping: μ, relative to the prior's precision (default 0).
        block: ``"all"`` (default) or ``"mean"``: curvature of the loss for the means alone.
        samples, noise, beta, init_log_var: of the energy, see `MetaLearner`.

    >>> import ibaml
    >>> learner = ibaml.methods.ibaml(ibaml.nn.conv4(5), steps=10, samples=5, adapt="head")
    """
    return MetaLearner(
        model,
        DiagonalGaussian(),
        _solver(solver, steps, lr),
        _implicit(gradient, cg_steps, curvature, damping, block, default="ggn"),
        objective,
        likelihood,
        samples=samples,
        noise=noise,
        beta=beta,
        init_log_var=init_log_var,
        **_known("ibaml", options),
    )


_COMMON = {"adapt", "freeze", "tie_head", "execution", "precision", "capture", "diagnose"}
_BAYES = {"samples", "noise", "beta", "init_log_var"}
_IMPLICIT = {
    "imaml": {"lam", "cg_steps", "curvature", "damping"},
    "ibaml": {"cg_steps", "curvature", "damping", "block"},
}


def _known(method: str, options: dict[str, Any]) -> dict[str, Any]:
    """Refuse an option nobody knows, by name; what concerns only Gaussian beliefs is accepted by
    every method, so that methods can be compared with one set of options."""
    known = _COMMON | _BAYES
    for name in options:
        if name not in known:
            own = {"steps", "lr", "solver", "gradient", "objective", "likelihood"}
            own |= _IMPLICIT.get(method, set())
            near = get_close_matches(name, sorted(known | own), n=1, cutoff=0.5)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise TypeError(
                f"{method} has no option {name!r}{hint} (it has {', '.join(sorted(known | own))})"
            )
    return options


def _solver(solver: Solver | None, steps: int | None, lr: Rate | None) -> Solver:
    if solver is None:
        return GradientDescent(5 if steps is None else steps, 0.01 if lr is None else lr)
    if steps is not None or lr is not None:
        raise ValueError("steps and lr belong to the solver: give them to it, or leave solver out")
    return solver


def _implicit(
    gradient: GradientRule | None,
    cg_steps: int | None,
    curvature: Kind | None,
    damping: float | None,
    block: Block | None,
    default: Kind,
) -> GradientRule:
    given = {
        "cg_steps": cg_steps,
        "curvature": curvature,
        "damping": damping,
        "block": block,
    }
    if gradient is not None:
        if named := [name for name, value in given.items() if value is not None]:
            raise ValueError(
                f"{' and '.join(named)} belong to the implicit rule: give them to gradient="
                "Implicit(...), or leave gradient out"
            )
        return gradient
    chosen = Curvature(
        default if curvature is None else curvature,
        0.0 if damping is None else damping,
        "all" if block is None else block,
    )
    return Implicit(chosen) if cg_steps is None else Implicit(chosen, ConjugateGradient(cg_steps))
