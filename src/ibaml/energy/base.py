"""What a solver and a gradient rule need to know of an energy: a function of v, with θ inside."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol, Self, TypeVar

from torch import Tensor

from ibaml.weights import Precision, Slot

EnergyT = TypeVar("EnergyT", bound="Energy")


class Energy(Protocol):
    """E(v, θ) = loss + penalty, per task: v is (T, dim), every value (T,).

    ``theta`` are the tensors meta-learned through the energy; ``bind`` returns the same energy with
    others in their place.
    """

    @property
    def theta(self) -> tuple[Tensor, ...]: ...

    @property
    def slots(self) -> tuple[Slot, ...]: ...

    def bind(self, theta: tuple[Tensor, ...]) -> Self: ...

    def resample(self, step: int) -> Self:
        """The energy with noise of its own for this step (itself where there is none)."""

    def __call__(self, v: Tensor) -> Tensor: ...

    def loss(self, v: Tensor) -> Tensor:
        """The part of the energy whose curvature is taken by products."""

    def penalty(self, v: Tensor) -> Tensor:
        """The rest of the energy."""

    def precision(self, v: Tensor) -> Precision | None:
        """P, the Hessian of the penalty, as an operator; None where there is no penalty."""

    @property
    def penalized(self) -> frozenset[int]:
        """Positions in ``theta`` of what enters the penalty alone."""

    def penalty_gradient(self, v: Tensor, u: Tensor, wanted: Collection[int]) -> dict[int, Tensor]:
        """−(∂²penalty/∂v∂θ)ᵀu of the wanted positions that the penalty depends on."""


def detached(energy: EnergyT) -> EnergyT:
    """The energy as a function of v alone: nothing flows into θ."""
    return energy.bind(tuple(t.detach() for t in energy.theta))
