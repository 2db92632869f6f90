"""Has the training loss risen far above its best? A run that lost what it had learned is a fault,
however finite its numbers are."""

from __future__ import annotations

import math
from collections import deque
from statistics import median
from typing import Any

WINDOW = 20  # iterations whose median is "the loss"
SPREADS = 10.0  # times the losses' usual deviation
NATS = 1.0  # and at least so much


class Rise:
    """Watches the training loss, iteration by iteration.

    The loss is the median of the last 20 iterations. It has risen far above its best where it is
    larger by ten times the largest deviation that single iterations had in any 20 before, and by
    one nat at least. (Not the deviation at the best: the luckiest window is a quiet one.)
    """

    def __init__(self) -> None:
        self.recent: deque[float] = deque(maxlen=WINDOW)
        self.best: float | None = None
        self.spread = 0.0
        self.last = 0.0  # deviation of the last whole window, which may be the one that rises
        self.seen = 0
        self.step = 0  # of the best

    @property
    def loss(self) -> float | None:
        """The median of the last iterations, once there are enough of them."""
        return median(self.recent) if len(self.recent) == WINDOW else None

    @property
    def bound(self) -> float:
        """The loss from which on it counts as a fault."""
        return math.inf if self.best is None else self.best + max(NATS, SPREADS * self.spread)

    def watch(self, step: int, loss: float) -> bool:
        """Take note of an iteration's loss; True where the loss has risen beyond the bound."""
        if not math.isfinite(loss):
            return False
        self.recent.append(loss)
        self.seen += 1
        now = self.loss
        if now is None:
            return False
        if now > self.bound:
            return True
        if self.seen % WINDOW == 0:
            # 1.4826: the median of absolute deviations as a standard deviation
            self.spread = max(self.spread, self.last)
            self.last = 1.4826 * median(abs(one - now) for one in self.recent)
        if self.best is None:
            self.spread = self.last = 1.4826 * median(abs(one - now) for one in self.recent)
        if self.best is None or now < self.best:
            self.best, self.step = now, step
        return False

    def begin_anew(self) -> None:
        """Forget the last iterations, not the best."""
        self.recent.clear()
        self.seen = 0

    def accept(self, step: int) -> None:
        """Take the present loss for the best: nothing had gone wrong."""
        self.best, self.step = self.loss, step

    def facts(self) -> dict[str, Any]:
        return {
            "recent": list(self.recent), "best": self.best, "spread": self.spread,
            "last": self.last, "seen": self.seen, "step": self.step,
        }  # fmt: skip

    def restore(self, facts: dict[str, Any]) -> None:
        self.recent = deque(facts["recent"], maxlen=WINDOW)
        self.best, self.spread, self.step = facts["best"], facts["spread"], facts["step"]
        self.last, self.seen = facts["last"], facts["seen"]
