"""Which linear heads of the literature are closed forms without spread? To compare with.

All of them answer with rows W and are differentiable in the features and, but for prototypes, in
the prior N(m, diag exp ρ); the last feature is the constant 1 of the bias.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ibaml.heads.class_means import ClassDirections
from ibaml.heads.dual import laplace
from ibaml.heads.gaussian import GaussianHead
from ibaml.heads.plda import class_means
from ibaml.heads.prior import HeadPrior
from ibaml.heads.regression import regression
from ibaml.words import SimpleHeadName


def simple_head(
    kind: SimpleHeadName,
    prior: HeadPrior,
    features: Tensor,
    labels: Tensor,
    classes: int,
    beta: Tensor | float,
    steps: int = 40,
    tol: float | None = None,
) -> GaussianHead:
    """The head of every task, for features (T, N, F) and labels (T, N).

    Args:
        kind: ``"point"``, the most probable rows under a softmax; ``"prototypes"``, −‖φ − c‖² to
            the class means (ProtoNet), which has no prior; ``"ridge"``, least squares on one-hot
            labels (R2-D2); ``"gp"``, the same on labels ±1 with the whole posterior: Gaussian
            processes with the kernel φᵀ diag(exp ρ) φ′.
        beta: the weight of the prior; for least squares, whose noise has variance 1, the ridge.

    >>> prior = HeadPrior(mean=torch.zeros(2), log_var=torch.zeros(2))
    >>> x = torch.tensor([[[2.0, 1.0], [0.0, 1.0]]])
    >>> head = simple_head("prototypes", prior, x, torch.tensor([[0, 1]]), 2, 1.0)
    >>> head.mean_weights()[0, 0].tolist()
    [4.0, -4.0]
    """
    if kind == "point":
        return ClassDirections(
            laplace(prior, features, labels, classes, beta, steps, tol).mean_weights()
        )
    if kind == "prototypes":
        _, means = class_means(features[..., :-1], labels, classes)
        return ClassDirections(torch.cat([2 * means, -means.square().sum(-1, keepdim=True)], -1))
    targets = torch.nn.functional.one_hot(labels.long(), classes).to(features.dtype)
    if kind == "ridge":
        return ClassDirections(regression(prior, features, targets, 1.0, beta).mean_weights())
    return regression(prior, features, 2 * targets - 1, 1.0, beta)
