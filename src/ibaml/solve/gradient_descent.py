"""How does gradient descent solve a task? Plain, or by the natural rule for log-variances."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ibaml.arguments import check_number
from ibaml.energy import Energy, TaskEnergy
from ibaml.solve.base import Descent, resolve_rate


@dataclass(frozen=True)
class GradientDescent(Descent):
    """v ← v − α∇E(v), K times: the paper's adaptation.

    >>> GradientDescent(steps=10, lr=0.1)
    GradientDescent(steps=10, lr=0.1, tol=None, learn_lr=False, fresh_noise=False)
    """

    def move(
        self,
        energy: Energy,
        v: Tensor,
        gradient: Tensor,
        memory: tuple[Tensor, ...],
        step: int,
        rate: Tensor | float,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        return v - rate * gradient, ()

    def step_sizes(self, energy: Energy, v: Tensor, rate: Tensor | None = None) -> Tensor | float:
        return resolve_rate(self.lr, energy.slots, v) if rate is None else rate.detach()


@dataclass(frozen=True)
class NaturalDescent(Descent):
    """Gradient descent for the means; the precisions of a diagonal Gaussian follow

        1/d_t ← (1 − η)/d_t + η·(1/d + 2∇_d ℓ/κ),

    whose fixed point is that of E. Plain descent moves log-variances too slowly ever to converge,
    because their curvature is only κ/2. In log-variances the rule is the one line below, since
    1/d + 2∇_d ℓ/κ = (1 + 2∇_ρ E/κ)/d_t.

    Args:
        eta: η in (0, 1]; smaller is more stable if the loss is far from quadratic.
        floor: a precision never falls by more than this factor in one step (Monte-Carlo noise can
            make the rule's target negative).
    """

    eta: float = 0.2
    floor: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("eta", self.eta, above=0, most=1)
        check_number("floor", self.floor, above=0, below=1)

    def move(
        self,
        energy: Energy,
        v: Tensor,
        gradient: Tensor,
        memory: tuple[Tensor, ...],
        step: int,
        rate: Tensor | float,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        if not isinstance(energy, TaskEnergy) or not energy.belief.is_diagonal_gaussian:
            raise ValueError("NaturalDescent needs a diagonal Gaussian belief (ibaml or abml)")
        plain = v - rate * gradient
        n = energy.layout.size
        change = 1 + (2 * self.eta / energy.kappa) * gradient[:, n:]
        return torch.cat([plain[:, :n], v[:, n:] - change.clamp(min=self.floor).log()], -1), ()

    def step_sizes(self, energy: Energy, v: Tensor, rate: Tensor | None = None) -> Tensor:
        """2η/κ for the log-variances, because log(1 + 2η∇_ρE/κ) is about 2η∇_ρE/κ."""
        assert isinstance(energy, TaskEnergy)
        own = resolve_rate(self.lr, energy.slots, v) if rate is None else rate.detach()
        sizes = torch.ones_like(v[0]) * own
        sizes[energy.layout.size :] = 2 * self.eta / energy.kappa
        return sizes
