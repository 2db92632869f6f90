"""What explains an arm's result? Its tasks and its meta-gradient at the end of training.

How far tasks are from solved (‖∇E‖ at v̂ and at the prior, for each block), how well H u = b is
solved, how the meta-gradient compares with the first-order one of the same weights, tasks and
noise, and how much of the prior's draws is noise.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ibaml.gradient import FirstOrder
from ibaml.learner import MetaLearner
from ibaml.tasks import TaskBatch, TaskSource
from ibaml.tasks.keyed import has_tasks

_AT_ONCE = 4  # tasks in memory; results do not depend on it


def look_inside(learner: MetaLearner, source: TaskSource, tasks: int) -> dict[str, Any]:
    """Means over validation tasks (test tasks where there are none)."""
    split = "val" if has_tasks(source, "val") else "test"
    batches = [
        batch
        for begin in range(0, tasks, _AT_ONCE)
        for batch in source.batches(split, range(begin, min(begin + _AT_ONCE, tasks)))
    ]
    solver: Any = learner.solver
    first = _like(learner, gradient=FirstOrder())
    gradients, record = _gradients(_like(learner), batches)
    plain, _ = _gradients(first, batches)
    _, before = _gradients(_like(first, solver=replace(solver, steps=0)), batches)
    return {
        "split": split,
        "tasks": tasks,
        **record,
        "inner gradient at the prior": before["inner gradient"],
        "deviation over weights": _spread(learner, batches[0]),
        "against first order": {
            name: _compared(gradients[name], plain[name]) for name in gradients
        },
    }  # fmt: skip


def _like(learner: MetaLearner, **changes: Any) -> MetaLearner:
    # a recording does not pay off for a few calls
    return copy.deepcopy(learner).replace(capture=False, **changes)


def _gradients(
    learner: MetaLearner, batches: Sequence[TaskBatch]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The mean meta-gradient by group of meta-parameters, and what happened inside the tasks."""
    learner.zero_grad()
    inner: dict[str, list[float]] = {}
    energies: list[float] = []
    residuals: list[float] = []
    diverged = 0
    for batch in batches:
        loss = learner(batch, torch.Generator().manual_seed(0))
        count = int((~learner.diagnostics.left_out).sum())
        if count:
            (loss * count).backward()
        diagnostics = learner.diagnostics
        diverged += int(diagnostics.left_out.sum())
        for block, norms in (diagnostics.gradient_norm or {}).items():
            inner.setdefault(block, []).extend(norms.tolist())
        if diagnostics.energy_after is not None:
            energies += diagnostics.energy_after.tolist()
        if diagnostics.cg_residual is not None:
            residuals += diagnostics.cg_residual.tolist()
    return _grouped(learner), {
        "inner gradient": {block: _mean(values) for block, values in inner.items()},
        "energy": _mean(energies),
        "CG residual": _mean(residuals),
        "diverged": diverged,
    }


def _grouped(learner: MetaLearner) -> dict[str, Tensor]:
    """Gradients of the prior's means, its log-variances, shared weights; and of all."""
    groups: dict[str, list[Tensor]] = {}
    adapted = {f"model.{name}" for name in learner.roles.adapted}
    for name, parameter in learner.named_parameters():
        kind = "mean" if name in adapted or name.startswith("tied_mean") else "shared"
        kind = "log_var" if name.startswith("log_var") else kind
        gradient = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
        groups.setdefault(kind, []).append(gradient.detach().double().flatten())
    flat = {kind: torch.cat(parts) for kind, parts in groups.items()}
    return {"all": torch.cat(list(flat.values())), **flat}


def _spread(learner: MetaLearner, batch: TaskBatch) -> float | None:
    """The prior's deviation over the size of its means, both by root mean square, in matrices and
    kernels: where it is not small, a draw is noise more than network. None for a point."""
    x, y = batch.support_x[0, :0], batch.support_y[0, :0]
    prior = learner.adapt(x, y, classes=batch.classes)  # no examples
    names = [n for n, rho in prior.log_var.items() if rho.dim() > 1]
    if not names:
        return None
    variance = torch.cat([prior.log_var[n].exp().flatten() for n in names]).mean()
    size = torch.cat([prior.mean[n].square().flatten() for n in names]).mean()
    return _finite(float((variance / size).sqrt()))


def _compared(ours: Tensor, plain: Tensor) -> dict[str, float | None]:
    """The ratio of the norms, and the cosine."""
    a, b = float(ours.norm()), float(plain.norm())
    product = float(ours @ plain)
    return {
        "norm": _finite(a),
        "ratio": _finite(a / b) if b > 0 else None,
        "cosine": _finite(product / (a * b)) if a * b > 0 else None,
    }


def _mean(values: Sequence[float]) -> float | None:
    """Over those that are finite; None where none is."""
    finite = [v for v in values if math.isfinite(v)]
    return sum(finite) / len(finite) if finite else None


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
