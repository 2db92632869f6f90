"""Who has asked the run to stop? A first Ctrl-C or SIGTERM asks for an end after this iteration; a
second one is obeyed at once."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
    """The signal that this process caught, and the one that all processes know of; 0: none.

    Processes stop after the same iteration: `caught` is summed over them, and `agree` takes the
    sums.
    """

    def __init__(self) -> None:
        self._asked = 0
        self._agreed = 0

    def ask(self) -> None:
        """Ask for an end as SIGTERM does, unless somebody has."""
        self._asked = self._asked or signal.SIGTERM

    def caught(self) -> list[bool]:
        """Which of the signals this process caught."""
        return [self._asked == number for number in _SIGNALS]

    def agree(self, counts: Sequence[float]) -> None:
        """By how many processes each of the signals was caught."""
        caught_by = zip(_SIGNALS, counts, strict=True)
        self._agreed = next((number for number, count in caught_by if count), 0)

    def signal(self, world: int) -> int:
        """The signal to stop by: at once in one process, when all know of it in several."""
        return self._asked if world == 1 else self._agreed

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Catch the signals for a while."""

        def ask(number: int, _: Any) -> None:
            self._asked = number
            signal.signal(number, before.get(number) or signal.SIG_DFL)

        before: dict[int, Any] = {}
        try:
            for wanted in _SIGNALS:
                before[wanted] = signal.signal(wanted, ask)
        except ValueError:  # not the main thread: signals are somebody else's
            pass
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
