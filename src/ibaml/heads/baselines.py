"""What do the simple heads say that everything else has to beat?

Each is a closed form, or a convex problem, on fixed features: support (T, N, F), labels (T, N) and
query (T, Q, F) in, logits (T, Q, C) out, differentiable in the features. All of them are best with
one temperature from validation tasks, softmax(t·logits).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ibaml.heads.dual import laplace
from ibaml.heads.factor import cholesky
from ibaml.heads.plda import class_means
from ibaml.heads.prior import HeadPrior


def protonet(support: Tensor, labels: Tensor, query: Tensor, classes: int) -> Tensor:
    """−‖q − c‖² to the mean c of each class (Snell, Swersky and Zemel, 2017)."""
    _, center = class_means(support, labels, classes)
    return (
        2 * query @ center.mT
        - center.square().sum(-1)[:, None]
        - query.square().sum(-1, keepdim=True)
    )


def nearest_centroid(
    support: Tensor, labels: Tensor, query: Tensor, classes: int, center: Tensor | None = None
) -> Tensor:
    """−‖q − c‖² after centering (by ``center``, (F,), of the base classes) and scaling to length 1.

    Class means are scaled to length 1 again, so that this is 2·cosine − 2.
    """
    if center is not None:
        support, query = support - center, query - center
    unit = torch.nn.functional.normalize
    _, means = class_means(unit(support, dim=-1), labels, classes)
    return 2 * unit(query, dim=-1) @ unit(means, dim=-1).mT - 2


def ridge(
    support: Tensor, labels: Tensor, query: Tensor, classes: int, strength: Tensor | float = 1.0
) -> Tensor:
    """Least squares on one-hot labels, in closed form (R2-D2: Bertinetto et al., 2019).

    W = Xᵀ(XXᵀ + λI)⁻¹Y, a system of the examples' size (Woodbury). A bias is a constant feature.
    """
    target = torch.nn.functional.one_hot(labels.long(), classes).to(support.dtype)
    eye = torch.eye(support.shape[1], dtype=support.dtype, device=support.device)
    dual = torch.cholesky_solve(target, cholesky(support @ support.mT + strength * eye))
    return query @ (support.mT @ dual)


@dataclass(frozen=True)
class Regressed:
    """Gaussian-process regression: mean (T, Q, C), variance (T, Q), log evidence (T,)."""

    mean: Tensor
    variance: Tensor
    evidence: Tensor

    def logits(self, noise: Tensor | float) -> Tensor:
        """log p of each class's labels (+1 there, −1 elsewhere) for a query, up to a constant.

        Under the predictive densities N(μ_c, s²) that is 2μ_c/s²: a query far from the support set
        has a wide s² and an unsure answer, which one softmax of the means would not know.
        """
        return 2 * self.mean / (self.variance + noise)[..., None]


def gaussian_process(
    gram: Tensor,
    labels: Tensor,
    cross: Tensor,
    own: Tensor,
    classes: int,
    noise: Tensor | float,
) -> Regressed:
    """One regression a class on labels ±1 (deep kernel transfer: Patacchiola et al., 2020).

    The variance is of the noise-free function and the same for all classes; the evidence, summed
    over classes, is what deep kernel transfer trains.

    Args:
        gram: kernel among support examples, (T, N, N).
        labels: (T, N).
        cross: kernel between support and queries, (T, N, Q).
        own: kernel of each query with itself, (T, Q).
        classes: how many.
        noise: variance of the labels' noise.
    """
    target = 2 * torch.nn.functional.one_hot(labels.long(), classes).to(gram.dtype) - 1
    examples = gram.shape[-1]
    eye = torch.eye(examples, dtype=gram.dtype, device=gram.device)
    lower = cholesky(gram + noise * eye)
    dual = torch.cholesky_solve(target, lower)
    half = torch.linalg.solve_triangular(lower, cross, upper=False)
    fit = (target * dual).sum((-2, -1))
    volume = 2 * lower.diagonal(dim1=-2, dim2=-1).log().sum(-1) + examples * math.log(2 * math.pi)
    return Regressed(cross.mT @ dual, own - half.square().sum(-2), -0.5 * (fit + classes * volume))


def logistic_regression(
    support: Tensor,
    labels: Tensor,
    query: Tensor,
    classes: int,
    strength: Tensor | float = 1.0,
    tol: float | None = None,
) -> Tensor:
    """The minimum of C·Σ nll + ½‖W‖² with a free bias, as in scikit-learn; C is ``strength``.

    The bias is as good as free: its prior has a standard deviation of 100 (10 in float32) around
    0, for features centered on the support's mean. ``tol`` is that of `ibaml.heads.dual.laplace`.
    """
    middle = support.mean(1, keepdim=True)

    def with_one(features: Tensor) -> Tensor:
        return torch.nn.functional.pad(features - middle, (0, 1), value=1.0)

    variance = torch.cat(
        [
            torch.as_tensor(strength, dtype=support.dtype).expand(support.shape[-1]),
            support.new_full((1,), 1e4 if support.dtype == torch.float64 else 1e2),
        ]
    )
    prior = HeadPrior(torch.zeros_like(variance), variance.log())
    solution = laplace(prior, with_one(support), labels, classes, tol=tol)
    return solution.mean_logits(with_one(query))
