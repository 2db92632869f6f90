"""Is a solver right? Its solution, its record, and that tasks do not affect each other."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ibaml.energy import NoiseKind, TaskEnergy, detached
from ibaml.linalg import Reason
from ibaml.solve import Solver, energy_and_gradient
from ibaml.testing.base import TASKS, close, one_task, problem
from ibaml.weights import Belief, Point


class SolverSuite:
    """A subclass writes `make`.

    Attributes:
        tolerance: how far from the minimum `make(many)` may end, relative to the start's distance.
        few, many: a number of steps that is taken exactly, and one that reaches the minimum.
        noise: of the energies: ``"independent"``, or ``"outputs"`` for a solver of heads.
    """

    tolerance = 1e-4
    few = 3
    many = 3000
    noise: NoiseKind = "independent"

    def make(self, steps: int) -> Solver:
        """The solver with this many steps and no tolerance."""
        raise NotImplementedError

    def belief(self) -> Belief:
        """The belief whose energies are minimized."""
        return Point(lam=0.5)

    def minimum(self, energy: TaskEnergy, start: Tensor) -> Tensor:
        """By Newton's method with dense Hessians, each task on its own."""
        return torch.cat([_newton(one_task(energy, t), start[t : t + 1]) for t in range(TASKS)])

    def problem(self) -> tuple[TaskEnergy, Tensor]:
        energy, start = problem(self.belief(), self.noise)
        return detached(energy), start

    def test_it_reaches_the_minimum(self) -> None:
        energy, start = self.problem()
        solution = self.make(self.many).solve(energy, start)
        minimum = self.minimum(energy, start)
        distance = (minimum - start).norm(dim=-1)
        error = (solution.value - minimum).norm(dim=-1) / distance
        assert bool((error <= self.tolerance).all()), f"off by {error.tolist()} of the way"

    def test_it_says_what_happened(self) -> None:
        energy, start = self.problem()
        solver = self.make(self.few)
        solution = solver.solve(energy, start)
        assert solver.steps == self.few
        assert solution.steps.tolist() == [self.few] * TASKS
        assert solution.reason.tolist() == [int(Reason.STEPS)] * TASKS
        assert not solution.diverged.any()
        value, gradient = energy_and_gradient(energy, solution.value)
        before, _ = energy_and_gradient(energy, start)
        assert solution.energy_after is not None
        assert solution.gradient is not None
        close(solution.energy_before, before, "energy_before")
        close(solution.energy_after, value, "energy_after")
        close(solution.gradient, gradient, "the gradient where it ended")
        assert bool((value < before).all()), "the energy did not fall"

    def test_it_leaves_no_graph_and_no_trace(self) -> None:
        energy, _ = problem(self.belief(), self.noise)  # θ requires gradients
        start = self.belief().start(energy.meta.prior, TASKS).detach().requires_grad_()
        original = start.detach().clone()
        solution = self.make(self.few).solve(detached(energy), start.detach())
        assert not solution.value.requires_grad
        assert torch.equal(start, original), "it wrote into its start"

    def test_it_does_the_same_again(self) -> None:
        energy, start = self.problem()
        first, second = (self.make(self.few).solve(energy, start).value for _ in range(2))
        assert torch.equal(first, second)

    def test_no_steps_are_the_start(self) -> None:
        energy, start = self.problem()
        assert torch.equal(self.make(0).solve(energy, start).value, start)

    def test_a_task_does_not_depend_on_its_neighbors(self) -> None:
        energy, start = self.problem()
        together = self.make(self.few).solve(energy, start).value
        for t in range(TASKS):
            alone = self.make(self.few).solve(one_task(energy, t), start[t : t + 1]).value
            close(alone[0], together[t], "a task alone")

    def test_an_ill_task_spoils_no_other(self) -> None:
        energy, start = self.problem()
        x = energy.x.clone()
        x[1] = float("nan")
        healthy = self.make(self.few).solve(energy, start).value
        solution = self.make(self.few).solve(replace(energy, x=x), start)
        assert solution.diverged.tolist() == [False, True, False]
        assert torch.equal(solution.value[1], start[1]), "a task that diverged has its start"
        for t in (0, 2):
            close(solution.value[t], healthy[t], "a neighbor of an ill task")


def _newton(energy: TaskEnergy, v: Tensor) -> Tensor:
    """A minimum by damped Newton steps on dense Hessians."""
    for _ in range(200):
        value, gradient = energy_and_gradient(energy, v)
        if float(gradient.norm()) <= 1e-12:
            break
        hessian = torch.autograd.functional.hessian(lambda p: energy(p).sum(), v)
        hessian = hessian.reshape(v.numel(), v.numel())
        lowest = float(torch.linalg.eigvalsh(hessian).min())
        hessian = hessian + max(0.0, 1e-3 - lowest) * torch.eye(len(hessian), dtype=v.dtype)
        step = torch.linalg.solve(hessian, gradient[0])[None]
        for _ in range(40):
            if float(energy(v - step)) <= float(value):
                break
            step = step / 2
        v = (v - step).detach()
    return v
