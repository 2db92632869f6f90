"""How is a map of 1,280 × 1,280 numbers kept in few directions?"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from ibaml.heads.from_base import Scalars, Whitening
from ibaml.heads.from_data import class_statistics


def compacted(x: Tensor, y: Tensor, scalars: Scalars, rank: int) -> dict[str, Tensor]:
    """The parts that `expanded` reads, of base classes, in float16: the whitening apart from a
    multiple of the identity only along the ``rank`` widest directions within classes, and the axes
    of the class means.

    Args:
        x, y: the base classes, (n, F) and integer labels.
        scalars: what `ibaml.heads.from_base.fit` found for them.
        rank: how many directions.
    """
    shape = Whitening.of(class_statistics(x.double(), y))
    weights = shape.weights(scalars.shrinkage)  # eigh's order: the widest are last
    rest = weights[:-rank].log().mean().exp()
    near = torch.cat([rest.expand(len(weights) - rank), weights[-rank:]])
    size = math.sqrt(len(weights))
    _, singular, axes = torch.linalg.svd(size * shape.means * near, full_matrices=False)
    kept = len(shape.means) - 1
    half = {
        "within": shape.vectors[:, -rank:],
        "axes": shape.vectors @ axes[:kept].mT,
    }
    scaled = {
        "center": shape.center, "weights": weights[-rank:] / rest, "rest": torch.ones(()),
        "variances": singular[:kept].square(),
    }  # fmt: skip
    return {n: t.half() for n, t in half.items()} | {n: t.float() for n, t in scaled.items()}


def expanded(parts: Mapping[str, Tensor], scalars: Scalars) -> tuple[Tensor, Tensor, Tensor]:
    """Center, map and between of a prior that is kept as few directions.

    The map is W = w₀·I + V·diag(w − w₀)·Vᵀ (``rest``, ``within``, ``weights``), turned to the axes
    of B (``axes``), along which its variances are ``variances`` and 0 elsewhere.
    """
    within, axes = (torch.linalg.qr(parts[n].double())[0] for n in ("within", "axes"))
    rest, weights = parts["rest"].double(), parts["weights"].double()
    turn = _completed(axes)
    map = rest * turn + (within * (weights - rest)) @ (within.mT @ turn)
    variances = torch.zeros(len(turn), dtype=torch.float64)
    variances[: axes.shape[1]] = parts["variances"].double()
    between = math.exp(scalars.diagonal) + math.exp(scalars.between) * variances
    return parts["center"].float(), map.float(), between.float()


def _completed(axes: Tensor) -> Tensor:
    """An orthogonal matrix (F, F) that begins with these orthonormal columns (F, m): a reflection
    that takes the first m unit vectors to the columns, turned so that it is well conditioned."""
    count = axes.shape[1]
    left, _, right = torch.linalg.svd(axes[:count])
    turn = -(right.mT @ left.mT)  # axes·turn begins with a negative semidefinite block
    apart = -axes @ turn
    apart[:count] += torch.eye(count, dtype=axes.dtype)
    inner = torch.linalg.solve(0.5 * apart.mT @ apart, apart.mT)
    result = torch.eye(len(axes), dtype=axes.dtype) - apart @ inner
    result[:, :count] = axes
    return result
