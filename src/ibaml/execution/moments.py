"""Who hears what a batch norm saw? Norms compute the moments of their input anyway, and those who
collect statistics take them from there instead of computing them again."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from ibaml.execution.marks import LISTENER


class MomentsListener:
    """Hears the mean and biased variance of what one batch norm sees, both (folds, channels)."""

    def __init__(self, on_moments: Callable[[Tensor, Tensor], None]) -> None:
        self._on_moments = on_moments
        self.expected = False  # a batch norm has taken it on itself to say them
        self.received = False

    def __call__(self, mean: Tensor, var: Tensor, folds: int) -> None:
        """Say the moments of every channel, those of each fold after the other."""
        self.received = True
        self._on_moments(mean.unflatten(0, (folds, -1)), var.unflatten(0, (folds, -1)))


def listen(x: Tensor, listener: MomentsListener) -> None:
    """Let the batch norm that x goes into next say what it sees."""
    setattr(x, LISTENER, listener)


def listener_of(x: Tensor) -> MomentsListener | None:
    return getattr(x, LISTENER, None)
