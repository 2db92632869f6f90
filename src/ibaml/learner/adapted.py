"""How is a learner adapted to new tasks? Their support sets in, their posteriors out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ibaml.energy import detached
from ibaml.execution import NormStats, Runner
from ibaml.posterior import Posteriors
from ibaml.solve import DualNewton, before_examples
from ibaml.weights import Layout

if TYPE_CHECKING:
    from ibaml.learner.meta_learner import MetaLearner


def adapted(
    learner: MetaLearner,
    x: Tensor,
    y: Tensor,
    seed: int,
    keys: tuple[int, ...],
    classes: int | None,
    norm_stats: NormStats | None,
) -> Posteriors:
    """The posteriors of tasks with support inputs x (T, N, …) and targets y, N = 0 included."""
    with torch.inference_mode(False), torch.no_grad():
        learner.model.eval()
        plan = learner.norm_plan(norm_stats)
        watched = learner.watched()
        x, y = x.clone(), y.clone()
        classes_seen = None if y.is_floating_point() or y.shape[1] == 0 else int(y.max()) + 1
        if learner.layout.rows and classes is None:
            if classes_seen is None:
                raise ValueError(
                    "a tied head needs to know the number of classes: give labels, or classes="
                )
            classes = classes_seen
        layout = learner.layout.for_classes(classes or 0)
        solution = None
        if x.shape[1]:
            run = learner._kinds.runner(learner, x, y, classes_seen, layout, plan)
            energy = learner.support(x, y, seed, keys, layout, plan, run=run)
            if isinstance(learner.solver, DualNewton):
                answer, solution = learner.solver.posterior(energy, examine=learner.diagnose)
                energy = replace(energy, answer=answer)
            else:
                start = learner.belief.start(energy.meta.prior, len(x))
                rate = learner.step_size(layout)
                solution = learner.solver.solve(
                    detached(energy), start, rate=rate, examine=learner.diagnose
                )
            v = solution.value
        else:  # no examples: nothing to solve, and no support statistics
            plan = {n: "running" if k == "support" else k for n, k in plan.items()}
            x, y = (t.new_zeros((len(t), 1, *t.shape[2:])) for t in (x, y))
            run = _run_without_examples(learner, x, y, layout, plan)
            energy = learner.support(x, y, seed, keys, layout, plan, run=run)
            if learner.belief.in_dual:
                energy = replace(energy, answer=before_examples(energy, len(x)))
            v = learner.belief.start(energy.meta.prior, len(x))
        v = v.detach().clone()
        return Posteriors(energy, v, plan, seed, keys, learner.noise, watched, solution, learner)


def _run_without_examples(
    learner: MetaLearner, x: Tensor, y: Tensor, layout: Layout, plan: Mapping[str, NormStats]
) -> Runner:
    """How weight sets run where there is nothing to try it with: a head is tried with any numbers,
    for its outputs are Gaussian if it runs by itself."""
    if not learner.adapts_head or not x.is_floating_point():
        return learner._run.plain()
    anything = torch.linspace(-1, 1, x[0].numel(), dtype=x.dtype, device=x.device).view_as(x[:1])
    return learner._kinds.settle(learner, anything, y[:1], layout, plan)
