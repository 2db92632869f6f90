"""Where does a run's time go? Seconds by the kind of work, without overlaps."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

OUTSIDE = "outside"


class Spans:
    """Adds up the seconds of spans by name. Inside a nested span the outer one's time stands still;
    time in no span is ``"outside"``. The processor's seconds (of all threads) are kept beside.

    >>> spans = Spans()
    >>> with spans("data"):
    ...     pass
    >>> spans.counts["data"]
    1
    """

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.processor: defaultdict[str, float] = defaultdict(float)
        self.counts: Counter[str] = Counter()
        self._open = [OUTSIDE]
        self._since = _now()

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        self.settle()
        self._open.append(name)
        self.counts[name] += 1
        try:
            yield
        finally:
            self.settle()
            self._open.pop()

    def settle(self) -> None:
        """Give the time since the last change to the span that is open, so that sums are exact."""
        now = _now()
        self.seconds[self._open[-1]] += now[0] - self._since[0]
        self.processor[self._open[-1]] += now[1] - self._since[1]
        self._since = now


def _now() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()
