"""ibaml itself, as a user calls it; its running statistics are kept up to date."""

from __future__ import annotations

import copy
from typing import Any

from contenders.case import Case, Gradients, Step
from ibaml import MetaLearner, methods


def learner_for(case: Case, **extra: Any) -> MetaLearner:
    """The learner of the case, around a copy of its network."""
    options: dict[str, Any] = {
        "adapt": "all",
        "solver": "descent",
        "steps": case.steps,
        "lr": case.lr,
        "diagnose": False,
    }
    if case.method in ("imaml", "ibaml"):
        options |= {"cg_steps": case.cg_steps, "curvature": case.curvature, "damping": 0.0}
    if case.method == "imaml":
        options["lam"] = case.lam
    if case.method in ("abml", "ibaml"):
        options |= {"samples": case.samples, "noise": "independent"}
        options |= {"beta": 1.0, "init_log_var": case.log_var}
    return getattr(methods, case.method)(copy.deepcopy(case.net), **options, **extra)


def prepare(case: Case) -> Step:
    learner = learner_for(case)
    names = {name: _plain(name) for name, _ in learner.named_parameters()}

    def step() -> Gradients:
        learner.zero_grad()
        learner(case.batch, case.generator()).backward()
        return {names[n]: p.grad for n, p in learner.named_parameters() if p.grad is not None}

    return step


def _plain(name: str) -> str:
    """model.a.weight as a.weight, log_var.a/weight as log_var.a.weight."""
    return name.removeprefix("model.").replace("/", ".")
