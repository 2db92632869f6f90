"""How does a user's support set (tensors or arrays, labels of any kind) become tensors?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ibaml.energy import Likelihood
from ibaml.labels import as_tensor, encoded, is_numbers


@dataclass(frozen=True)
class SupportSet:
    """Inputs (N, …) and targets (N, …) as tensors. ``classes`` names the columns of probabilities;
    None if the labels are rows of the head already."""

    x: Tensor
    y: Tensor
    classes: tuple[Any, ...] | None


def support_set(
    x: Tensor | np.ndarray,
    y: Tensor | np.ndarray | Sequence[Any],
    classes: int | Sequence[Any] | None,
    *,
    dtype: torch.dtype,
    any_labels: bool,
    likelihood: Likelihood,
) -> SupportSet:
    """The checked support set. Errors here are about x and y.

    Args:
        classes: the names of the classes, or their number; by default the labels that occur.
        dtype: the dtype for floating inputs and targets that are not tensors yet.
        any_labels: whether labels may be anything (a tied head) or must be the head's rows.
    """
    x = as_tensor(x, "x", dtype)
    names: tuple[Any, ...] | None = None
    if any_labels and not is_numbers(y):
        y, names = encoded(y, range(classes) if isinstance(classes, int) else classes)
    elif isinstance(y, Tensor) or np.asarray(y).dtype.kind in "fiub":
        y = as_tensor(y, "y", dtype)
        y = y.long() if y.dtype == torch.bool else y
    else:
        raise ValueError(
            "y holds labels that are not numbers: a head with one row per class takes 0 … "
            "W − 1; make the learner with tie_head=True for labels of any kind"
        )
    if x.dim() < 1 or y.dim() < 1 or x.shape[0] != y.shape[0]:
        raise ValueError(
            "x and y need one entry per example: x has shape "
            f"{tuple(x.shape)}, y has shape {tuple(y.shape)}"
        )
    for name, t in (("x", x), ("y", y)):
        if t.is_floating_point() and not bool(t.isfinite().all()):
            raise ValueError(f"{name} holds a NaN or an infinity")
    if 0 in x.shape[1:]:
        raise ValueError(f"x has shape {tuple(x.shape)}: its examples are empty")
    if likelihood.takes_labels(y) and y.dim() == 2 and y.shape[1] == 1:
        raise ValueError(
            f"y has shape {tuple(y.shape)}; labels are one number per example, (N,): "
            "use y.squeeze(1)"
        )
    return SupportSet(x, y, names)
