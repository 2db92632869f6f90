"""``ibaml bench heads``: how good are simple heads on feature vectors, and is a run better?"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table

from ibaml.cli.evaluate import short_names, written
from ibaml.cli.progress import counting
from ibaml.cli.screen import console, errors_as_sentences, say

if TYPE_CHECKING:
    from ibaml.assessment import Compared


def heads(
    data: Annotated[str, typer.Argument(help="An .npz of vectors x (N, D) and labels y (N,).")],
    run: Annotated[
        list[Path] | None,
        typer.Option(
            "--run", help="A trained run or learner's file to put beside them; may be repeated."
        ),
    ] = None,
    out: Annotated[Path, typer.Option(help="JSON file of all figures.")] = Path("runs/heads.json"),
    **given: Any,
) -> None:
    """Test simple heads on feature vectors, and runs beside them.

    Nearest centroid, prototypes, logistic and ridge regression, Gaussian processes, LDA and PLDA
    answer the same new tasks. Hyper-parameters and a temperature are chosen on validation tasks.

    Differences in nll are from the first --run, or from the head that is best on the validation
    tasks. See docs/evaluation.md.
    """
    from ibaml.assessment import HeadsOptions, compare_heads, write_heads
    from ibaml.assessment.heads_options import HEADS

    with errors_as_sentences():
        options = HeadsOptions.of(given)
        names = short_names(run or [], HEADS.values())
        out.parent.mkdir(parents=True, exist_ok=True)  # fails now, not at the end
        with counting() as count:
            compared = compare_heads(data, options, names, count)
        facts = {"data": data, "runs": [str(path) for path in run or []], "options": vars(options)}
        file = write_heads(compared, out, facts)
    for one in compared:
        _show(one, options)
    say(f"  {file}")


def _show(compared: Compared, options: Any) -> None:
    shots = f"{compared.shots} shot{'s' * (compared.shots > 1)}"
    table = Table(
        title=f"{shots}, {options.ways} ways, {options.tasks:,} test tasks",
        caption=f"nll minus that of {compared.reference.label}; * the interval excludes 0",
        padding=(0, 1, 0, 0),
        box=SIMPLE_HEAD,
    )
    table.add_column("")
    for title in ("accuracy", "nll", "ECE", "difference\nin nll", "ms a\ntask"):
        table.add_column(title, justify="right", no_wrap=True)
    for row in compared.rows:
        name = row.name if row.log_t is None else f"  tempered, t {math.exp(row.log_t):.3g}"
        words = ", ".join(f"{name} {value:g}" for name, value in row.values.items())
        less = compared.differences.get(row.label)
        table.add_row(
            f"{name}\n  {words}".rstrip(),
            *(written(row.summary[name], name) for name in ("accuracy", "nll", "ece")),
            "–" if less is None else written(less["nll"], "nll", "+"),
            f"{1000 * row.seconds:.1f}",
        )
    console.print(table, markup=False)
    for note in compared.notes:
        say(f"  {note}")
