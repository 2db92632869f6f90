"""What a belief about the weights is: mathematics on flat vectors, and its prior's parameters.

A belief holds no tensors. The solution ``v`` of T tasks is (T, dim): the belief's blocks side by
side. Its prior is a tuple of vectors, the mean (n,) first, then those of `prior_parameters` in
their order. `ibaml.testing.BeliefSuite` tests a belief against dense matrices.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

import torch
from torch import Tensor

from ibaml.weights.precision import AutogradPrecision, Precision, Preconditioner

Prior = tuple[Tensor, ...]
Start = Mapping[str, Tensor] | Tensor  # a tensor for every weight, or one for all


class Belief(ABC):
    """A belief about n weights. A new one writes `blocks`, `prior_parameters`, `sample` and
    `penalty`; the rest has a default, by autograd where it is a derivative.

    Attributes:
        is_diagonal_gaussian: whether v is (m_t, ρ_t) of N(m_t, diag exp ρ_t) under the prior
            (m, ρ) of the same kind, which Lemma 1, `NaturalDescent` and ABML's hyper-prior are
            written for.
    """

    is_diagonal_gaussian = False

    # --- what every belief writes ----------------------------------------------------------------

    @abstractmethod
    def blocks(self, n: int) -> dict[str, int]:
        """The blocks of v by name, in order, each with its number of entries. ``"mean"`` is the
        first and has n. A block of n entries has one for every weight."""

    @abstractmethod
    def prior_parameters(
        self, means: Mapping[str, Tensor], init_log_var: float
    ) -> dict[str, Start]:
        """The starting values of the prior's parameters besides the mean, by name: a mapping with a
        tensor like the mean for every weight, or one tensor for all of them.

        Args:
            means: the prior means by the name of the weight; one row where rows are tied.
            init_log_var: ρ at the start.
        """

    @abstractmethod
    def sample(self, v: Tensor, noise: Tensor) -> Tensor:
        """Weights (T, S, n) from v (T, dim) and standard normal noise (T, S, `noise_size`)."""

    @abstractmethod
    def penalty(self, v: Tensor, prior: Prior) -> Tensor:
        """What the energy adds to the loss, before κ, say a KL divergence: (T,)."""

    # --- what has a default ----------------------------------------------------------------------

    @property
    def has_prior(self) -> bool:
        """Whether the prior appears in the energy (implicit differentiation needs it)."""
        return True

    def noise_size(self, n: int) -> int:
        """How many normal numbers one sample of n weights takes; 0: a weight is no draw."""
        return n

    @property
    def stochastic(self) -> bool:
        """Whether a weight is a draw."""
        return self.noise_size(1) > 0

    def weight(self, beta: float | Tensor, examples: int) -> float | Tensor:
        """κ, the factor of the penalty in the energy."""
        return beta / examples

    def start(self, prior: Prior, tasks: int) -> Tensor:
        """The prior itself as the solution of every task, (T, dim)."""
        return torch.cat(prior).expand(tasks, -1)

    def precision(self, v: Tensor, prior: Prior) -> Precision:
        """P, the Hessian of the penalty in v at this point, as an operator."""
        prior = tuple(p.detach() for p in prior)
        return AutogradPrecision(
            lambda at: self.penalty(at, prior), v, self.preconditioner(v.detach(), prior)
        )

    def preconditioner(self, v: Tensor, prior: Prior) -> Preconditioner | None:
        """A positive definite approximation of P⁻¹ as a function of vectors (T, dim)."""
        return None

    def prior_product(self, v: Tensor, prior: Prior, u: Tensor) -> Prior | None:
        """−(∂²penalty/∂v∂prior)ᵀu summed over the tasks, in closed form; None: by autograd."""
        return None

    def log_var(self, v: Tensor) -> Tensor | None:
        """The log-variance of every weight, (T, n); None where a weight has none."""
        return None

    def log_scales(self, n: int) -> slice | None:
        """Where in v logarithms of scales stand, which a Newton step may move only so far."""
        return None

    def log_density(self, weights: Tensor, v: Tensor) -> Tensor:
        """log q(w; v) of weights (T, S, n), as (T, S)."""
        raise NotImplementedError(f"{type(self).__name__} has no log_density")

    # --- blocks as slices ------------------------------------------------------------------------

    def slices(self, n: int) -> dict[str, slice]:
        """Where each block of v lies."""
        by_name, at = {}, 0
        for name, size in self.blocks(n).items():
            by_name[name] = slice(at, at + size)
            at += size
        return by_name

    def dim(self, n: int) -> int:
        """The entries of v for n weights."""
        return sum(self.blocks(n).values())
