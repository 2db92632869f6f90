"""What a person types."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table

from ibaml._version import __version__
from ibaml.cli import train
from ibaml.cli.data import app as data
from ibaml.cli.screen import console

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    help="""Implicit Bayesian meta-learning.

    From many small related tasks, learn a prior over a network's weights; then learn a new
    task from a few examples, and know how sure to be.

    Start with [bold]ibaml demo[/bold], which takes about a minute.""",
)
app.add_typer(data, name="data")
train.command(app)


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


def _advance(bar: Progress, task: TaskID, loss: float) -> None:
    bar.update(task, advance=1, loss=loss)


@app.command()
def methods() -> None:
    """List the methods: every one is a row of choices."""
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
    out: Annotated[Path, typer.Option(help="Where the picture and the figures go.")] = Path(
        "runs/demo"
    ),
    iterations: Annotated[
        int, typer.Option(min=1, help="Meta-training iterations of 16 tasks.")
    ] = 700,
) -> None:
    """Meta-train iBaML and MAML on sinusoids, then fit a new one from 0, 1, 5 and 10 examples."""
    from ibaml import demo as story

    out.mkdir(parents=True, exist_ok=True)
    learners = story.build()
    scores = {}
    began = time.monotonic()
    columns = (
        TextColumn("[bold]{task.description:>6}"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total} steps  loss {task.fields[loss]:7.3f}"),
        TimeRemainingColumn(),
    )
    for name, learner in learners.items():
        with Progress(*columns, console=console) as bar:
            task = bar.add_task(name, total=iterations, loss=float("nan"))
            story.train(learner, iterations, partial(_advance, bar, task))
        with console.status(f"testing {name} on new sinusoids"):
            scores[name] = story.score(learner)
    files = story.save(learners, scores, out)

    table = Table(title="100 new sinusoids")
    for title in ("learner", "examples", "RMSE", "nll", "inside the 95 % interval"):
        table.add_column(title, justify="left" if title == "learner" else "right")
    for name, rows in scores.items():
        for row in rows:
            nll = "–" if row.nll is None else f"{row.nll:.2f}"
            coverage = "–" if row.coverage is None else f"{100 * row.coverage:.0f} %"
            table.add_row(name, str(row.shots), f"{row.rmse:.2f}", nll, coverage)
    console.print(table)
    console.print(f"{time.monotonic() - began:.0f} s. Look at:")
    for file in files:
        console.print(f"  {file}", soft_wrap=True)
