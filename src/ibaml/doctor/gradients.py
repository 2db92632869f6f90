"""How good is the meta-gradient? Beside the unrolled one, and with its linear systems solved.

The reference differentiates through the same steps from the same start with the same noise
(`Unrolled`), in float64. A solver that has no steps to go through has no such reference; there the
loss itself is asked, by difference quotients of tasks that are solved again.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ibaml.gradient import Implicit, Reptile, Unrolled
from ibaml.gradient.implicit import enough_steps
from ibaml.learner import MetaLearner
from ibaml.linalg import Reason
from ibaml.solve import Descent
from ibaml.tasks import TaskBatch

SMALL = 20  # steps that are unrolled at most
_STEP = 1e-5  # of the difference quotient, relative to the size of the parameters


@dataclass(frozen=True)
class GradientFigures:
    """The meta-gradient of one batch of tasks, and what it is compared with.

    Attributes:
        steps: K of the comparison with the unrolled gradient; None if there is none, or if the
            steps cannot be unrolled here.
        partly: whether that is fewer steps than the solver takes: `SMALL` at most are unrolled.
        cosine, ratio: with and to the unrolled gradient, for ``"mean"`` (prior means and shared
            weights) and ``"log_var"``.
        slope: how fast the loss falls along the gradient, over what the gradient says, 1 if it is
            right; None where there are steps to unroll. (K steps of descent through ReLUs jump
            where one switches, so that there quotients say nothing.)
        norms: ‖∇E‖ at the solutions by block, medians over the tasks.
        residual: median relative residual of the linear systems; None if there are none.
        starved: the share of tasks whose system is unsolved because its steps ran out.
        error: how far the gradient is from the one with solved systems, relative to the latter.
    """

    steps: int | None
    partly: bool
    cosine: Mapping[str, float]
    ratio: Mapping[str, float]
    slope: float | None
    norms: Mapping[str, float]
    residual: float | None
    starved: float | None
    error: float | None


def gradient_figures(learner: MetaLearner, batch: TaskBatch) -> GradientFigures:
    """Measure the meta-gradient of this batch. The learner is not changed."""
    learner = _quiet(learner)
    own = meta_gradient(learner, batch)
    diagnostics = learner.diagnostics
    norms = {} if diagnostics.gradient_norm is None else diagnostics.gradient_norm
    linear = diagnostics.record.linear
    residual = starved = error = None
    if linear is not None and isinstance(learner.gradient, Implicit):
        residual = float(linear.residual.double().nanmedian())
        unsolved = diagnostics.unsolved
        assert unsolved is not None
        starved = float((unsolved & (linear.reason == Reason.STEPS)).double().mean())
        solved = learner.replace(
            gradient=replace(
                learner.gradient, linear_solver=enough_steps(bool(learner.gradient.stopping))
            )
        )
        error = _distance(own, meta_gradient(solved, batch))
    try:
        steps, cosine, ratio = compare_with_unrolled(learner, batch) or (None, {}, {})
    except RuntimeError:  # no memory for the steps, or no second derivatives: no comparison
        steps, cosine, ratio = None, {}, {}
    return GradientFigures(
        steps=steps,
        partly=steps is not None and steps < learner.solver.steps,
        cosine=cosine,
        ratio=ratio,
        slope=None if isinstance(learner.solver, Descent) else slope(learner, batch),
        norms={name: float(n.double().nanmedian()) for name, n in norms.items()},
        residual=residual,
        starved=starved,
        error=error,
    )


def compare_with_unrolled(
    learner: MetaLearner, batch: TaskBatch
) -> tuple[int, dict[str, float], dict[str, float]] | None:
    """K, and the cosine and the ratio of norms of the meta-gradient and the unrolled one by block;
    None for solvers without steps to unroll, and for Reptile, which has no meta-loss."""
    if not isinstance(learner.solver, Descent) or isinstance(learner.gradient, Reptile):
        return None
    steps = min(learner.solver.steps, SMALL)
    exact = _exact(learner).replace(solver=replace(learner.solver, steps=steps))
    batch = batch.to(torch.float64)
    ours = meta_gradient(exact, batch)
    theirs = meta_gradient(exact.replace(gradient=Unrolled(recompute=steps > 5)), batch)
    cosine, ratio = {}, {}
    for block in ("mean", "log_var"):
        a, b = _block(ours, block), _block(theirs, block)
        if a.numel() and float(b.norm()) > 0:
            cosine[block] = float(a @ b / (a.norm() * b.norm()).clamp(min=1e-300))
            ratio[block] = float(a.norm() / b.norm())
    return steps, cosine, ratio


def slope(learner: MetaLearner, batch: TaskBatch) -> float:
    """The difference quotient of the meta-loss along its gradient g, the tasks being solved again,
    over ‖g‖: 1 for the exact gradient of a smooth loss."""
    exact, batch = _exact(learner), batch.to(torch.float64)
    gradient = meta_gradient(exact, batch)
    parameters = dict(exact.named_parameters())
    size = torch.stack([p.detach().square().sum() for p in parameters.values()]).sum().sqrt()
    norm = torch.stack([g.square().sum() for g in gradient.values()]).sum().sqrt()
    reach = float(_STEP * size / norm.clamp(min=1e-300))
    losses = []
    for sign in (1, -2):
        with torch.no_grad():
            for name, p in parameters.items():
                p.add_(gradient[name], alpha=sign * reach)
        with torch.no_grad():
            losses.append(float(exact(batch, torch.Generator().manual_seed(0))))
    return (losses[0] - losses[1]) / (2 * reach * float(norm) ** 2) if float(norm) else 1.0


def meta_gradient(learner: MetaLearner, batch: TaskBatch) -> dict[str, Tensor]:
    """The meta-gradient by the name of the parameter, with the same noise at every call."""
    named = dict(learner.named_parameters())
    with torch.enable_grad():
        loss = learner(batch, torch.Generator().manual_seed(0))
        found = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    return {
        name: torch.zeros_like(p) if g is None else g.detach()
        for (name, p), g in zip(named.items(), found, strict=True)
    }


def _quiet(learner: MetaLearner) -> MetaLearner:
    """A copy that records no statistics and no graphs, but E and ∇E at its solutions."""
    return copy.deepcopy(learner).eval().replace(diagnose=True, capture=False)


def _exact(learner: MetaLearner) -> MetaLearner:
    return _quiet(learner).double().replace(precision="full", capture=False)


def _block(gradient: Mapping[str, Tensor], block: str) -> Tensor:
    parts = [
        g.reshape(-1)
        for name, g in gradient.items()
        if name.startswith("log_var.") == (block == "log_var")
    ]
    return torch.cat(parts) if parts else torch.zeros(0)


def _distance(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> float:
    squares: Any = sum(float((a[n] - b[n]).double().square().sum()) for n in b)
    size: Any = sum(float(b[n].double().square().sum()) for n in b)
    return float((squares / max(size, 1e-300)) ** 0.5)
