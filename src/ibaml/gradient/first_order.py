"""Which rules need no second derivative? First order (FOMAML), and Reptile's direction."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ibaml.energy import Energy, detached
from ibaml.gradient.base import Record
from ibaml.solve import Solver


@dataclass(frozen=True)
class FirstOrder:
    """Take ∂v̂/∂(prior) = I: the prior receives the gradient at the solution. Shared weights
    receive the direct gradient of the meta-loss."""

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
        solution = solver.solve(detached(energy), start.detach(), rate=rate, examine=examine)
        record.solution = solution
        # the value is exactly the solution's, the gradient goes to the start
        return solution.value + (start - start.detach())


@dataclass(frozen=True)
class Reptile:
    """Move the prior towards the solution: the meta-gradient is start − v̂. There is no other
    meta-loss; the learner's loss ½‖start − v̂‖² has this gradient."""

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
        solution = solver.solve(detached(energy), start.detach(), rate=rate, examine=examine)
        record.solution = solution
        return solution.value
