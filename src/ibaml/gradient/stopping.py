"""What does the implicit rule take for the start that a stopped descent remembers?

K steps of size α leave (I − αH)ᴷ of where they started. Put δ(H + δI)⁻¹ for that power, with
δ = 1/(αK), one over the sum of the step sizes. Then the start acts like a second prior of precision
δ, besides the one in E:

    (H + δI) u = b,      g = −(∂²E/∂v∂θ)ᵀ u + (∂start/∂θ)ᵀ (δu)

δ → 0 is the implicit rule, δ → ∞ is first order. Along an eigenvector of H with eigenvalue h and
s = αKh the power is replaced by 1/(1 + s): for −1 < s, αh ≤ 1 it is never too small, and too large
by s²/(1 + s) at most, and by 1/(1 + s) where h ≥ 0; never by more than 1/2, in the limit of many
small steps 0.204.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from ibaml.curvature import Linearization
from ibaml.energy import Energy
from ibaml.linalg import Reason
from ibaml.solve import Descent, Solution, Solver
from ibaml.weights import Preconditioner

Stopping = Literal["auto"] | float


def start_precision(
    stopping: Stopping | None, energy: Energy, solver: Solver, solution: Solution,
    rate: Tensor | None = None,
) -> Tensor | None:  # fmt: skip
    """δ of every task and coordinate, (T, dim); None if the tasks count as solved.

    ``"auto"`` reads the step sizes of descent and the steps it took; a task that reached ``tol``
    has δ = 0, and solvers other than descent converge.
    """
    v = solution.value
    if not stopping:
        return None
    if stopping != "auto":
        return v.new_full((1, 1), stopping).expand_as(v)
    if not isinstance(solver, Descent):
        return None
    path = solution.steps.to(v) if solution.path is None else solution.path
    # only a task that diverged at once took no step, and its b is zero
    path = torch.where(path > 0, path, 1.0)
    moved = solver.step_sizes(energy, v, rate) * path[:, None]
    solved = (solution.reason == Reason.CONVERGED)[:, None]
    return torch.where(solved, 0.0, moved.reciprocal()).expand_as(v)


@dataclass(frozen=True)
class Stopped:
    """H + δI in place of H, whose coordinates may be those of v on a scale of their own."""

    h: Linearization
    delta: Tensor  # (T, dim), in the coordinates of v

    @cached_property
    def shift(self) -> Tensor:
        """δ in the coordinates of H."""
        return self.h.to_coordinates(self.h.to_coordinates(self.delta))

    @cached_property
    def precondition(self) -> Preconditioner:
        """(P + δI)⁻¹ where P is diagonal, else 1/δ: descent that does not diverge has αH < 2, so
        that (H + δI)/δ is below 1 + 2K, whatever P is."""
        shift, inverse = self.shift, self.h.precondition
        if self.h.diagonal is not None:
            diagonal = self.h.diagonal + shift
            return lambda r: r / diagonal
        stopped = shift > 0
        safe = torch.where(stopped, shift, 1.0)
        solved = inverse or (lambda r: r)
        return lambda r: torch.where(stopped, r / safe, solved(r))

    def product(self, p: Tensor) -> Tensor:
        return self.h.product(p) + self.shift * p

    def start_gradient(self, u: Tensor) -> Tensor:
        """δu: what the start receives."""
        return self.delta * self.h.to_coordinates(u)
