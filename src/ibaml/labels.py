"""How do a user's labels (text, whole numbers, true and false) become 0 … W−1, and back?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor


def as_tensor(values: Any, name: str, dtype: torch.dtype) -> Tensor:
    """Numbers as a tensor: a tensor as it is; floating arrays and lists in ``dtype``."""
    if isinstance(values, Tensor):
        return values
    array = np.asarray(values)
    if array.dtype.kind not in "fiub":
        raise TypeError(f"{name} must be numbers, got an array of {array.dtype}")
    tensor = torch.as_tensor(np.ascontiguousarray(array))
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def is_numbers(y: Any) -> bool:
    """Whether targets are floating numbers, so that the task is a regression."""
    return y.is_floating_point() if isinstance(y, Tensor) else np.asarray(y).dtype.kind == "f"


def encoded(y: Any, classes: Sequence[Any] | None = None) -> tuple[Tensor, tuple[Any, ...]]:
    """Labels as 0 … W−1, and the names of the classes in order.

    Args:
        classes: the names, in the order of the columns; by default the labels in y, sorted.

    >>> encoded(["cat", "dog", "cat"])
    (tensor([0, 1, 0]), ('cat', 'dog'))
    """
    array = y.detach().cpu().numpy() if isinstance(y, Tensor) else np.asarray(y)
    if array.ndim != 1:
        shape = tuple(array.shape)
        raise ValueError(f"y has shape {shape}; labels are one per example, (N,)")
    if array.dtype.kind == "f":
        raise ValueError("y is floating; labels are text, whole numbers, or true and false")
    values = array.tolist()
    if any(v is None for v in values):
        raise ValueError("y holds None, which is not a label")
    if classes is None:
        try:
            names = tuple(sorted(set(values)))
        except TypeError:
            raise ValueError("y mixes kinds of labels: make them all of one kind") from None
    else:
        names = tuple(classes)
        if len(set(names)) < len(names):
            raise ValueError(f"classes names a class twice: {names}")
        if missing := sorted({str(v) for v in values if v not in names}):
            raise ValueError(f"y has labels that classes does not name: {', '.join(missing[:5])}")
    index = {name: i for i, name in enumerate(names)}
    device = y.device if isinstance(y, Tensor) else "cpu"
    return torch.tensor([index[v] for v in values], device=device, dtype=torch.long), names


def decoded(indices: Tensor, classes: Sequence[Any]) -> np.ndarray:
    """The labels of class indices, as an array with the labels' own type."""
    names = np.empty(len(classes), dtype=object)
    names[:] = list(classes)
    labels = names[indices.detach().cpu().numpy()]
    return np.array(labels.tolist()) if len(labels) else labels
