"""How is a linear head with full covariance solved? In its dual, with examples × classes unknowns.

Not a minimizer of any energy: it asks `ibaml.heads` for the posterior of a belief with ``in_dual``.
The posterior is differentiable in everything the energy reads, by the implicit rule in the dual.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ibaml.arguments import check_count, check_number
from ibaml.energy import Energy, TaskEnergy, detached
from ibaml.heads.class_means import class_directions
from ibaml.heads.dual import laplace
from ibaml.heads.gaussian import BeforeExamples, GaussianHead
from ibaml.heads.prior import HeadPrior
from ibaml.heads.regression import regression
from ibaml.heads.simple import simple_head
from ibaml.heads.variational import variational
from ibaml.linalg import Reason
from ibaml.solve.base import Solution, energy_and_gradient
from ibaml.weights import ClassMeans, FullGaussian, SimpleHead


@dataclass(frozen=True)
class DualNewton:
    """Newton's method in the dual, for `FullGaussian`; `ClassMeans` needs no steps.

    Args:
        steps: at most this many (regression with Gaussian noise needs none; an accelerator takes
            12 at most for labels).
        tol: done when no output of an example would move by more; None is 1e-9 in float64 and
            1e-4 in float32.
    """

    steps: int = 40
    tol: float | None = None

    def __post_init__(self) -> None:
        check_count("steps", self.steps, 1)
        if self.tol is not None:
            check_number("tol", self.tol, above=0)

    def solve(
        self, energy: Energy, start: Tensor, *, rate: Tensor | None = None, examine: bool = True
    ) -> Solution:
        assert isinstance(energy, TaskEnergy)
        return self.posterior(detached(energy), examine=examine)[1]

    def posterior(
        self, energy: TaskEnergy, features: Tensor | None = None, *, examine: bool = True
    ) -> tuple[GaussianHead, Solution]:
        """The posterior of every task, differentiable in θ, and what happened. A task whose values
        are not finite has its prior as posterior. ``features`` of the support set, (T, N, F), are
        computed unless they are given."""
        prior = head_prior(energy)
        features = energy.head_features() if features is None else features
        answer, solution = self._solved(energy, prior, features)
        if features.device.type == "cpu" and bool(solution.diverged.any()):
            reason = solution.reason
            silent = torch.where(solution.diverged[:, None, None], 0.0, features)
            answer, solution = self._solved(energy, prior, silent)
            solution = _with(solution, reason=reason)
        if examine and _minimizes(energy):
            held, v = energy.frozen(), solution.value
            start = energy.belief.start(held.meta.prior, len(v))
            with torch.no_grad():
                before = held(start)
            after, gradient = energy_and_gradient(held, v)
            solution = _with(solution, before=before, after=after, gradient=gradient)
        return answer, solution

    def _solved(
        self, energy: TaskEnergy, prior: HeadPrior, features: Tensor
    ) -> tuple[GaussianHead, Solution]:
        beta = energy.kappa * features.shape[1]
        classes = energy.rows(energy.meta.prior[0]).shape[0]
        steps = torch.zeros(len(features), dtype=torch.long, device=features.device)
        reason = torch.full_like(steps, int(Reason.CONVERGED))
        answer: GaussianHead
        if isinstance(energy.belief, ClassMeans):
            if not energy.likelihood.takes_labels(energy.y):
                raise ValueError("ClassMeans is for labels, and the targets are numbers")
            variance = prior.log_var.exp()
            answer = class_directions(features, energy.y, classes, variance)
        elif isinstance(energy.belief, SimpleHead):
            kind = energy.belief.kind
            if not energy.likelihood.takes_labels(energy.y):
                raise ValueError(f"{kind} is for labels, and the targets are numbers")
            if kind == "prototypes" and not energy.adapts_bias:
                raise ValueError("prototypes need a head with a bias, which is adapted too")
            answer = simple_head(
                kind, prior, features, energy.y, classes, beta, self.steps, self.tol
            )
        elif energy.likelihood.takes_labels(energy.y):
            assert isinstance(energy.belief, FullGaussian)
            infer = variational if energy.belief.inference == "variational" else laplace
            given = {} if infer is variational else {"steps": self.steps}
            found = infer(prior, features, energy.y, classes, beta, tol=self.tol, **given)
            steps, reason = found.steps, found.reason
            answer = found
        else:
            noise = energy.noise_variance()
            if noise is None:
                raise ValueError(
                    f"{type(energy.likelihood).__name__} is neither for labels nor Gaussian noise, "
                    'so its posterior has no closed form: use posterior="diagonal"'
                )
            targets = energy.y.unsqueeze(-1) if energy.y.dim() == 2 else energy.y
            answer = regression(prior, features, targets, noise, beta)
        value = energy.flat(answer.mean_weights())
        finite = value.detach().isfinite().all(-1)
        reason = torch.where(finite, reason, int(Reason.NONFINITE))
        nothing = value.new_full((len(value),), float("nan")).detach()
        return answer, Solution(value.detach(), steps, reason, nothing, None, None)


def _minimizes(energy: TaskEnergy) -> bool:
    """Whether the solution is a minimum of E."""
    belief = energy.belief
    return isinstance(belief, FullGaussian) or (
        isinstance(belief, SimpleHead) and belief.kind == "point"
    )


def head_prior(energy: TaskEnergy) -> HeadPrior:
    """The prior over the head's rows; ρ is the same for all of them."""
    m, rho = (energy.rows(part) for part in energy.meta.prior)
    return HeadPrior(m, rho[0])


def before_examples(energy: TaskEnergy, tasks: int) -> GaussianHead:
    """The posterior of tasks without examples."""
    prior = head_prior(energy)
    return BeforeExamples(prior, tasks, prior.mean.shape[0])


def _with(
    solution: Solution,
    reason: Tensor | None = None,
    before: Tensor | None = None,
    after: Tensor | None = None,
    gradient: Tensor | None = None,
) -> Solution:
    return Solution(
        solution.value,
        solution.steps,
        solution.reason if reason is None else reason,
        solution.energy_before if before is None else before,
        solution.energy_after if after is None else after,
        solution.gradient if gradient is None else gradient,
    )
