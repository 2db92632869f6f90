"""What every kind of belief about the weights can do, on flat vectors.

A belief is stateless mathematics. Its solution ``v`` is (T, dim): the blocks of every task side by
side. Its prior is a tuple of vectors (n,), one per block.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

Prior = tuple[Tensor, ...]


class Belief(Protocol):
    """What is believed about the weights: an object of these properties and functions."""

    @property
    def blocks(self) -> tuple[str, ...]:
        """Names of the blocks of v, each of n entries."""

    @property
    def stochastic(self) -> bool:
        """Whether a weight is a draw (and needs noise)."""

    @property
    def has_prior(self) -> bool:
        """Whether the prior appears in the energy (implicit differentiation needs it)."""

    def weight(self, beta: float, examples: int) -> float:
        """κ, the factor of the penalty in the energy."""

    def start(self, prior: Prior, tasks: int) -> Tensor:
        """The prior itself as the solution of every task, (T, dim)."""

    def sample(self, v: Tensor, noise: Tensor) -> Tensor:
        """Weights (T, S, n) from v (T, dim) and standard normal noise (T, S, n)."""

    def penalty(self, v: Tensor, prior: Prior) -> Tensor:
        """What the energy adds to the loss, before κ: (T,)."""

    def precision(self, v: Tensor, prior: Prior) -> Tensor:
        """The Hessian of the penalty in v, a diagonal (T, dim)."""

    def prior_product(self, v: Tensor, prior: Prior, u: Tensor) -> Prior:
        """−(∂²penalty/∂v∂prior)ᵀu summed over the tasks, in closed form."""

    def log_density(self, weights: Tensor, v: Tensor) -> Tensor:
        """log q(w; v) of weights (T, S, n), as (T, S)."""
