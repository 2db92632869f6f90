"""``ibaml train``: how does a person start or resume a run?"""

from __future__ import annotations

import shlex
import signal
from pathlib import Path
from typing import Annotated, Any

import typer

from ibaml.cli.options import with_options
from ibaml.cli.screen import LiveView, errors_as_sentences, say
from ibaml.fields import SettingsError, flag
from ibaml.training.rules import resolve
from ibaml.training.settings import Settings, read_toml

_START: dict[str, Any] = {"rich_help_panel": "Start and resume"}


def command(app: typer.Typer) -> None:
    """Add the command, with one option for every setting."""
    app.command("train", help=_HELP)(with_options(_train, Settings))


_HELP = """Meta-train a method on a dataset; the result is a run folder.

    [bold]ibaml train[/bold] with no options trains iBaML on glyphs, which need no download.

    Examples:

    ibaml train --data omniglot --ways 20 --shots 1 --out runs/omniglot

    ibaml train --data photos/ --method maml --steps 5 --inner-lr 0.1

    ibaml train --data sinusoids --shots 10

    ibaml train --config run.toml --seed 1

    ibaml train --resume runs/omniglot

    torchrun --nproc-per-node 4 -m ibaml train --data omniglot --out runs/omniglot

    A setting left out takes the default of its method and data; RUN/config.toml
    lists them all. Ctrl-C saves and stops; --resume continues exactly where the
    run stopped. See docs/training.md."""


def _train(
    out: Annotated[
        Path | None, typer.Option(help="Run folder (default: a new one in runs/).", **_START)
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="TOML file of settings; options override it.", **_START)
    ] = None,
    resume: Annotated[
        Path | None, typer.Option(help="Continue the run in this folder.", **_START)
    ] = None,
    **given: Any,
) -> None:
    from ibaml import training
    from ibaml.cli.data import decoding
    from ibaml.machine import keep_freed_memory
    from ibaml.training.processes import this_process

    keep_freed_memory()

    named = {name: value for name, value in given.items() if value is not None}
    first = this_process().first

    def watchers(run: training.Run, learner: Any) -> list[training.Watcher]:
        second = "rmse" if run.settings.regression else "accuracy"
        if not resume:
            _introduce(run, learner)
        return [LiveView(run.settings.log_every, second)]

    with errors_as_sentences():
        if resume is not None:
            changes = {"iterations", "micro_batch"}
            extra = sorted(set(named) - changes)
            if extra or config is not None or out is not None:
                what = flag(extra[0]) if extra else ("--config" if config else "--out")
                raise SettingsError(
                    f"{what} does not go with --resume: a run keeps its settings (only "
                    "--iterations and --micro-batch may change)"
                )
            with decoding() as progress:
                run, outcome = training.resume(
                    resume, **named, watchers=watchers, progress=progress
                )
        else:
            settings = resolve({**(read_toml(config) if config else {}), **named})
            if out is None and this_process().world > 1:
                raise SettingsError("--out: name the run folder when several processes train")
            folder = out if out is not None else free_folder(settings)
            with decoding() as progress:
                run, outcome = training.train(
                    settings, folder, watchers=watchers, progress=progress
                )
    if not first:
        return
    place = shlex.quote(str(run.path))
    if outcome.signal is not None:
        name = signal.Signals(outcome.signal).name
        say(f"{name}: saved after iteration {outcome.step}. Resume: ibaml train --resume {place}")
        raise typer.Exit(128 + outcome.signal)
    say(f"done: {run.path}. Next: ibaml evaluate {place}")


def _introduce(run: Any, learner: Any) -> None:
    settings: Settings = run.settings
    what = f"{settings.ways}-way {settings.shots}-shot" if settings.ways else "regression"
    counts = {
        role: sum(learner.model.get_parameter(n).numel() for n in getattr(learner.roles, role))
        for role in ("adapted", "shared")
    }
    say(
        f"{settings.method} on {run.data['name']}, {what}; {settings.model}: "
        f"{counts['adapted']:,} weights adapted, {counts['shared']:,} shared"
    )
    say(f"run folder: {run.path}")


def free_folder(settings: Settings) -> Path:
    """A new folder in runs/, named after data, task and method; numbered if that name is taken."""
    stem = Path(settings.data).stem or "data"
    size = f"-{settings.ways}w{settings.shots}s" if settings.ways else f"-{settings.shots}s"
    name = f"{stem}{size}-{settings.method}"
    folder, number = Path("runs") / name, 1
    while folder.exists():
        number += 1
        folder = Path("runs") / f"{name}-{number}"
    return folder
