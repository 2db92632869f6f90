"""What does a linear solve return? The value and what happened, per task.

Vectors have the shape (..., n): the last dimension is the vector, the ones before it are
independent systems (tasks). A vector of shape (n,) is one system; a scalar has one unknown.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

import torch
from torch import Tensor

MatVec = Callable[[Tensor], Tensor]


class Reason(IntEnum):
    """Why an iterative routine stopped; stored per task as an integer tensor."""

    STEPS = 0  # it took all the steps it was given
    CONVERGED = 1  # the tolerance (or machine precision) was reached
    NEGATIVE_CURVATURE = 2  # the operator is not positive definite along a direction
    SINGULAR = 3  # the operator is singular to working precision
    NONFINITE = 4  # an infinity or a NaN appeared
    STALLED = 5  # no step made progress any more
    DIVERGED = 6  # the minimized function grew far too large

    @property
    def sentence(self) -> str:
        return {
            Reason.STEPS: "took all its steps",
            Reason.CONVERGED: "converged",
            Reason.NEGATIVE_CURVATURE: "stopped at negative curvature",
            Reason.SINGULAR: "met a singular operator",
            Reason.NONFINITE: "met a value that is not finite",
            Reason.STALLED: "made no further progress",
            Reason.DIVERGED: "diverged",
        }[self]


@dataclass(frozen=True)
class LinearSolution:
    """The solution of ``H u = b``: value, steps taken, ‖b − H u‖/‖b‖ and reason, per system."""

    value: Tensor
    steps: Tensor
    residual: Tensor
    reason: Tensor


class LinearSolver(Protocol):
    """Solve ``H u = b`` with products only.

    ``precondition`` maps r to about H⁻¹ r and is symmetric and positive definite (for a task: the
    inverse of the prior's precision). A solver may use it at every step, or only to begin.
    """

    def __call__(
        self, matvec: MatVec, b: Tensor, precondition: MatVec | None = None
    ) -> LinearSolution: ...


def dot(a: Tensor, b: Tensor) -> Tensor:
    """Inner product per system; its dimension is kept for broadcasting."""
    return (a * b).sum(-1, keepdim=True) if a.dim() else a * b


def norm(a: Tensor) -> Tensor:
    """Euclidean norm per system, scaled against overflow and underflow."""
    scale = a.abs().amax(-1, keepdim=True) if a.dim() else a.abs()
    scale = torch.where((scale > 0) & scale.isfinite(), scale, torch.ones_like(scale))
    return scale * dot(a / scale, a / scale).sqrt()


def per_system(a: Tensor) -> Tensor:
    """Drop the dimension that `dot` kept."""
    return a.squeeze(-1) if a.dim() else a


def relative_residual(r: Tensor, b: Tensor) -> Tensor:
    """‖r‖/‖b‖ per system; for b = 0 the absolute norm of r."""
    size = norm(b)
    return per_system(norm(r) / torch.where(size > 0, size, torch.ones_like(size)))


def all_done(active: Tensor) -> bool:
    """Whether no system (or task) is active any more. Always False while a CUDA graph is recorded:
    all steps are then taken, and masks keep finished systems as they are."""
    return not is_recorded(active) and not bool(active.any())


def is_recorded(t: Tensor) -> bool:
    """Whether a CUDA graph is being recorded, so that no value may be read on the host."""
    return t.is_cuda and torch.cuda.is_current_stream_capturing()
