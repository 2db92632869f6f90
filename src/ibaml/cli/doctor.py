"""``ibaml doctor``: what is wrong with a run, and which setting is to be changed?"""

from __future__ import annotations

import json as as_json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from ibaml.cli.screen import console, errors_as_sentences, say
from ibaml.words import NORM_STATS

if TYPE_CHECKING:
    from ibaml.doctor import Checkup

HELP = """Examine a run: what is wrong, and which setting to change.

    Nothing is trained. The run's weights answer validation tasks as they are,
    and again with one setting changed at a time: a tenth of β, a narrower
    prior, shorter steps, more of them, other statistics of batch norm. A
    setting is to blame if another value is better for sure. The meta-gradient
    is compared with the unrolled one, and the data are searched for leaks and
    shuffled labels.

    Examples:

    ibaml doctor runs/glyphs

    ibaml doctor runs/glyphs --tasks 100

    ibaml doctor runs/glyphs --norm-stats batch

    ibaml doctor runs/glyphs --json

    The verdict is one sentence, with the command that changes the setting.
    RUN/doctor.json has every figure. The exit status is 0 also where something
    is wrong. See docs/doctor.md for each figure and threshold."""


def command(app: typer.Typer) -> None:
    app.command("doctor", help=HELP)(doctor)


def doctor(
    run: Annotated[Path, typer.Argument(help="A run folder that `ibaml train` made.")],
    tasks: Annotated[int, typer.Option(min=2, help="Validation tasks to measure on.")] = 32,
    norm_stats: Annotated[
        str | None,
        typer.Option(
            help="Batch norm's statistics in your predictions: running, support or batch.",
            show_default="what learner.adapt uses",
        ),
    ] = None,
    which: Annotated[
        str, typer.Option(help="Weights: best (on the validation tasks) or last.")
    ] = "best",
    device: Annotated[str, typer.Option(help="Device: auto, cpu, cuda or cuda:N.")] = "auto",
    json: Annotated[
        bool, typer.Option("--json", help="Print the figures as JSON instead of a table.")
    ] = False,
) -> None:
    from ibaml.cli.data import decoding
    from ibaml.doctor import FILE, examine
    from ibaml.machine import keep_freed_memory, threads
    from ibaml.training import open_run

    keep_freed_memory()
    with errors_as_sentences():
        for name, value, words in (
            ("--norm-stats", norm_stats, NORM_STATS), ("--which", which, ("best", "last")),
        ):  # fmt: skip
            if value is not None and value not in words:
                raise ValueError(f"{name} must be one of {', '.join(words)}, got {value!r}")
        found = open_run(run)
        with threads(found.settings.threads), decoding() as progress, _measuring() as on_measure:
            checkup = examine(
                found, tasks=tasks, norm_stats=norm_stats, which=which, device=device,  # type: ignore[arg-type]
                on_measure=on_measure, progress=progress,
            )  # fmt: skip
        file = checkup.write(run / FILE)
    if json:
        print(as_json.dumps(checkup.to_dict(), indent=2))
        return
    _show(checkup, str(run))
    say(checkup.verdict, style="green" if checkup.healthy else "bold yellow")
    if checkup.command:
        say(f"  {checkup.command}")
    for later in checkup.findings[1:]:
        say(f"also: {later.fault}: {later.change}", style="dim")
    say(f"  {file}")


@contextmanager
def _measuring() -> Iterator[Callable[[str], None]]:
    """Show what is measured now, on a terminal."""
    with console.status("opening the run") as status:
        yield lambda what: status.update(f"measuring: {what}")


def _show(checkup: Checkup, name: str) -> None:
    m, facts = checkup.measured, checkup.facts
    split = {"val": "validation", "train": "unseen training"}.get(checkup.split, checkup.split)
    table = Table(title=f"{name}: {m.tasks} {split} tasks", show_header=False, title_justify="left")
    table.add_column()
    table.add_column(justify="right", no_wrap=True)
    table.add_column()
    for row in [*_answers(checkup), *_solving(checkup), *_changes(checkup)]:
        table.add_row(*row)
    if facts is not None:
        for leak in facts.leaks:
            table.add_row("leak", f"{100 * leak.share:.1f} %", f"of {leak.split} is in train too")
        if facts.rate is not None and facts.own_rate is not None:
            what = f"tasks/s in the run; the meta-step alone, here and now: {facts.own_rate:.3g}"
            table.add_row("throughput", f"{facts.rate:.3g}", what)
    console.print(table, markup=False)


Row = tuple[str, str, str]


def _answers(checkup: Checkup) -> list[Row]:
    m, a = checkup.measured, checkup.measured.answers
    rows: list[Row] = [("nll", f"{a.nll:.3f}", f"of queries; at the best scale {a.informed:.3f}")]
    if m.regression:
        rows += [
            ("explained", f"{100 * a.right:.1f} %", "of the variance of a task's targets"),
            ("in 95 % interval", f"{100 * a.confidence:.1f} %", "of the targets"),
            ("errors", f"{a.scale:.2g}", "times the predicted deviations (1 is calibrated)"),
        ]
    else:
        side = "too sure" if a.gap > 0 else "not sure enough"
        rows += [
            ("accuracy", f"{100 * a.right:.1f} %", f"claimed {100 * a.confidence:.1f} %"),
            ("ECE", f"{100 * (a.error if a.gap > 0 else -a.error):+.1f} %", side),
            ("temperature", f"{a.scale:.2f}", "times the present one would be best"),
        ]
    return rows


def _solving(checkup: Checkup) -> list[Row]:
    m, g = checkup.measured, checkup.measured.gradient
    rows: list[Row] = []
    if m.prior.strength is not None:
        rows.append(("strength λ", f"{m.prior.strength:.2g}", "κ·exp(−ρ), beside the mean nll"))
    if m.prior.noise is not None:
        what = f"of prior draws, against the weights; {100 * m.answers.drawn:.0f} % of the outputs"
        rows.append(("noise", f"{m.prior.noise:.2g}", what))
    for block, norm in g.norms.items():
        rows.append((f"‖∇E‖ {block}", f"{norm:.1e}", "at the solutions, median"))
    for block in g.cosine:
        part = "means and shared weights" if block == "mean" else "log-variances"
        what = f"to the unrolled gradient, K = {g.steps}, {part}; norms {g.ratio[block]:.2f} : 1"
        rows.append(("cosine", f"{g.cosine[block]:.3f}", what))
    if g.slope is not None:
        what = "of the loss along its gradient, over what that says (1 is right)"
        rows.append(("slope", f"{g.slope:.4f}", what))
    if g.residual is not None:
        what = f"of CG; the gradient is {100 * (g.error or 0):.0f} % off the one of solved systems"
        rows.append(("residual", f"{g.residual:.1e}", what))
    rows.append(("diverged", f"{100 * m.answers.diverged:.0f} %", "of the tasks"))
    if m.norm is not None:
        alone = ", ".join(f"{kind} {nll:.3f}" for kind, nll in m.norm.alone.items())
        rows.append(("batch norm", " and ".join(m.norm.used), f"nll of lone queries: {alone}"))
    z = m.association.z
    rows.append(("labels", f"{z:+.0f} σ", "nearest example's target, against a random order"))
    return rows


_NAMES = {"spread": "narrower ρ", "strength": "weaker prior", "rate": "shorter steps",
          "steps": "more steps"}  # fmt: skip


def _changes(checkup: Checkup) -> list[Row]:
    """What the best other value of every setting gains."""
    rows = []
    for setting, words in _NAMES.items():
        best = checkup.measured.best_change(setting)
        if best is None:
            continue
        sign = "+" if setting == "spread" and best.factor > 0 else ""
        by = f"ρ {sign}{best.factor:g}" if setting == "spread" else f"× {best.factor:.3g}"
        gain = best.gain
        rows.append(
            (
                words,
                f"{gain.value:+.3f}",
                f"nats with {by} (95 % {gain.low:+.3f} … {gain.high:+.3f})",
            )
        )
    return rows
