"""What is a belief about the weights? Mathematics on flat vectors, and its prior's parameters.

A belief holds no tensors. The solution ``v`` of T tasks is (T, dim): the belief's blocks side by
side. Its prior is a tuple of vectors: the mean (n,), then those of `prior_parameters` in order.
`ibaml.testing.BeliefSuite` tests a belief against dense matrices.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

import torch
from torch import Tensor

from ibaml.arguments import check_number
from ibaml.weights.precision import AutogradPrecision, Precision, Preconditioner

Prior = tuple[Tensor, ...]
Start = Mapping[str, Tensor] | Tensor  # a tensor for every weight, or one for all


class Belief(ABC):
    """A belief about n weights. A subclass writes `blocks`, `prior_parameters`, `sample` and
    `penalty`; the rest has defaults, and derivatives come from autograd.

    Attributes:
        is_diagonal_gaussian: whether v is (m_t, ρ_t) of N(m_t, diag exp ρ_t), and the prior (m, ρ)
            is of the same kind. Lemma 1, `NaturalDescent` and ABML's hyper-prior need this.
        has_output_moments: whether weights are Gaussian, and `output_moments` says what that makes
            of a linear head's outputs.
        in_dual: whether the belief is about a linear head alone, and its covariance follows from
            the examples, so that `ibaml.heads` solves and differentiates it.
        kappa: κ, the factor of the penalty, if it is to be this number; None is β/N.
    """

    is_diagonal_gaussian = False
    has_output_moments = False
    in_dual = False
    kappa: float | None = None

    # --- what every belief writes ----------------------------------------------------------------

    @abstractmethod
    def blocks(self, n: int) -> dict[str, int]:
        """The blocks of v by name, in order, each with its number of entries. The first is
        ``"mean"``, with n entries. A block of n entries has one for every weight."""

    @abstractmethod
    def prior_parameters(
        self, means: Mapping[str, Tensor], init_log_var: float
    ) -> dict[str, Start]:
        """The initial values of the prior's parameters besides the mean, by name: a mapping with
        one tensor per weight, shaped like its mean, or a single tensor for all weights.

        Args:
            means: the prior means by the name of the weight; one row if rows are tied.
            init_log_var: the initial ρ.
        """

    @abstractmethod
    def sample(self, v: Tensor, noise: Tensor) -> Tensor:
        """Weights (T, S, n) from v (T, dim) and standard normal noise (T, S, `noise_size`)."""

    @abstractmethod
    def penalty(self, v: Tensor, prior: Prior) -> Tensor:
        """What the energy adds to the loss, such as a KL divergence, without the factor κ: (T,)."""

    # --- what has a default ----------------------------------------------------------------------

    @property
    def has_prior(self) -> bool:
        """Whether the prior appears in the energy (implicit differentiation needs it)."""
        return True

    def noise_size(self, n: int) -> int:
        """How many normal numbers one sample of n weights takes; 0 if weights are not drawn."""
        return n

    @property
    def stochastic(self) -> bool:
        """Whether weights are drawn."""
        return self.noise_size(1) > 0

    def weight(self, beta: float | Tensor, examples: int) -> float | Tensor:
        """κ, the factor of the penalty in the energy."""
        return beta / examples if self.kappa is None else self.kappa

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
        """−(∂²penalty/∂v∂prior)ᵀu summed over the tasks, in closed form; None for autograd."""
        return None

    def log_var(self, v: Tensor) -> Tensor | None:
        """The log-variance of every weight, (T, n); None if weights have none."""
        return None

    def log_scales(self, n: int) -> slice | None:
        """Where v has logarithms of scales, whose Newton steps are limited; None for nowhere."""
        return None

    def log_density(self, weights: Tensor, v: Tensor) -> Tensor:
        """log q(w; v) of weights (T, S, n), as (T, S)."""
        raise NotImplementedError(f"{type(self).__name__} has no log_density")

    def output_moments(
        self, blocks: Mapping[str, Tensor], features: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Mean (T, N, C) of a linear head's outputs z = Wφ for features (T, N, F), and their
        covariance (T, N, C, C), or variance (T, N, C) if the outputs are independent.

        Args:
            blocks: v by the name of the block, as rows of the head (T, C, F).
        """
        raise NotImplementedError(f"{type(self).__name__} has no output_moments")

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


def check_kappa(kappa: float | None) -> None:
    if kappa is not None:
        check_number("kappa", kappa, above=0)
