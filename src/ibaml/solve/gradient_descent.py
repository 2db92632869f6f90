"""How does gradient descent solve a task? Plain, with momentum, or by the natural rule for
log-variances."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ibaml.arguments import check_number
from ibaml.energy import Energy, TaskEnergy
from ibaml.solve.base import Descent, resolve_rate


@dataclass(frozen=True)
class GradientDescent(Descent):
    """v ← v − α∇E(v), K times: the paper's adaptation. With momentum μ (Nesterov's, as in
    `torch.optim.SGD`) a step costs the same and v goes further:

        c ← μc − α∇E(v),      v ← v + μc − α∇E(v)

    Args:
        momentum: μ in [0, 1); steps become up to 1/(1 − μ) times as long where ∇E keeps its
            direction, and α must stay below (2 + 2μ)/(1 + 2μ) over the largest curvature.

    >>> GradientDescent(steps=10, lr=0.1)
    GradientDescent(steps=10, lr=0.1, tol=None, learn_lr=False, fresh_noise=False, momentum=0.0)
    """

    momentum: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("momentum", self.momentum, least=0, below=1)

    def memory(self, v: Tensor) -> tuple[Tensor, ...]:
        return (torch.zeros_like(v),) if self.momentum else ()

    def move(
        self,
        energy: Energy,
        v: Tensor,
        gradient: Tensor,
        memory: tuple[Tensor, ...],
        step: int,
        rate: Tensor | float,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        plain = v - rate * gradient
        if not memory:
            return plain, ()
        change = self.momentum * memory[0] - rate * gradient
        return plain + self.momentum * change, (change,)

    def step_sizes(self, energy: Energy, v: Tensor, rate: Tensor | None = None) -> Tensor | float:
        """α; with momentum the mean way of a step under a constant gradient, over K steps."""
        sizes = resolve_rate(self.lr, energy.slots, v) if rate is None else rate.detach()
        mu, steps = self.momentum, max(self.steps, 1)
        return (
            sizes * (1 - mu**2 * (1 - mu**steps) / (steps * (1 - mu))) / (1 - mu) if mu else sizes
        )


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
