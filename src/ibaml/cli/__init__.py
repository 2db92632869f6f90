"""Which commands does ``ibaml`` have?"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from ibaml._version import __version__
from ibaml.cli import bench, doctor, embed, evaluate, predict, report, reproduce, serve, train
from ibaml.cli.data import app as data
from ibaml.cli.screen import LiveView, console, errors_as_sentences, say

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    help="""Implicit Bayesian meta-learning.

    From many small related tasks, learn a prior over a network's weights.
    Then learn a new task from a few examples, and know how sure to be.

    Start with [bold]ibaml demo[/bold], which takes about two minutes.""",
)
app.add_typer(data, name="data")
train.command(app)
embed.command(app)
predict.commands(app)
serve.command(app)
evaluate.commands(app)
report.command(app)
doctor.command(app)
bench.commands(app)
reproduce.command(app)


def _version(value: bool) -> None:
    if value:
        console.print(f"ibaml {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


@app.command()
def methods() -> None:
    """List the methods, and the choices each one makes."""
    from ibaml import methods as recipes

    rows = [line for line in (recipes.__doc__ or "").splitlines() if line.startswith("|")]
    table = Table()
    for title in rows[0].strip("|").split("|"):
        table.add_column(title.strip())
    for row in rows[2:]:
        table.add_row(*(cell.strip() for cell in row.strip("|").split("|")))
    console.print(table)
    console.print("In Python: ibaml.methods.NAME(model, ...). See docs/methods.md.")


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Folder for the run and its pictures.")] = Path(
        "runs/demo"
    ),
    iterations: Annotated[int, typer.Option(min=1, help="Meta-iterations of 8 tasks.")] = 600,
    tasks: Annotated[int, typer.Option(min=2, help="Number of test tasks.")] = 200,
) -> None:
    """Meta-train iBaML on characters, and test it on unseen scripts.

    Each test task has five characters of an unseen script, with one example each.
    This takes about two minutes on two cores.
    """
    from ibaml import demo as story
    from ibaml.machine import keep_freed_memory

    keep_freed_memory()

    began = time.monotonic()
    with errors_as_sentences():
        out.mkdir(parents=True, exist_ok=True)
        run, outcome = story.meta_train(
            out, iterations, lambda run, learner: [LiveView(run.settings.log_every, "accuracy")]
        )
        if outcome.signal is not None:
            say(f"saved after iteration {outcome.step}; the same command continues")
            raise typer.Exit(128 + outcome.signal)
        with evaluate.counting(tasks) as count:
            result = story.judge(run, out, tasks, count)
    table = Table(title=f"{tasks} new tasks: 5 characters of unseen scripts, 1 example each")
    for title in ("", "accuracy", "iBaML's lead", "nll", "ECE"):
        table.add_column(title, justify="left" if not title else "right")
    for name, figures in result.figures.items():
        cells = [evaluate.written(figures["accuracy"], "accuracy")]
        lead = result.leads.get(name)
        cells.append("" if lead is None else evaluate.written(lead, "accuracy", "+"))
        cells += [evaluate.written(figures[m], m) if m in figures else "–" for m in ("nll", "ece")]
        table.add_row(name, *cells)
    console.print(table)
    say(f"{time.monotonic() - began:.0f} s. Intervals are 95 %, over tasks. Files:")
    for file in result.files:
        say(f"  {file}")
    say(f"Next: ibaml report {run.path} (a page to look at); ibaml train --help")
