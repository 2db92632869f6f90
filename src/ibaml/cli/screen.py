"""How does the command line print text, errors and the progress of a run?"""

from __future__ import annotations

import re
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.segment import Segment

from ibaml.extras import MissingLibrary, missing

if TYPE_CHECKING:
    from ibaml.training.watch import Step


class Screen(Console):
    """Prints what tells a terminal to do something (an escape sequence in the name of a file, say)
    as characters that can be read."""

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterator[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(readable(segment.text), segment.style)


def readable(text: str) -> str:
    """The text with control characters, and those that turn the direction of writing, escaped."""
    return _CONTROL.sub(lambda found: ascii(found[0])[1:-1], text)


_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")

console = Screen(emoji=False)  # a path may contain :100:


def say(text: object, style: str | None = None) -> None:
    """Print text as it is: the name of a file may look like markup."""
    console.print(
        str(text), style=style, markup=False, emoji=False, highlight=False, soft_wrap=True
    )


@contextmanager
def errors_as_sentences() -> Iterator[None]:
    """Print an error that a person can fix as a sentence without a traceback, and exit with 1."""
    from ibaml.tasks.download import DownloadError
    from ibaml.training import TrainingError
    from ibaml.training.faults import first_line, out_of_memory

    mended = (
        ValueError, OSError, DownloadError, TrainingError, FloatingPointError, MissingLibrary,
        MemoryError,
    )  # fmt: skip
    try:
        yield
    except mended as error:
        say(f"Error: {error or 'there is not enough memory'}", style="red")
        raise typer.Exit(1) from error
    except RuntimeError as error:
        if not out_of_memory(error):
            raise
        say(f"Error: there is not enough memory ({first_line(error)})", style="red")
        raise typer.Exit(1) from error


@contextmanager
def notes_as_sentences() -> Iterator[None]:
    """Print a `DataWarning` as a sentence, without the place in the code that gave it."""
    from ibaml.tasks.errors import DataWarning

    with warnings.catch_warnings():
        warnings.simplefilter("always", DataWarning)
        usual = warnings.showwarning

        def show(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
            if issubclass(category, DataWarning):
                say(message, style="yellow")
            else:
                usual(message, category, *where, **more)

        warnings.showwarning = show
        yield


def say_if_without_pictures() -> None:
    """Warn before the work that there will be no pictures, where matplotlib is missing."""
    if (sentence := missing("matplotlib")) is not None:
        say(f"{sentence}. Continuing without.", style="yellow")


class LiveView:
    """A progress bar with the figures of the run on a terminal, plain lines elsewhere."""

    def __init__(self, every: int, second: str) -> None:
        self._every = every
        self._second = second  # accuracy or rmse
        self._validation = ""
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._total = 0
        self._began = time.monotonic()
        self._tasks = 0
        self._recent: list[Step] = []

    def started(self, first: int, total: int) -> None:
        self._total, self._began, self._first = total, time.monotonic(), first
        if first:
            say(f"resuming after iteration {first} of {total}")
        if console.is_terminal:
            self._bar = Progress(
                TextColumn("[bold]meta-training"),
                BarColumn(bar_width=24),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TextColumn("left"),
                TimeRemainingColumn(),
                TextColumn("{task.fields[figures]}", markup=False),
                console=console,
            )
            self._task = self._bar.add_task("train", total=total, completed=first, figures="")
            self._bar.start()

    def stepped(self, step: Step) -> None:
        self._tasks += step.tasks
        self._recent = [*self._recent, step][-self._every :]
        due = step.step % self._every == 0 or step.step == self._total
        if self._bar is not None and self._task is not None:
            if due or len(self._recent) < self._every:
                self._bar.update(self._task, completed=step.step, figures=self._figures())
            else:
                self._bar.update(self._task, completed=step.step)
        elif due:
            share = (step.step - self._first) / max(1, self._total - self._first)
            spent = time.monotonic() - self._began
            left = spent * (1 - share) / max(share, 1e-9)
            say(f"{step.step}/{self._total}  {self._figures()}  left {_clock(left)}")

    def _figures(self) -> str:
        steps = self._recent
        finite = [s.loss for s in steps if s.loss == s.loss]
        speed = self._tasks / max(time.monotonic() - self._began, 1e-9)
        parts = [f"{speed:.3g} tasks/s"]
        if finite:
            parts.append(f"loss {sum(finite) / len(finite):.3f}")
        if self._validation:
            parts.append(self._validation)
        residuals = [s.cg_residual for s in steps if s.cg_residual is not None]
        if residuals:
            parts.append(f"CG residual {residuals[-1]:.1e}")
        unsolved = [s.unsolved for s in steps if s.unsolved is not None]
        if unsolved and unsolved[-1] > 0:
            parts.append(f"unsolved {100 * unsolved[-1]:.0f} %")
        out, total = sum(s.left_out for s in steps), sum(s.tasks for s in steps)
        parts.append(f"diverged {100 * out / max(total, 1):.0f} %")
        return "  ".join(parts)

    def validated(self, step: int, scores: dict[str, float], best: bool) -> None:
        value = scores[self._second]
        shown = f"{100 * value:.1f} %" if self._second == "accuracy" else f"{value:.3f}"
        self._validation = f"val {self._second} {shown} nll {scores['nll']:.3f}"
        if (t := scores.get("temperature", 1.0)) != 1.0:
            self._validation += f" temperature {t:.2f}"
        if self._bar is None:
            say(f"{step}/{self._total}  {self._validation}{'  (best so far)' if best else ''}")

    def message(self, text: str) -> None:
        say(text, style="dim")

    def ended(self) -> None:
        if self._bar is not None:
            self._bar.stop()


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}"
