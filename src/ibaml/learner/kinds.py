"""What does a learner know about each kind of tasks? How to run the network on it, and that the
model fits it.

A kind is a shape, a dtype, a device and a number of classes. The first batch of a kind is checked;
later ones are not.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ibaml.checks import check_tasks, not_linear
from ibaml.energy import TaskEnergy, detached
from ibaml.execution import NormStats, Runner, choose
from ibaml.second_derivatives import check_second_derivatives
from ibaml.trial import settle
from ibaml.weights import Layout

if TYPE_CHECKING:
    from ibaml.learner.meta_learner import MetaLearner

Kind = tuple[Any, ...]


class Kinds:
    """The kinds of tasks that one learner has seen, and the warnings it has given."""

    def __init__(self) -> None:
        self._runners: dict[Kind, Runner] = {}
        self._differentiable: set[Kind] = set()
        self._warned: set[str] = set()

    def copy(self) -> Kinds:
        """A copy, made in one operation because other threads may add kinds meanwhile."""
        made = Kinds()
        made._runners = self._runners.copy()
        made._differentiable = self._differentiable.copy()
        made._warned = self._warned.copy()
        return made

    @torch.no_grad()
    def runner(
        self,
        learner: MetaLearner,
        x: Tensor,
        y: Tensor,
        classes: int | None,
        layout: Layout,
        plan: Mapping[str, NormStats] | None = None,
        *,
        differentiated: bool = False,
    ) -> Runner:
        """How weight sets run for these tasks. The first tasks of a kind are checked: the model
        must accept them, its outputs must fit the targets and, with ``differentiated``, it must
        have the second derivatives that the gradient rule needs. A problem raises or warns."""
        like = learner.reference
        described = [(t.shape[1:], t.dtype, t.device) for t in (x, y)]
        kind = (like.dtype, like.device, *described, classes, str(plan))
        runner = self._runners.get(kind)
        if runner is None:
            runner = self.settle(learner, x, y, layout, plan)
            energy, start = _trial(learner, x[:1], y[:1], 1, layout, plan, runner)
            check_tasks(energy, start, classes, learner.solver, learner.adapts_head)
            if problem := not_linear(learner.belief, learner.noise, runner.linear):
                self.warn(problem)
            self._runners[kind] = runner
        if differentiated and kind not in self._differentiable and not learner.belief.in_dual:
            energy, start = _trial(learner, x[:1], y[:1], 1, layout, plan, runner)
            if problem := check_second_derivatives(detached(energy), start, learner.gradient):
                self.warn(problem)
            self._differentiable.add(kind)
        return runner

    def settle(
        self,
        learner: MetaLearner,
        x: Tensor,
        y: Tensor,
        layout: Layout,
        plan: Mapping[str, NormStats] | None = None,
    ) -> Runner:
        """How weight sets run for these tasks, found by a trial with two tasks and two samples."""
        chosen = choose(
            learner.model,
            learner.execution,
            learner.roles.adapted,
            x.device.type,
            learner.precision,
            math.prod(x.shape[1:]),
        )
        two_tasks = torch.cat([x[:1], x[-1:]]), torch.cat([y[:1], y[-1:]])
        energy, start = _trial(learner, *two_tasks, 2, layout, plan, chosen)
        settled, set_aside = settle(energy, start, chosen, learner.execution)
        if set_aside:
            self.warn(
                f"{set_aside} for this model and these inputs, so a slower strategy is used "
                f'({settled.strategy}; execution="loop" skips the trial)'
            )
        try:
            linear = replace(energy, run=settled).is_linear_head
        except Exception:
            linear = False  # `check_tasks` says what is wrong with the model
        return replace(settled, linear=linear)

    def warn(self, sentence: str) -> None:
        """Give a warning, once per learner."""
        if sentence not in self._warned:
            warnings.warn(sentence, RuntimeWarning, stacklevel=6)
            self._warned.add(sentence)


def _trial(
    learner: MetaLearner,
    x: Tensor,
    y: Tensor,
    samples: int,
    layout: Layout,
    plan: Mapping[str, NormStats] | None,
    runner: Runner,
) -> tuple[TaskEnergy, Tensor]:
    """The energy of a few tasks, and the solver's starting point."""
    noise = learner.draw(0, tuple(range(len(x))), layout, samples)
    energy = learner.energy(x, y, noise, layout, plan, runner)
    return energy, learner.belief.start(energy.meta.prior, len(x))
