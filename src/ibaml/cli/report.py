"""``ibaml report``: how does a person look at results? As one file of HTML."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ibaml.cli.data import decoding
from ibaml.cli.evaluate import counting, short_names
from ibaml.cli.screen import errors_as_sentences, say, say_if_without_pictures

_HELP = """Write one HTML page about runs, a classifier or a reproduction.

    RUN is a run folder (several are put side by side), a classifier that
    `ibaml predict --save` wrote, or a folder of `ibaml reproduce`. The file holds
    its pictures, fetches nothing and runs nothing.

    What `ibaml evaluate` wrote is shown. A run that was not evaluated is judged on
    validation tasks; test tasks are left to `ibaml evaluate`.

    Examples:

    ibaml report runs/omniglot

    ibaml report runs/ibaml runs/maml --out compare.html

    ibaml report shop.ibaml --pictures products/

    ibaml report runs/paper"""


def command(app: typer.Typer) -> None:
    """Add the command."""
    app.command("report", help=_HELP)(_report)


def _report(
    run: Annotated[list[Path], typer.Argument(help="Run folders, a classifier, a reproduction.")],
    out: Annotated[
        Path | None,
        typer.Option(help="File (default: report.html in the first folder)."),
    ] = None,
    tasks: Annotated[
        int, typer.Option(min=1, help="Validation tasks, for runs that were not evaluated.")
    ] = 200,
    pictures: Annotated[
        Path | None, typer.Option(help="Folder of a classifier's examples, to show them.")
    ] = None,
    device: Annotated[str, typer.Option(help="Device: auto, cpu, cuda or cuda:N.")] = "auto",
) -> None:
    with errors_as_sentences():
        from ibaml.machine import keep_freed_memory
        from ibaml.pages import report

        keep_freed_memory()
        say_if_without_pictures()
        with decoding() as on_decoded, counting(tasks) as count:
            page = report(
                short_names(run), out, tasks=tasks, device=device, pictures=pictures,
                on_task=count, progress=on_decoded,
            )  # fmt: skip
    say(page)
