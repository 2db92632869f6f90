"""How does a long measurement show its progress? A bar on a terminal, lines elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from ibaml.cli.screen import console, say

Count = Callable[[int, int, str], None]  # done, of how many, what comes next


@contextmanager
def counting() -> Iterator[Count]:
    """A function to call with the progress. Without a terminal it prints a line at every tenth of
    the work."""
    if not console.is_terminal:
        yield _by_tenths()
        return
    columns = (
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        TextColumn("{task.description}", markup=False),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total, what: bar.update(
            task, completed=done, total=total, description=what
        )


def _by_tenths() -> Count:
    last = -1

    def count(done: int, total: int, what: str) -> None:
        nonlocal last
        tenth = 10 * done // max(total, 1)
        if tenth > last:
            last = tenth
            say(f"{done}/{total}  {what}")

    return count
