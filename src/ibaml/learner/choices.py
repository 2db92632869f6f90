"""Which choices of a learner may be replaced while its weights stay, and which may not?"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ibaml.checks import check_model, check_options, check_running
from ibaml.gradient import GradientRule, Reptile
from ibaml.objectives import Objective, QueryNll, TowardsSolution, as_objective
from ibaml.solve import Descent

if TYPE_CHECKING:
    from ibaml.learner.meta_learner import MetaLearner

REPLACEABLE = (
    "solver", "gradient", "objective", "samples", "noise", "beta", "execution", "precision",
    "capture", "diagnose",
)  # fmt: skip
FIXED = (*REPLACEABLE, "belief", "likelihood", "roles", "layout", "adapts_head")


def default_objective(gradient: GradientRule) -> Objective:
    """The objective of a learner that was given none."""
    return TowardsSolution() if isinstance(gradient, Reptile) else QueryNll()


def fixed(name: str) -> AttributeError:
    """The error for code that sets an attribute of a finished learner."""
    remedy = (
        f"learner.replace({name}=…) returns a checked learner with another one that shares the "
        "weights"
        if name in REPLACEABLE
        else "the weights depend on it: make another learner"
    )
    return AttributeError(
        f"{name} is fixed when a learner is made, so that its choices fit together: {remedy}"
    )


def replaced(learner: MetaLearner, choices: Mapping[str, Any]) -> dict[str, Any]:
    """All replaceable choices of the learner, updated with ``choices`` and checked."""
    if unknown := [name for name in choices if name not in REPLACEABLE]:
        raise TypeError(
            f"{unknown[0]} cannot be replaced: only {', '.join(REPLACEABLE)} can (the rest is "
            "fixed with the weights: make another learner)"
        )
    if "beta" in choices and learner.log_beta is not None:
        raise ValueError("beta is learned here, as log_beta: set that parameter instead")
    if "beta" in choices and learner.belief.kappa is not None:
        raise ValueError(
            f"beta is not read here, where κ is {learner.belief.kappa:g} (lam was given, or "
            "recommended): make the learner with beta="
        )
    now = {name: choices.get(name, getattr(learner, name)) for name in REPLACEABLE}
    if isinstance(now["solver"], Descent) and now["solver"].learn_lr and not len(learner.log_lr):
        raise ValueError(
            "solver: a learned step size is a weight of its own, and this learner has none: "
            "make another learner with learn_lr=True"
        )
    if "objective" in choices:
        now["objective"] = as_objective(choices["objective"])
    elif isinstance(now["gradient"], Reptile) != isinstance(now["objective"], TowardsSolution):
        now["objective"] = None  # the new rule needs its own default objective
    if now["objective"] is None:
        now["objective"] = default_objective(now["gradient"])
    check_options(
        learner.belief,
        now["solver"],
        now["gradient"],
        now["objective"],
        learner.likelihood,
        now["samples"],
        now["noise"],
        now["beta"],
        0.0,
        learner.log_beta is not None,
    )
    check_running(now["execution"], now["precision"], now["capture"], now["diagnose"])
    check_model(learner.model, learner.roles, now["gradient"], bool(learner.layout.rows))
    now["samples"] = now["samples"] if learner.belief.stochastic else 1
    return now
