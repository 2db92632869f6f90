"""How is a learner adapted to new tasks? Their support sets in, their posteriors out."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ibaml.energy import detached
from ibaml.execution import NormStats
from ibaml.posterior import Posteriors
from ibaml.solve import DualNewton, before_examples

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
            run = learner._run.plain()  # without examples a faster strategy cannot be tried
            energy = learner.support(x, y, seed, keys, layout, plan, run=run)
            if learner.belief.in_dual:
                energy = replace(energy, answer=before_examples(energy, len(x)))
            v = learner.belief.start(energy.meta.prior, len(x))
        v = v.detach().clone()
        return Posteriors(energy, v, plan, seed, keys, learner.noise, watched, solution, learner)
