"""How are the moments of a batch norm's input collected? The norm computes them anyway and passes
them to a listener, so that they are not computed again."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from ibaml.execution.marks import LISTENER


class MomentsListener:
    """Receives the mean and biased variance of one batch norm's input, both (folds, channels)."""

    def __init__(self, on_moments: Callable[[Tensor, Tensor], None]) -> None:
        self._on_moments = on_moments
        self.expected = False  # whether a batch norm will report them
        self.received = False

    def __call__(self, mean: Tensor, var: Tensor, folds: int) -> None:
        """Report the moments of every channel, one fold after the other."""
        self.received = True
        self._on_moments(mean.unflatten(0, (folds, -1)), var.unflatten(0, (folds, -1)))


def listen(x: Tensor, listener: MomentsListener) -> None:
    """Let the next batch norm that reads x report its moments to the listener."""
    setattr(x, LISTENER, listener)


def listener_of(x: Tensor) -> MomentsListener | None:
    return getattr(x, LISTENER, None)
