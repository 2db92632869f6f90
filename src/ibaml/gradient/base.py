"""What is a gradient rule? It solves the tasks and makes the solution differentiable in θ."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from ibaml.energy import Energy
from ibaml.linalg import LinearSolution
from ibaml.solve import Solution, Solver


@dataclass
class Record:
    """What happened in a solve, and, after ``backward()``, in the linear solve behind it."""

    solution: Solution | None = None
    linear: LinearSolution | None = None


class GradientRule(Protocol):
    """How meta-parameters learn from a solution; independent of the choice of solver."""

    def __call__(
        self,
        energy: Energy,
        start: Tensor,
        solver: Solver,
        record: Record,
        *,
        rate: Tensor | None = None,
        examine: bool = True,
    ) -> Tensor:
        """The solution (T, dim) of the tasks, differentiable in θ by this rule.

        Args:
            start: the start (T, dim), with the graph that leads to the prior.
            record: receives what happened.
        """
