"""What is good after adaptation? The meta-loss L(v̂, θ) of every task.

Objectives read the query set through a second energy: the same network and belief, but the query's
data and new noise.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

import torch
from torch import Tensor

from ibaml.arguments import check_count, check_number, check_part, check_word
from ibaml.energy import TaskEnergy
from ibaml.words import OBJECTIVES, ObjectiveName

__all__ = ["Abml", "Objective", "PredictiveNll", "QueryNll"]


class Objective(Protocol):
    """``samples``: Monte-Carlo samples of the meta-loss, None for as many as adaptation uses.
    ``noise``: ``"fresh"`` draws new noise (a solution fits the noise it was solved with),
    ``"shared"`` reuses that of adaptation."""

    @property
    def samples(self) -> int | None: ...

    @property
    def noise(self) -> Literal["fresh", "shared"]: ...

    def __call__(self, v: Tensor, support: TaskEnergy, query: TaskEnergy) -> Tensor:
        """The meta-loss of every task, (T,), differentiable in v and θ."""


@dataclass(frozen=True)
class _Sampled:
    samples: int | None = None
    noise: Literal["fresh", "shared"] = "fresh"

    def __post_init__(self) -> None:
        if self.samples is not None:
            check_count("samples", self.samples, 1)
        check_word("noise", self.noise, ("fresh", "shared"))
        if self.noise == "shared" and self.samples is not None:
            raise ValueError('noise="shared" takes adaptation\'s samples: leave samples unset')


@dataclass(frozen=True)
class QueryNll(_Sampled):
    """E_q[nll] on the query set: Jensen's upper bound on the nll of the averaged prediction."""

    def __call__(self, v: Tensor, support: TaskEnergy, query: TaskEnergy) -> Tensor:
        return query.loss(v)


@dataclass(frozen=True)
class PredictiveNll(_Sampled):
    """−log of the averaged likelihood, the quantity that evaluations report."""

    def __call__(self, v: Tensor, support: TaskEnergy, query: TaskEnergy) -> Tensor:
        return query.predictive_nll(v).mean(-1)


@dataclass(frozen=True)
class TowardsSolution:
    """½‖start − v̂‖²: not a query loss, but the distance that Reptile's rule reduces."""

    samples: None = field(default=None, init=False)
    noise: Literal["fresh", "shared"] = field(default="shared", init=False)

    def __call__(self, v: Tensor, support: TaskEnergy, query: TaskEnergy) -> Tensor:
        start = support.belief.start(support.meta.prior, len(v))
        return (start - v).square().sum(-1) / 2


@dataclass(frozen=True)
class Abml(_Sampled):
    """Amortized Bayesian meta-learning's objective (Ravi & Beatson, 2019):

        nll on support ∪ query  +  β·KL(v̂ ‖ θ)/N  −  log[N(m; 0, 1)·Gamma(1/d; 1, 0.01)] / tasks

    Args:
        tasks: the number of training tasks among which the hyper-prior is divided (the default
            is the paper's protocol, 40,000 iterations of 2 tasks).
        kl_examples: N counts the ``"support"`` set, or ``"all"`` examples of support ∪ query.
        shape, rate: those of the Gamma over the precisions.
    """

    tasks: int = 80_000
    kl_examples: Literal["support", "all"] = "support"
    shape: float = 1.0
    rate: float = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("tasks", self.tasks, 1)
        check_word("kl_examples", self.kl_examples, ("support", "all"))
        check_number("shape", self.shape, above=0)
        check_number("rate", self.rate, above=0)

    def __call__(self, v: Tensor, support: TaskEnergy, query: TaskEnergy) -> Tensor:
        both = replace(
            query,
            x=torch.cat([support.x, query.x], 1),
            y=torch.cat([support.y, query.y], 1),
        )
        kappa = support.kappa  # β/N: a tempered posterior has a tempered bound
        if self.kl_examples == "all":
            kappa = kappa * support.x.shape[1] / both.x.shape[1]
        kl = query.belief.penalty(v, query.meta.prior)
        return both.loss(v) + kappa * kl - self.log_hyper_prior(query) / self.tasks

    def log_hyper_prior(self, energy: TaskEnergy) -> Tensor:
        """log N(m; 0, 1) + log Gamma(1/d; shape, rate), summed over the prior's parameters."""
        m, rho = energy.meta.prior
        normal = -(m.square() + math.log(2 * math.pi)) / 2
        constant = self.shape * math.log(self.rate) - math.lgamma(self.shape)
        gamma = constant - (self.shape - 1) * rho - self.rate * (-rho).exp()
        return (energy.layout.shares(m) * (normal + gamma)).sum()


_BY_NAME: dict[ObjectiveName, Callable[[], Objective]] = {
    "query": QueryNll,
    "predictive": PredictiveNll,
    "abml": Abml,
}


def as_objective(objective: Objective | ObjectiveName | None) -> Objective | None:
    """The objective with this name, as on the command line; an object or None is returned as is."""
    if isinstance(objective, str):
        check_word("objective", objective, OBJECTIVES)
        return _BY_NAME[objective]()
    if objective is not None:
        check_part("objective", objective)
    return objective
