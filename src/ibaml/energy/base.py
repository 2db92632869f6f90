"""What do solvers and gradient rules need to know about an energy? A function of v that holds θ."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol, Self, TypeVar

from torch import Tensor

from ibaml.weights import Precision, Slot

EnergyT = TypeVar("EnergyT", bound="Energy")


class Energy(Protocol):
    """E(v, θ) = loss + penalty, per task: v is (T, dim), every value (T,).

    ``theta`` are the tensors that are meta-learned through the energy; ``bind`` returns the same
    energy with other tensors in their place.
    """

    @property
    def theta(self) -> tuple[Tensor, ...]: ...

    @property
    def slots(self) -> tuple[Slot, ...]: ...

    @property
    def lowest(self) -> Tensor | float | None:
        """A number that no value falls below; None if none is known."""

    def bind(self, theta: tuple[Tensor, ...]) -> Self: ...

    def resample(self, step: int) -> Self:
        """The energy with new noise for this step (itself if it has no noise)."""

    def __call__(self, v: Tensor) -> Tensor: ...

    def loss(self, v: Tensor) -> Tensor:
        """The part of the energy whose curvature is computed by products."""

    def penalty(self, v: Tensor) -> Tensor:
        """The rest of the energy."""

    def precision(self, v: Tensor) -> Precision | None:
        """P, the Hessian of the penalty, as an operator; None if there is no penalty."""

    @property
    def penalized(self) -> frozenset[int]:
        """Positions in ``theta`` of the tensors that only the penalty depends on."""

    def penalty_gradient(self, v: Tensor, u: Tensor, wanted: Collection[int]) -> dict[int, Tensor]:
        """−(∂²penalty/∂v∂θ)ᵀu for those wanted positions that the penalty depends on."""


def detached(energy: EnergyT) -> EnergyT:
    """The energy as a function of v alone: no gradient flows into θ."""
    return energy.bind(tuple(t.detach() for t in energy.theta))
