"""Was the run asked to stop? A first Ctrl-C or SIGTERM stops it after this iteration, a second one
at once."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
    """The signal that this process caught, and the one all processes agreed on; 0 means none.

    Processes stop after the same iteration: `caught` is summed over them, and `agree` takes the
    sums.
    """

    def __init__(self) -> None:
        self._asked = 0
        self._agreed = 0

    def ask(self) -> None:
        """Ask the run to stop as SIGTERM does, unless it was asked already."""
        self._asked = self._asked or signal.SIGTERM

    def caught(self) -> list[bool]:
        """For each signal, whether this process caught it."""
        return [self._asked == number for number in SIGNALS]

    def agree(self, counts: Sequence[float]) -> None:
        """Take the number of processes that caught each signal."""
        caught_by = zip(SIGNALS, counts, strict=True)
        self._agreed = next((number for number, count in caught_by if count), 0)

    def signal(self, world: int) -> int:
        """The signal to stop for. Several processes wait until all of them know it."""
        return self._asked if world == 1 else self._agreed

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Catch the signals inside the block."""

        def ask(number: int, _: Any) -> None:
            self._asked = number
            signal.signal(number, before.get(number) or signal.SIG_DFL)

        before: dict[int, Any] = {}
        try:
            for wanted in SIGNALS:
                before[wanted] = signal.signal(wanted, ask)
        except ValueError:  # signals can be caught in the main thread only
            pass
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
