"""``ibaml bench``: what does a meta-gradient cost here, how fast is a run, how good are simple
heads, and which method is best?"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from typer.core import TyperGroup
from typer.main import get_command

from ibaml.cli.heads import heads
from ibaml.cli.options import with_options
from ibaml.cli.progress import counting
from ibaml.cli.quality import quality
from ibaml.cli.screen import console, errors_as_sentences, say, say_if_without_pictures
from ibaml.cli.speed import training
from ibaml.extras import missing

if TYPE_CHECKING:
    from ibaml.paper.complexity.result import Measured

_PHASES = ("forward", "backward", "together")


class _Measurements(TyperGroup):
    """Builds the options of a command only when it is used, because they import `ibaml.paper`."""

    def list_commands(self, ctx: Any) -> list[str]:
        return ["complexity", "heads", "quality", "training"]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        alone = typer.Typer(add_completion=False)
        if cmd_name == "complexity":
            from ibaml.paper.complexity.sweep import Sweep

            alone.command(cmd_name)(with_options(complexity, Sweep))
        elif cmd_name == "heads":
            from ibaml.assessment import HeadsOptions

            alone.command(cmd_name)(with_options(heads, HeadsOptions))
        elif cmd_name == "quality":
            from ibaml.quality import QualityOptions

            alone.command(cmd_name)(with_options(quality, QualityOptions))
        elif cmd_name == "training":
            from ibaml.speed import SpeedOptions

            alone.command(cmd_name)(with_options(training, SpeedOptions))
        else:
            return None
        return get_command(alone)


def commands(app: typer.Typer) -> None:
    """Add ``bench`` and what is under it."""
    bench = typer.Typer(
        cls=_Measurements,
        no_args_is_help=True,
        help="Measure meta-gradients and whole runs; compare heads and methods.",
    )
    bench.callback()(lambda: None)  # typer needs a callback where no command is registered
    app.add_typer(bench, name="bench")


def complexity(
    out: Annotated[Path, typer.Option(help="Folder for CSV, picture and JSON.")] = Path(
        "runs/complexity"
    ),
    json: Annotated[
        Path | None, typer.Option(help="File for the points (default: OUT/complexity.json).")
    ] = None,
    from_: Annotated[
        Path | None, typer.Option("--from", help="Do not measure; show this JSON file.")
    ] = None,
    **given: Any,
) -> None:
    """Measure time and memory of the meta-gradient as K and L grow.

    This is Figure 2 of the paper, on this machine.

    It measures forward (adaptation and query loss), backward (the meta-gradient) and both together
    for MAML, iMAML, ABML and iBaML, and writes a table, a CSV and a picture.
    Options that take several values have commas between them: --ks 1,5,10

    To measure a machine that has only torch and numpy, run python -m ibaml.complexity --json FILE
    there, then ibaml bench complexity --from FILE here. See docs/complexity.md.
    """
    from ibaml.paper.complexity.findings import written
    from ibaml.paper.complexity.measure import measure
    from ibaml.paper.complexity.picture import draw_complexity
    from ibaml.paper.complexity.result import read
    from ibaml.paper.complexity.sweep import Sweep

    with errors_as_sentences():
        if from_ is not None:
            _refuse_beside_from(json, given)
            measured = read(from_)
            say_if_without_pictures()
            out.mkdir(parents=True, exist_ok=True)
            files = []
        else:
            sweep = Sweep.of(given)
            out.mkdir(parents=True, exist_ok=True)  # fails now, not at the end
            say_if_without_pictures()
            with counting() as count:
                measured = measure(sweep, count)
            files = [measured.write_json(json or out / "complexity.json")]
        files.append(measured.write_csv(out / "complexity.csv"))
        if missing("matplotlib") is None:
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
        raise ValueError(f"{named[0]} does not go with --from, which measures nothing")


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
    """A number with three significant digits."""
    if number is None:
        return "–"
    digits = max(0, 2 - math.floor(math.log10(abs(number)))) if number else 0
    return f"{number:,.{digits}f}"
