"""Is a gradient rule right? Its gradient for every tensor of θ, compared with plain autograd."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ibaml.energy import TaskEnergy
from ibaml.gradient import GradientRule, Record
from ibaml.solve import GradientDescent, Solver
from ibaml.testing.base import TASKS, close, normal, one_task, problem
from ibaml.weights import Belief, DiagonalGaussian

Theta = tuple[Tensor, ...]


class GradientRuleSuite:
    """A subclass writes `make` and `dense`."""

    tolerance = 1e-8

    def make(self) -> GradientRule:
        raise NotImplementedError

    def dense(
        self, energy: TaskEnergy, start: Callable[[Theta], Tensor], b: Tensor
    ) -> list[Tensor]:
        """(∂v̂/∂θ)ᵀb by plain autograd and dense matrices, for the one task of the energy.

        Args:
            start: the start as a function of θ.
            b: the meta-loss's gradient in v̂, (1, dim).
        """
        raise NotImplementedError

    def solver(self) -> Solver:
        return GradientDescent(4, 0.1)

    def belief(self) -> Belief:
        return DiagonalGaussian()

    def pulled(self, tasks: slice = slice(None)) -> tuple[Tensor, list[Tensor], Record]:
        """v̂ of some of the tasks, (∂v̂/∂θ)ᵀb by the rule, and the record."""
        energy, _ = problem(self.belief())
        chosen = range(TASKS)[tasks]
        if len(chosen) == 1:
            energy = one_task(energy, chosen[0])
        theta = tuple(t.detach().requires_grad_() for t in energy.theta)
        energy = energy.bind(theta)
        start = self.belief().start(energy.meta.prior, len(chosen))
        record = Record()
        v = self.make()(energy, start, self.solver(), record)
        gradients = torch.autograd.grad(v, theta, self.cotangent()[tasks], allow_unused=True)
        return v.detach(), _filled(gradients, theta), record

    def cotangent(self) -> Tensor:
        return normal(TASKS, self.belief().dim(4), seed=30)

    def test_gradients_are_those_of_the_counterpart(self) -> None:
        energy, _ = problem(self.belief())
        for t in range(TASKS):
            one = one_task(energy, t)
            one = one.bind(tuple(x.detach() for x in one.theta))

            def start(theta: Theta, one: TaskEnergy = one) -> Tensor:
                return self.belief().start(one.bind(theta).meta.prior, 1)

            expected = self.dense(one, start, self.cotangent()[t : t + 1])
            _, gradients, _ = self.pulled(slice(t, t + 1))
            assert len(gradients) == len(expected)
            for i, (a, b) in enumerate(zip(gradients, expected, strict=True)):
                close(a, b, f"the gradient of tensor {i} of θ", self.tolerance)

    def test_the_value_is_the_solvers(self) -> None:
        energy, start = problem(self.belief())
        value, _, record = self.pulled()
        detached_energy = energy.bind(tuple(x.detach() for x in energy.theta))
        close(value, self.solver().solve(detached_energy, start).value, "the solution")
        assert record.solution is not None, "the record has no solution"
        assert not record.solution.value.requires_grad

    def test_gradients_add_up_over_tasks(self) -> None:
        _, together, _ = self.pulled()
        alone = [self.pulled(slice(t, t + 1))[1] for t in range(TASKS)]
        for i, actual in enumerate(together):
            close(actual, torch.stack([one[i] for one in alone]).sum(0), "the sum over tasks")

    def test_without_gradients_it_only_solves(self) -> None:
        energy, start = problem(self.belief())
        with torch.no_grad():
            v = self.make()(energy, start, self.solver(), Record())
        assert not v.requires_grad


def _filled(gradients: tuple[Tensor | None, ...], theta: Theta) -> list[Tensor]:
    return [torch.zeros_like(t) if g is None else g for g, t in zip(gradients, theta, strict=True)]
