"""Which notes do tensors carry while a network runs by the rules of `fold_rules`?

All notes are listed here. A note is a plain attribute of one tensor object: operations do not copy
it, so each rule writes it on its result. A tensor without a note is an ordinary one. Notes do not
outlive the pass, because the noted tensors are made in it.
"""

from __future__ import annotations

from torch import Tensor

FOLDS = "_ibaml_folds"  # how many folds an activation holds: int
OWN = "_ibaml_own"  # this weight has a leading dimension, one value for every weight set: True
LISTENER = "_ibaml_listener"  # receives the moments of this input of a norm: MomentsListener
BIAS = "_ibaml_bias"  # a convolution's bias that was not added yet: Tensor, and whether to record
NORM = "_ibaml_norm"  # the batch norm that this tensor without values stands for: DeferredNorm
DONE = "_ibaml_done"  # the values of an operation that waited, once `now` has run it: Tensor


def mark_folds(x: Tensor, folds: int) -> Tensor:
    setattr(x, FOLDS, folds)
    return x


def is_folded(x: Tensor) -> bool:
    return hasattr(x, FOLDS)


def folds_of(x: Tensor) -> int:
    """How many folds an activation holds; 1 outside this layout."""
    return int(getattr(x, FOLDS, 1))


def mark_own(w: Tensor) -> Tensor:
    setattr(w, OWN, True)
    return w


def is_own(w: Tensor | None) -> bool:
    """Whether a weight has a different value for every weight set."""
    return hasattr(w, OWN)
