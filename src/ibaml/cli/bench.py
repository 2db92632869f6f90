"""``ibaml bench``: what does it cost here?"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from ibaml.cli.options import with_options
from ibaml.cli.screen import console, say, told

if TYPE_CHECKING:
    from ibaml.complexity import Measured, Sweep

_PHASES = ("forward", "backward", "together")


def commands(app: typer.Typer) -> None:
    """Add ``bench`` and what is under it."""
    from ibaml.complexity import Sweep

    bench = typer.Typer(
        no_args_is_help=True, help="Measure what a meta-gradient costs on this machine."
    )
    bench.callback()(lambda: None)  # so that a single command keeps its name
    bench.command("complexity")(with_options(complexity, Sweep))
    app.add_typer(bench, name="bench")


def complexity(
    out: Annotated[Path, typer.Option(help="Where CSV, picture and JSON go.")] = Path(
        "runs/complexity"
    ),
    json: Annotated[
        Path | None, typer.Option(help="Where the points go (default: OUT/complexity.json).")
    ] = None,
    from_: Annotated[
        Path | None, typer.Option("--from", help="Measure nothing: show what this JSON holds.")
    ] = None,
    **given: Any,
) -> None:
    """Measure time and memory of the meta-gradient against K and L.

    This is Figure 2 of the paper, on this machine.

    Forward (adaptation and query loss), backward (the meta-gradient) and both together, for MAML,
    iMAML, ABML and iBaML; a table, a CSV and a picture. Several values have commas between them.

    On a machine with torch and numpy alone: python -m ibaml.complexity --json FILE; then, here,
    ibaml bench complexity --from FILE. See docs/complexity.md.
    """
    from ibaml.complexity import Sweep, measure, read, written
    from ibaml.report import draw_complexity

    with told():
        if from_ is not None:
            _refuse_beside_from(json, given)
            measured = read(from_)
            out.mkdir(parents=True, exist_ok=True)
            files = []
        else:
            sweep = Sweep.of(given)
            out.mkdir(parents=True, exist_ok=True)  # said now, not when all is done
            with _counting(sweep) as count:
                measured = measure(sweep, count)
            files = [measured.write_json(json or out / "complexity.json")]
        files.append(measured.write_csv(out / "complexity.csv"))
        files.append(draw_complexity(measured, out / "complexity.png"))
    _show(measured)
    for line in written(measured):
        say(line)
    for file in files:
        say(f"  {file}")


def _refuse_beside_from(json: Path | None, given: dict[str, Any]) -> None:
    from ibaml.fields import flag

    named = [flag(name) for name, value in given.items() if value is not None]
    named += ["--json"] if json is not None else []
    if named:
        raise ValueError(f"{named[0]} does not go with --from: that measures nothing")


@contextmanager
def _counting(sweep: Sweep) -> Iterator[Any]:
    """A bar over all that is measured; plain lines, tenth by tenth, where there is no terminal."""
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

        def count(done: int, total: int, what: str) -> None:
            bar.update(task, completed=done, total=total, description=what)
            if not console.is_terminal and done % max(1, total // 10) == 0:
                say(f"{done}/{total}  {what}")

        yield count


def _show(measured: Measured) -> None:
    say(measured.headline)
    say("; ".join(f"{name} {value}" for name, value in measured.machine.items()))
    table = Table(caption="per task: median milliseconds, peak megabytes", padding=(0, 1, 0, 0))
    for title in ("", "K", "L", *(f"{phase}\nms" for phase in _PHASES)):
        table.add_column(title, justify="left" if not title else "right", no_wrap=True)
    for title in ("forward", "kept", "backward"):
        table.add_column(f"{title}\nMB", justify="right", no_wrap=True)
    before = ""
    for point in measured.points:
        arm = point.arm
        if before and arm.label != before:
            table.add_section()
        cells = ["" if arm.label == before else arm.label, str(arm.steps), str(arm.cg_steps or "")]
        before = arm.label
        if point.backward is None or point.forward is None:
            table.add_row(*cells, point.problem)
            continue
        both = None if point.together is None else point.together.ms
        times = [point.forward.ms, point.backward.ms, both]
        memory = [point.forward.mb, point.kept_mb, point.backward.mb]
        table.add_row(*cells, *(_written(n) for n in (*times, *memory)))
    console.print(table, markup=False)


def _written(number: float | None) -> str:
    """Three digits that count."""
    if number is None:
        return "–"
    digits = max(0, 2 - math.floor(math.log10(abs(number)))) if number else 0
    return f"{number:,.{digits}f}"
