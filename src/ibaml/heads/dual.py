"""Which Gaussian over a linear head does a task give, in as many unknowns as examples × classes?

The posterior of a linear head has the form (Opper and Archambeau, 2009)

    M = M₀ + (1/β)·D Σ_n a_n ⊗ φ_n,      Σ⁻¹ = D⁻¹ + (1/β) Σ_n Λ_n ⊗ φ_nφ_nᵀ,

so all of it is (a, Λ), one number and one row a class and example, and the Gram matrix ΦDΦᵀ. Here
by Laplace: a = y − π and Λ = diag π − ππᵀ at the MAP. `ibaml.heads.variational` has the optimum
among all Gaussians. Everything returned is differentiable in the prior, β and the features.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ibaml.heads.inverse import DenseInverse, SoftmaxInverse
from ibaml.heads.prior import HeadPrior
from ibaml.linalg import Reason


@dataclass(frozen=True)
class DualPosterior:
    """A full-covariance posterior over a linear head, held in the dual.

    Args:
        prior: what it started from.
        features: of the support examples, (T, N, F).
        dual: a, (T, N, C).
        inverse: (K/β + Λ⁻¹)⁻¹.
        beta: the weight of the KL.
        steps: that the solver took, (T,).
        residual: the most that a logit of an example would still move, in the units of `laplace`'s
            ``tol``, (T,).
        reason: why the solver stopped, (T,), see `ibaml.Reason`.
    """

    prior: HeadPrior
    features: Tensor
    dual: Tensor
    inverse: SoftmaxInverse | DenseInverse
    beta: Tensor | float
    steps: Tensor
    residual: Tensor
    reason: Tensor

    def moments(self, query: Tensor) -> tuple[Tensor, Tensor]:
        """Mean (T, Q, C) and covariance (T, Q, C, C) of the logits of features (T, Q, F)."""
        cross = self.prior.gram(self.features, query)
        quadratic = self.inverse.quadratic(cross) / self.beta
        own = torch.diag_embed(
            self.prior.gram_diagonal(query).expand(-1, self.dual.shape[-1], -1).mT
        )
        return self._mean(query, cross), own - quadratic

    def mean_logits(self, query: Tensor) -> Tensor:
        """The mean alone, (T, Q, C): the answer of the point in the middle."""
        return self._mean(query, self.prior.gram(self.features, query))

    def mean_weights(self) -> Tensor:
        """M, (T, C, F)."""
        pull = self.prior.times(self.dual.mT @ self.features) / self.beta
        return self.prior.mean + pull

    def weight_variances(self) -> Tensor:
        """The variance of every weight, (T, C, F)."""
        classes = self.dual.shape[-1]
        reached = self.prior.reached(self.features, classes)  # D φ_n, (T, C, N, F)
        known = torch.einsum("tcnf,tcnm,tcmf->tcf", reached, self.inverse.blocks(), reached)
        return self.prior.weight_variances(classes) - known / self.beta

    def sample(self, noise: Tensor) -> Tensor:
        """Heads (T, S, C, F) drawn with standard normal numbers (T, S, `noise_size`).

        A draw from the prior is moved to where the examples want it (Matheron's rule): exact, and
        nothing of size features × features is made.
        """
        classes = self.dual.shape[-1]
        own, common, heard = noise.split(self.noise_sizes(), -1)
        gram = self.prior.gram(self.features, self.features) / self.beta
        mean, draws = self.mean_weights(), []
        for s in range(noise.shape[1]):
            drawn = self.prior.draw(own[:, s], common[:, s], classes)
            # P·Φδ + (I − PK)·e: pseudo-targets with noise Λ⁻¹, where Λ may be singular
            extra = self.inverse.root_times(heard[:, s].view_as(self.dual)) * self.beta**0.5
            moved = self.features @ drawn.mT - spread_by(gram, extra)
            dual = self.inverse.times(moved) + extra
            draws.append(mean + drawn - self.prior.times(dual.mT @ self.features) / self.beta)
        return torch.stack(draws, 1)

    def noise_sizes(self) -> list[int]:
        """How many normal numbers one draw takes: for ρ, for the low-rank part, for examples."""
        _, examples, classes = self.dual.shape
        width = self.features.shape[-1]
        return [classes * width, classes * self.prior.rank, examples * classes]

    def _mean(self, query: Tensor, cross: Tensor) -> Tensor:
        return self.prior.logits(query, self.dual.shape[-1]) + spread_by(cross.mT, self.dual) / (
            self.beta
        )


# where to look at a value costs more than a step: 4 to 6 steps do for λ ≥ 0.001, 12 wherever
# rounding leaves a solution to be found (tests/test_heads_dual.py)
_UNSEEN_STEPS = 12


def laplace(
    prior: HeadPrior,
    features: Tensor,
    labels: Tensor,
    classes: int,
    beta: Tensor | float = 1.0,
    steps: int = 40,
    tol: float | None = None,
) -> DualPosterior:
    """The Laplace approximation around the MAP of every task, by Newton steps in the dual.

    A step of length log(1 + d)/d, with d the most that the full step would change a difference of
    two logits, always descends (the loss is self-concordant in this sense: Bach, 2010; Sun and
    Tran-Dinh, 2019) and becomes the full step near the solution. The best of eight lengths from
    there to 1 is taken, at once: along a line, the loss costs no products.

    Args:
        prior: of the head's rows.
        features: of the support examples, (T, N, F); a bias is a constant feature.
        labels: (T, N), 0 … classes − 1; classes may have any number of examples, none included.
        classes: how many.
        beta: the weight of the KL in Σ_n nll + β·KL; 1 is Bayes.
        steps: at most this many; on an accelerator at most 12, none of which waits for the host.
        tol: done when no logit of an example would move by more, in units of what it is the sum of
            or of 1 if that is larger; None is 1e-9 in float64 and 1e-4 in float32.

    >>> prior = HeadPrior(mean=torch.zeros(2), log_var=torch.zeros(2))
    >>> x = torch.tensor([[[2.0, 0.0], [0.0, 2.0]]])
    >>> posterior = laplace(prior, x, torch.tensor([[0, 1]]), classes=2)
    >>> mean, covariance = posterior.moments(x)
    >>> mean.argmax(-1).tolist(), list(covariance.shape)
    ([[0, 1]], [1, 2, 2, 2])
    """
    check_task(features, labels, classes)
    start = prior.logits(features, classes)
    gram = prior.gram(features, features) / beta
    target = torch.nn.functional.one_hot(labels.long(), classes).to(features.dtype)
    with torch.no_grad():
        solution = _newton(start, gram, target, steps, tolerance(tol, features.dtype))
        inverse = SoftmaxInverse.at(gram, (start + spread_by(gram, solution.dual)).softmax(-1))
    # one more step, differentiable: by the implicit rule its derivative is the solution's
    rest = solution.dual + (start + spread_by(gram, solution.dual)).softmax(-1) - target
    dual = solution.dual - (rest - inverse.times(spread_by(gram.detach(), rest)))
    inverse = SoftmaxInverse.at(gram, (start + spread_by(gram, dual)).softmax(-1))
    return DualPosterior(
        prior, features, dual, inverse, beta, solution.steps, solution.residual, solution.reason
    )


@dataclass(frozen=True)
class _Solution:
    dual: Tensor
    steps: Tensor
    residual: Tensor
    reason: Tensor


def _newton(start: Tensor, gram: Tensor, target: Tensor, steps: int, tol: float) -> _Solution:
    """a with a + ∇nll(z₀ + K a) = 0 for every task; a task that is done or ill rests."""
    dual = torch.zeros_like(target)
    taken = torch.zeros(len(target), dtype=torch.long, device=target.device)
    residual = torch.full_like(target[:, 0, 0], torch.inf)
    reason = torch.full_like(taken, int(Reason.STEPS))
    looks = target.device.type == "cpu"
    for _ in range(steps if looks else min(steps, _UNSEEN_STEPS)):
        active = reason == Reason.STEPS
        probabilities = (start + spread_by(gram, dual)).softmax(-1)
        inverse = SoftmaxInverse.at(gram, probabilities)
        rest = dual + probabilities - target
        change = inverse.times(spread_by(gram, rest)) - rest
        moved = spread_by(gram, change)
        length = _best_length(start, dual, change, spread_by(gram, dual), moved, target)
        # relative to the numbers a logit is the sum of, for rounding is
        terms = spread_by(gram.abs(), dual.abs()).amax((-2, -1)).clamp_min(1)
        size = moved.abs().amax((-2, -1)) / terms
        fine = active & change.isfinite().all(-1).all(-1) & size.isfinite()
        dual = torch.where(fine[:, None, None], dual + length[:, None, None] * change, dual)
        taken = taken + fine
        residual = torch.where(fine, size, residual)
        reason = torch.where(fine & (size <= tol), int(Reason.CONVERGED), reason)
        reason = torch.where(active & ~fine, int(Reason.NONFINITE), reason)
        if looks and bool((reason != Reason.STEPS).all()):
            break  # elsewhere those who are done rest
    return _Solution(dual, taken, residual, reason)


def safe_length(moved: Tensor) -> Tensor:
    """log(1 + d)/d, (T,), for full changes of the logits (T, N, C): what surely descends."""
    most = (moved.amax(-1) - moved.amin(-1)).amax(-1)
    return torch.where(most > 1e-3, most.log1p() / most.clamp_min(1e-3), 1 - most / 2)


def _best_length(
    start: Tensor, dual: Tensor, change: Tensor, here: Tensor, moved: Tensor, target: Tensor
) -> Tensor:
    """The length (T,) of least loss between the safe one and 1."""
    share = torch.linspace(0, 1, 8, dtype=dual.dtype, device=dual.device)
    length = safe_length(moved)[:, None] ** share  # (T, 8)
    logits = (start + here)[:, None] + length[..., None, None] * moved[:, None]
    nll = (logits.logsumexp(-1) - (target[:, None] * logits).sum(-1)).sum(-1)
    linear, square = (dual * moved).sum((-2, -1)), (change * moved).sum((-2, -1))
    loss = nll + length * linear[:, None] + 0.5 * length.square() * square[:, None]
    return length.gather(1, loss.argmin(1, keepdim=True))[:, 0]


def spread_by(gram: Tensor, vectors: Tensor) -> Tensor:
    """K·v, (T, N, C), for Gram matrices (T, C or 1, N, M) and vectors (T, M, C)."""
    if gram.shape[1] == 1:
        return gram[:, 0] @ vectors
    return (gram @ vectors.mT[..., None])[..., 0].mT


def tolerance(tol: float | None, dtype: torch.dtype) -> float:
    if tol is not None:
        return tol
    return 1e-9 if dtype == torch.float64 else 1e-4


def check_task(features: Tensor, labels: Tensor, classes: int) -> None:
    if features.dim() != 3 or labels.shape != features.shape[:2]:
        raise ValueError(
            f"features must be (T, N, F) and labels (T, N), got {tuple(features.shape)} and "
            f"{tuple(labels.shape)}"
        )
    if classes < 2:
        raise ValueError(f"classes must be 2 or more, got {classes}")
