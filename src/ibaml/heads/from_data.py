"""What do the base classes say, in closed form, about classes to come?

Examples of a class scatter around their class's mean (within), and class means around each other
(between). Linear discriminant analysis whitens the first, shrunk towards a multiple of the
identity; the two-covariance model (PLDA) says how class means are drawn, and so answers a few-shot
task in closed form (`ibaml.heads.plda`).

Scalars (shrinkage, temperature, a prior's scale) are to be chosen on classes that the map has not
seen, which `class_folds` deals out; the final map is from all base classes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class ClassStatistics:
    """Examples of every class (B,), their means (B, F), and Σ(x − x̄)(x − x̄)ᵀ over all, (F, F)."""

    counts: Tensor
    means: Tensor
    scatter: Tensor

    def without(self, other: ClassStatistics, keep: Tensor) -> ClassStatistics:
        """Those of the classes that are kept, which the other's are not."""
        return ClassStatistics(self.counts[keep], self.means[keep], self.scatter - other.scatter)


def class_statistics(features: Tensor, labels: Tensor) -> ClassStatistics:
    """For features (n, F) and any integer labels (n,)."""
    _, index = labels.unique(return_inverse=True)
    counts = index.bincount().to(features.dtype)
    sums = features.new_zeros(len(counts), features.shape[1]).index_add(0, index, features)
    means = sums / counts[:, None]
    apart = features - means[index]
    return ClassStatistics(counts, means, apart.mT @ apart)


def within_covariance(statistics: ClassStatistics, shrinkage: float) -> Tensor:
    """Pooled covariance around the class means, (F, F), unbiased, then shrunk.

    (1 − s)·S + s·(tr S / F)·I
    """
    if not 0 <= shrinkage <= 1:
        raise ValueError(f"shrinkage must be from 0 to 1, got {shrinkage}")
    free = statistics.counts.sum() - len(statistics.counts)
    pooled = statistics.scatter / free
    size = pooled.diagonal().mean()
    eye = torch.eye(len(pooled), dtype=pooled.dtype, device=pooled.device)
    return (1 - shrinkage) * pooled + shrinkage * size * eye


@dataclass(frozen=True)
class TwoCovariance:
    """PLDA: class means y ~ N(μ, between), examples x = y + e with e ~ N(0, I), after a linear map.

    Args:
        center: subtracted from features, (F,).
        map: (F, K); mapped features have the identity within classes and a diagonal between.
        between: variances of the class means, (K,), largest first.
    """

    center: Tensor
    map: Tensor
    between: Tensor

    def mapped(self, features: Tensor) -> Tensor:
        """Features (…, F) in the model's coordinates, (…, K)."""
        return (features - self.center) @ self.map


def lda(
    statistics: ClassStatistics, shrinkage: float, width: int | None = None, floor: float = 0.0
) -> TwoCovariance:
    """Shrinkage discriminant analysis: the map that whitens within, along the axes between.

    ``between`` are the moments' estimates: the variance of the class means less what their own
    examples' noise adds to it, never below 0, then shrunk towards their mean over all directions:
    base classes span classes − 1 directions, and classes to come may differ in others.

    Args:
        statistics: of the base classes, at least two.
        shrinkage: of the within covariance, 0 to 1.
        width: keep this many directions, the widest between classes first; None keeps all F.
        floor: how far ``between`` is shrunk towards its mean, 0 to 1.
    """
    if not 0 <= floor <= 1:
        raise ValueError(f"floor must be from 0 to 1, got {floor}")
    within = within_covariance(statistics, shrinkage)
    values, vectors = torch.linalg.eigh(within)
    if values[0] <= 0:
        raise ValueError(
            f"the covariance within classes is singular at shrinkage {shrinkage}: give more"
        )
    whiten = vectors / values.sqrt()
    center = statistics.means.mean(0)
    white = (statistics.means - center) @ whiten
    _, singular, axes = torch.linalg.svd(white, full_matrices=True)
    noise = (1 / statistics.counts).mean()  # of a class mean, in units of the within covariance
    estimate = singular.square() / (len(white) - 1)
    between = torch.zeros_like(center)
    between[: len(estimate)] = (estimate - noise).clamp_min(0)
    between = (1 - floor) * between + floor * between.mean()
    return TwoCovariance(center, whiten @ axes[:width].mT, between[:width])


def two_covariance_likelihood(
    counts: Tensor, means: Tensor, scatter: Tensor, center: Tensor, between: Tensor, within: Tensor
) -> Tensor:
    """log p of all examples under x = y + e, y ~ N(center, between), e ~ N(0, within).

    From counts (B,), class means (B, F) and the summed scatter within classes (F, F).
    """
    width, examples, classes = len(center), counts.sum(), len(counts)
    total = between + within / counts[:, None, None]
    apart = (means - center)[..., None]
    fit = (apart * torch.linalg.solve(total, apart)).sum() + total.logdet().sum()
    rest = torch.linalg.solve(within, scatter).trace() + (examples - classes) * within.logdet()
    constant = examples * width * torch.tensor(2 * torch.pi, dtype=counts.dtype).log()
    return -0.5 * (fit + rest + constant + width * counts.log().sum())


@dataclass(frozen=True)
class Estimate:
    """The two covariances (F, F) and center (F,) with the log-likelihood after every step."""

    center: Tensor
    between: Tensor
    within: Tensor
    likelihood: Tensor


def maximum_likelihood(statistics: ClassStatistics, steps: int = 20) -> Estimate:
    """The two-covariance model by EM, from any numbers of examples a class.

    For few features (after a map); each step takes B solves of F×F.
    """
    counts, means, scatter = statistics.counts, statistics.means, statistics.scatter
    center = means.mean(0)
    within = within_covariance(statistics, 0.0)
    between = (means - center).mT @ (means - center) / len(means)
    likelihoods = [two_covariance_likelihood(counts, means, scatter, center, between, within)]
    for _ in range(steps):
        total = between + within / counts[:, None, None]
        gain = torch.linalg.solve(total, between).mT  # (B, F, F): how far y follows its mean
        known = center + (gain @ (means - center)[..., None])[..., 0]
        unsure = between - gain @ between
        center = known.mean(0)
        apart, left = known - center, means - known
        between = unsure.mean(0) + apart.mT @ apart / len(counts)
        noise = scatter + (counts[:, None] * left).mT @ left
        within = (noise + (counts[:, None, None] * unsure).sum(0)) / counts.sum()
        between, within = 0.5 * (between + between.mT), 0.5 * (within + within.mT)
        likelihoods.append(
            two_covariance_likelihood(counts, means, scatter, center, between, within)
        )
    return Estimate(center, between, within, torch.stack(likelihoods))


def diagonalize(center: Tensor, between: Tensor, within: Tensor) -> TwoCovariance:
    """The map after which within is the identity and between a diagonal."""
    lower = torch.linalg.cholesky(within)
    half = torch.linalg.solve_triangular(lower, between, upper=False)
    white = torch.linalg.solve_triangular(lower, half.mT, upper=False)
    values, vectors = torch.linalg.eigh(0.5 * (white + white.mT))
    turn = torch.linalg.solve_triangular(lower.mT, vectors.flip(-1), upper=True)
    return TwoCovariance(center, turn, values.flip(-1).clamp_min(0))


def class_folds(labels: Tensor, folds: int, seed: int = 0) -> list[tuple[Tensor, Tensor]]:
    """Pairs (classes to learn a map from, classes left out), each class left out once.

    >>> [len(left_out) for _, left_out in class_folds(torch.arange(10), folds=3)]
    [4, 3, 3]
    """
    classes = labels.unique()
    if not 2 <= folds <= len(classes):
        raise ValueError(f"folds must be from 2 to the {len(classes)} classes, got {folds}")
    order = torch.randperm(len(classes), generator=torch.Generator().manual_seed(seed))
    parts = [classes[order[i::folds]] for i in range(folds)]
    return [
        (torch.cat([part for j, part in enumerate(parts) if j != i]), left_out)
        for i, left_out in enumerate(parts)
    ]
