"""``ibaml evaluate`` and ``ibaml compare``: how good is a run, and which of several is better?"""

from __future__ import annotations

import math
import shlex
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from ibaml.cli.data import decoding
from ibaml.cli.options import with_options
from ibaml.cli.screen import console, errors_as_sentences, say, say_if_without_pictures
from ibaml.files import real

_METRICS = {
    "accuracy": ("accuracy", 100, 1, " %"),
    "nll": ("nll", 1, 3, ""),
    "brier": ("Brier", 1, 3, ""),
    "ece": ("ECE", 100, 1, " %"),
    "mce": ("MCE", 100, 1, " %"),
    "rmse": ("RMSE", 1, 3, ""),
    "coverage": ("in 95 % interval", 100, 1, " %"),
}


def commands(app: typer.Typer) -> None:
    """Add both commands, with one option for every field of `Protocol`."""
    from ibaml.assessment import Protocol

    app.command("evaluate")(with_options(evaluate, Protocol))
    app.command("compare")(with_options(compare, Protocol))


def evaluate(
    run: Annotated[Path, typer.Argument(help="A run folder that `ibaml train` made.")],
    out: Annotated[Path | None, typer.Option(help="Folder (default: RUN/evaluation).")] = None,
    **given: Any,
) -> None:
    """Test a run on new tasks: accuracy, nll, calibration, pictures.

    Every figure has a 95 % interval over tasks. The folder also gets a CSV with a row per task.

    ECE and MCE use the top label and 15 bins of equal width. See docs/evaluation.md.
    """
    from ibaml.assessment import Protocol, assess, write_assessment
    from ibaml.machine import keep_freed_memory
    from ibaml.training import open_run

    keep_freed_memory()
    with errors_as_sentences():
        protocol = Protocol.of(given)
        say_if_without_pictures()
        found_run = open_run(run)
        folder = out or found_run.own("evaluation")
        folder.mkdir(parents=True, exist_ok=True)  # fails now, not at the end
        with decoding() as on_decoded, counting(protocol.tasks) as count:
            judged = assess(found_run, protocol, on_progress=count, progress=on_decoded)
        facts = {"run": str(run), "protocol": vars(protocol), "data": judged.source.name}
        files = write_assessment(judged, folder, facts, protocol.split)
    title = f"{found_run.settings.method} on {judged.source.name}, {_tasks(protocol, judged.main)}"
    column = "" if "" in judged.scores else "norm_stats"
    target = judged.source.target
    show({name: s.summary() for name, s in judged.scores.items()}, title, column, target=target)
    if most := max(judged.diverged.values()):
        what = "tasks" if judged.main.groups is None else "draws"
        say(f"adaptation diverged in {most} of {protocol.tasks} {what}: there the prior predicts")
    for file in files:
        say(f"  {file}")
    if out is None:
        say(f"Next: ibaml report {shlex.quote(str(run))} (a page of it)")


def compare(
    runs: Annotated[list[Path], typer.Argument(help="Two or more run folders.")],
    out: Annotated[Path, typer.Option(help="Folder for table and picture.")] = Path("runs/compare"),
    **given: Any,
) -> None:
    """Test several runs on the same tasks, and show how they differ.

    Every figure has a 95 % interval. So has its difference from the first run, task by task.
    """
    from ibaml.assessment import Protocol, assess, comparable, differences, write_comparison
    from ibaml.training import open_run

    with errors_as_sentences():
        if len(runs) < 2:
            raise ValueError("compare needs two run folders or more")
        protocol = Protocol.of(given)
        say_if_without_pictures()
        opened = {name: open_run(path) for name, path in short_names(runs).items()}
        comparable(list(opened.values()), protocol)
        out.mkdir(parents=True, exist_ok=True)
        scores = {}
        for name, run in opened.items():
            with decoding() as on_decoded, counting(protocol.tasks, name) as count:
                judged = assess(
                    run, protocol, also_transductive=False, on_progress=count, progress=on_decoded
                )
                scores[name], target = judged.main, judged.source.target
        title = f"{_tasks(protocol, judged.main)}, the same for all"
        files = write_comparison(scores, out, {"protocol": vars(protocol)}, title, target)
    show({name: s.summary() for name, s in scores.items()}, title, target=target)
    against = f"minus {next(iter(opened))} (* the interval excludes 0)"
    show(differences(scores), against, sign="+", target=target)
    for file in files:
        say(f"  {file}")


def _tasks(protocol: Any, scores: Any) -> str:
    steps = "" if protocol.steps is None else f", {protocol.steps} steps of adaptation"
    draws = "" if scores.groups is None else f", {protocol.tasks:,} draws"
    return f"{scores.distinct:,} {protocol.split} tasks{draws}{steps}"


def short_names(runs: list[Path], taken: Collection[str] = ()) -> dict[str, Path]:
    """A short name for each folder, all of them different, and none that is taken."""
    short = [path.name or str(path) for path in runs]
    if len({*short, *taken}) < len(short) + len(taken):
        short = [str(path) for path in runs]
    if len({real(path) for path in runs}) < len(runs):
        raise ValueError("the same run is named twice")
    return dict(zip(short, runs, strict=True))


def show(
    rows: Mapping[str, Mapping[str, Any]],
    title: str,
    column: str = "",
    sign: str = "",
    target: Any = None,
) -> None:
    """Print a table of figures with their intervals (± where symmetric). Errors of a ``target`` are
    in its own units."""
    titles = {metric: words[0] for metric, words in _METRICS.items()}
    if target is not None:
        titles |= {"nll": "nll (standardized)", "rmse": f"RMSE of {target.name}"}
    table = Table(title=escape(title), padding=(0, 1, 0, 0))
    table.add_column(column, no_wrap=True)
    metrics = list(next(iter(rows.values())))
    for metric in metrics:
        table.add_column(titles[metric], justify="right")
    for name, summary in rows.items():
        own = {"rmse": _digits(summary["rmse"])} if target is not None else {}
        cells = (written(summary[m], m, sign, own.get(m)) for m in metrics)
        table.add_row(name, *cells)
    console.print(table, markup=False)


def _digits(interval: Any) -> int:
    """How many decimals show three significant digits of a figure."""
    size = max(abs(n) for n in (interval.value, interval.low, interval.high) if math.isfinite(n))
    return max(0, 2 - math.floor(math.log10(size))) if size else 0


def written(interval: Any, metric: str, sign: str = "", decimals: int | None = None) -> str:
    """A figure and its 95 % interval, on two lines."""
    _, scale, digits, unit = _METRICS[metric]
    digits = digits if decimals is None else decimals
    value, low, high = (scale * n for n in (interval.value, interval.low, interval.high))
    star = " *" if sign and (interval.low > 0 or interval.high < 0) else ""
    text = f"{value:{sign}.{digits}f}"
    if abs((high - value) - (value - low)) < 0.5 * 10**-digits:
        return f"{text}{unit}{star}\n± {high - value:.{digits}f}"
    return f"{text}{unit}{star}\n{low:.{digits}f} … {high:.{digits}f}"


@contextmanager
def counting(tasks: int, label: str = "") -> Iterator[Any]:
    """A progress bar for each kind of batch-norm statistics that is evaluated."""
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    known: dict[str, Any] = {}
    with Progress(*columns, console=console, transient=True) as bar:

        def count(name: str, done: int) -> None:
            if name not in known:
                known[name] = bar.add_task(f"testing {label} {name}".strip(), total=tasks)
            bar.update(known[name], completed=done)

        yield count
