"""Has the training loss risen far above its best, and what then? A run that lost what it had
learned is a fault, even if all its numbers are finite."""

from __future__ import annotations

import math
from collections import deque
from pathlib import Path
from statistics import median
from typing import Any

from ibaml.training.faults import Diverged
from ibaml.training.settings import Settings

WINDOW = 20  # iterations; their median counts as "the loss"
SPREADS = 10.0  # times the usual deviation of the losses
NATS = 1.0  # and at least this much
LOST = 0.3  # nats of validation nll above the best; more means that something was lost
SHRINK = 0.3  # the step size after a run went back to its best weights
RETURNS = 3  # how often a run may go back


class Rise:
    """Watches the training loss, iteration by iteration.

    The loss is the median of the last 20 iterations. It has risen far above its best if it is
    larger by at least one nat, and by ten times the largest deviation of single iterations in any
    window of 20 before. (The deviation at the best would be too small: lucky windows are quiet.)
    """

    def __init__(self) -> None:
        self.recent: deque[float] = deque(maxlen=WINDOW)
        self.best: float | None = None
        self.spread = 0.0
        self.last = 0.0  # deviation of the last full window, in which the loss may be rising
        self.seen = 0
        self.step = 0  # iteration of the best loss

    @property
    def loss(self) -> float | None:
        """The median of the last iterations; None until there are enough of them."""
        return median(self.recent) if len(self.recent) == WINDOW else None

    @property
    def bound(self) -> float:
        """A loss above this counts as a fault."""
        return math.inf if self.best is None else self.best + max(NATS, SPREADS * self.spread)

    @property
    def sentence(self) -> str:
        """What happened, once the loss has risen."""
        return (
            f"the training loss rose to {self.loss:.3g} (median of {WINDOW} iterations), far above "
            f"its best, {self.best:.3g} around iteration {self.step}"
        )

    def watch(self, step: int, loss: float) -> bool:
        """Record an iteration's loss; True if the loss has risen above the bound."""
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
            # 1.4826 turns the median of absolute deviations into a standard deviation
            self.spread = max(self.spread, self.last)
            self.last = 1.4826 * median(abs(one - now) for one in self.recent)
        if self.best is None:
            self.spread = self.last = 1.4826 * median(abs(one - now) for one in self.recent)
        if self.best is None or now < self.best:
            self.best, self.step = now, step
        return False

    def begin_anew(self) -> None:
        """Forget the last iterations, but not the best loss."""
        self.recent.clear()
        self.seen = 0

    def accept(self, step: int) -> None:
        """Take the present loss as the best, because nothing had gone wrong."""
        self.best, self.step = self.loss, step

    def facts(self) -> dict[str, Any]:
        return {
            "recent": list(self.recent), "best": self.best, "spread": self.spread,
            "last": self.last, "seen": self.seen, "step": self.step,
        }  # fmt: skip

    def restore(self, facts: dict[str, Any]) -> None:
        best = facts["best"]
        self.recent = deque((float(one) for one in facts["recent"]), maxlen=WINDOW)
        self.best, self.spread = None if best is None else float(best), float(facts["spread"])
        self.step, self.seen = int(facts["step"]), int(facts["seen"])
        self.last = float(facts["last"])


def no_way_back(
    rise: Rise, settings: Settings, step: int, returns: int, unsolved: str, best: Path | None
) -> Diverged:
    """The error that ends a run whose loss has risen and that has no best weights to go back to, or
    went back too often.

    Args:
        returns: how often it went back.
        unsolved: a sentence on the linear systems behind the gradient.
        best: where the best weights are kept.
    """
    assert settings.meta_lr is not None
    why = f" after {returns} returns to the best weights" if returns else ""
    advice = (
        f"The best weights on the validation tasks are kept ({best})."
        if best is not None
        else "No weights were validated before; with validation tasks (val_every) a run "
        "goes back to its best ones."
    )
    return Diverged(
        f"stopped in iteration {step}: {rise.sentence}{why}. Lower meta_lr (now "
        f"{settings.meta_lr:g}, try {settings.meta_lr * SHRINK ** (returns + 1):.1g}). "
        f"{unsolved}{advice}"
    )
