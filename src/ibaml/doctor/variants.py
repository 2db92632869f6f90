"""Which learner is like this one, but for one setting? Its weights stay; nothing is trained."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from typing import Any

import torch

from ibaml.learner import MetaLearner
from ibaml.solve import Descent
from ibaml.weights import ClassMeans, DiagonalGaussian, FullGaussian, Point

MOST_STEPS = 64


def with_strength(learner: MetaLearner, factor: float) -> MetaLearner | None:
    """κ times a factor: β, or λ where that was given. None where no prior is in the energy."""
    belief = learner.belief
    if not belief.has_prior or isinstance(belief, ClassMeans):
        return None
    if learner.log_beta is not None:
        made = copy.deepcopy(learner)
        assert made.log_beta is not None
        with torch.no_grad():
            made.log_beta.add_(math.log(factor))
        return made
    if isinstance(belief, Point):
        return _believing(learner, replace(belief, lam=belief.lam * factor))
    if belief.kappa is not None:
        other: Any = belief
        return _believing(learner, replace(other, kappa=belief.kappa * factor))
    return learner.replace(beta=learner.beta * factor)


def with_spread(learner: MetaLearner, shift: float) -> MetaLearner | None:
    """ρ moved by ``shift`` at the same strength of the prior κ·exp(−ρ): only the noise changes."""
    if not isinstance(learner.belief, DiagonalGaussian | FullGaussian):
        return None
    made = copy.deepcopy(learner)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if name.startswith("log_var."):
                parameter.add_(shift)
    return with_strength(made, math.exp(shift))


def with_rate(learner: MetaLearner, factor: float) -> MetaLearner | None:
    """α times a factor. None for solvers that have no step size."""
    solver = learner.solver
    if not isinstance(solver, Descent):
        return None
    if solver.learn_lr:
        made = copy.deepcopy(learner)
        with torch.no_grad():
            for rate in made.log_lr.values():
                rate.add_(math.log(factor))
        return made
    rate = solver.lr
    scaled = (
        rate * factor if isinstance(rate, int | float) else {n: factor * r for n, r in rate.items()}
    )
    return learner.replace(solver=replace(solver, lr=scaled))


def with_steps(learner: MetaLearner, factor: int) -> MetaLearner | None:
    """K times a factor. None where nothing is solved in steps, and for more than `MOST_STEPS`
    unless the factor is 4 at most."""
    solver: Any = learner.solver
    steps = max(1, factor * solver.steps)
    if isinstance(learner.belief, ClassMeans) or (factor > 4 and steps > MOST_STEPS):
        return None
    return learner.replace(solver=replace(solver, steps=steps))


def _believing(learner: MetaLearner, belief: Any) -> MetaLearner:
    """The learner with a belief of the same kind, whose parameters are the same."""
    made = learner.replace()
    made.__dict__["belief"] = belief
    return made
