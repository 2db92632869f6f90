"""``ibaml reproduce``: a figure, a table or a theorem of the paper, beside what we find."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ibaml.cli.progress import counting
from ibaml.cli.screen import errors_as_sentences, say, say_if_without_pictures

if TYPE_CHECKING:
    from ibaml.paper.study import Study

_HELP = """Reproduce a figure, a table or a theorem of the paper.

    The result is a folder: the picture (PNG, PDF), the numbers (CSV), and a text
    that says what agrees with the paper and what does not.

    Examples:

    ibaml reproduce fig1 --quick

    ibaml reproduce fig1 --option spectrum=geometric --option queries=aligned

    ibaml reproduce bounds --seeds 5

    ibaml reproduce fig2 --option measured=gpu.json

    ibaml reproduce table1 --option data=omniglot --option train_tasks=5000 --option batch=16

    ibaml reproduce all        (and a page over all of them, runs/paper/index.html)

    Stopped with Ctrl-C, the same command goes on where it was. See docs/paper.md."""
_NAMES = ("fig1", "fig2", "table1", "fig3", "bounds")  # of `STUDIES`, which --help does not import
_EVERYTHING = "all"


def command(app: typer.Typer) -> None:
    """Add the command."""
    app.command("reproduce", help=_HELP)(reproduce)


def reproduce(
    name: Annotated[str, typer.Argument(help=f"{', '.join(_NAMES)}, or all.")],
    quick: Annotated[bool, typer.Option("--quick", help="Minutes on two cores.")] = False,
    out: Annotated[
        Path | None, typer.Option(help="Folder (default: runs/paper/NAME; all: runs/paper).")
    ] = None,
    seeds: Annotated[int | None, typer.Option(min=1, help="How many seeds.")] = None,
    seed: Annotated[int | None, typer.Option(help="Another draw of all of them.")] = None,
    option: Annotated[
        list[str] | None,
        typer.Option("--option", "-o", metavar="NAME=VALUE", help="Another setting of the study."),
    ] = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Compute finished parts again, too.")
    ] = False,
) -> None:
    from ibaml.paper.folder import write_page
    from ibaml.paper.studies import STUDIES

    with errors_as_sentences():
        say_if_without_pictures()
        if name not in (*STUDIES, _EVERYTHING):
            raise ValueError(f"nothing is called {name!r}: it is {', '.join(STUDIES)}, or all")
        changes: dict[str, Any] = {"seeds": seeds, "seed": seed}
        changes = {k: v for k, v in changes.items() if v is not None}
        changes.update(_pair(text) for text in option or ())
        root = out or Path("runs/paper")
        if name != _EVERYTHING:
            _run(STUDIES[name], out or root / name, quick, changes, fresh)
            return
        if option:
            raise ValueError("--option belongs to one study: name it in place of all")
        failed = [s.name for s in STUDIES.values() if not _tried(s, root, quick, changes, fresh)]
        say(f"the page over all of them: {write_page(root)}")
        if failed:
            raise ValueError(f"not done: {', '.join(failed)}")


def _tried(study: Study, root: Path, quick: bool, changes: dict[str, Any], fresh: bool) -> bool:
    """Whether a study came to its end; one that lacks its data keeps no other from its own."""
    own = {k: v for k, v in changes.items() if k in vars(study.full)}
    try:
        with errors_as_sentences():
            _run(study, root / study.name, quick, own, fresh)
    except typer.Exit as exit_:
        if exit_.exit_code == 130:
            raise
        return False
    return True


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise ValueError(f"--option takes NAME=VALUE, got {text!r}")
    return name, value


def _run(study: Study, folder: Path, quick: bool, changes: dict[str, Any], fresh: bool) -> None:
    from ibaml.machine import threads
    from ibaml.paper.folder import Parts, write_study

    settings = study.settings(quick, changes)
    folder.mkdir(parents=True, exist_ok=True)  # said now, not when all is done
    if fresh:
        for subfolder in ("parts", "runs"):
            shutil.rmtree(folder / subfolder, ignore_errors=True)
    parts = Parts(folder / "parts", study.name)
    say(f"{study.title}{' (quick)' if quick else ''}")
    # small matrices: a second thread only costs (a study that trains has a setting for it)
    with threads(1), counting() as progress:
        try:
            findings = study.run(settings, parts, progress)
        except KeyboardInterrupt:
            say(
                f"stopped; {parts.computed + parts.reused} parts (and what runs have saved) are "
                "kept, the same command goes on"
            )
            raise typer.Exit(130) from None
    words = [f"ibaml reproduce {study.name}", *(["--quick"] if quick else [])]
    words += [_written(name, value) for name, value in changes.items()]
    files = write_study(
        folder, study, settings, findings, command=" ".join(words), seconds=parts.seconds
    )
    for row in findings.shown:
        say("  " + "  ".join(f"{name} {value}" for name, value in row.items() if value))
    for sentence in findings.agrees:
        say(f"  ✓ {sentence}")
    for sentence in findings.differs:
        say(f"  ✗ {sentence}")
    for sentence in findings.notes:
        say(f"  · {sentence}")
    if findings.pictures and not any(file.suffix == ".png" for file in files):
        say("no pictures: the same command where matplotlib is installed, with this folder")
        say("(parts/ is enough), draws them and computes nothing.")
    say(f"{parts.computed} parts computed, {parts.reused} read. Look at:")
    for file in files:
        say(f"  {file}")


def _written(name: str, value: Any) -> str:
    return f"--{name} {value}" if name in ("seed", "seeds") else f"--option {name}={value}"
