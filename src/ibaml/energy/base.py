"""What a solver and a gradient rule need to know of an energy: a function of v, with θ inside."""

from __future__ import annotations

from typing import Protocol, Self, TypeVar

from torch import Tensor

from ibaml.weights import Slot

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

    def precision(self, v: Tensor) -> Tensor | None:
        """P, the diagonal Hessian of the rest of the energy; None where there is no rest."""

    @property
    def closed(self) -> frozenset[int]:
        """Positions in ``theta`` that enter the rest alone, where the closed form is all of it."""

    def prior_gradient(self, v: Tensor, u: Tensor) -> dict[int, Tensor]:
        """The rest's −(∂²/∂v∂θ)ᵀu in closed form, by position in ``theta``."""


def detached(energy: EnergyT) -> EnergyT:
    """The energy as a function of v alone: nothing flows into θ."""
    return energy.bind(tuple(t.detach() for t in energy.theta))
