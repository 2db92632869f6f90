"""``ibaml reproduce``: compute a figure, a table or a theorem of the paper, and compare."""

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

    ibaml reproduce all        (also writes a page of all results, runs/paper/report.html)

    Ctrl-C stops; the same command then continues. See docs/paper.md."""
_NAMES = (
    "fig1",
    "fig2",
    "table1",
    "fig3",
    "bounds",
)  # as in `STUDIES`, which --help does not import
_EVERYTHING = "all"


def command(app: typer.Typer) -> None:
    """Add the command."""
    app.command("reproduce", help=_HELP)(reproduce)


def reproduce(
    name: Annotated[str, typer.Argument(help=f"{', '.join(_NAMES)}, or all.")],
    quick: Annotated[
        bool, typer.Option("--quick", help="Small settings: minutes on two cores.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option(help="Folder (default: runs/paper/NAME; all: runs/paper).")
    ] = None,
    seeds: Annotated[int | None, typer.Option(min=1, help="Number of seeds.")] = None,
    seed: Annotated[
        int | None, typer.Option(help="First seed; another one changes all draws.")
    ] = None,
    option: Annotated[
        list[str] | None,
        typer.Option(
            "--option",
            "-o",
            metavar="NAME=VALUE",
            help="Change a setting of the study (repeatable).",
        ),
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Compute finished parts again.")] = False,
) -> None:
    from ibaml.paper.studies import STUDIES

    with errors_as_sentences():
        say_if_without_pictures()
        if name not in (*STUDIES, _EVERYTHING):
            raise ValueError(f"there is no study {name!r}: take {', '.join(STUDIES)}, or all")
        changes: dict[str, Any] = {"seeds": seeds, "seed": seed}
        changes = {k: v for k, v in changes.items() if v is not None}
        changes.update(_pair(text) for text in option or ())
        root = out or Path("runs/paper")
        if name != _EVERYTHING:
            _run(STUDIES[name], out or root / name, quick, changes, fresh)
            return
        if option:
            raise ValueError("--option changes one study: name that study instead of all")
        failed = [s.name for s in STUDIES.values() if not _tried(s, root, quick, changes, fresh)]
        say(f"page of all results: {_page(root)}")
        if failed:
            raise ValueError(f"failed: {', '.join(failed)}")


def _page(root: Path) -> Path:
    from ibaml.pages import report

    return report({root.name: root})


def _tried(study: Study, root: Path, quick: bool, changes: dict[str, Any], fresh: bool) -> bool:
    """Whether a study finished; one that fails, for lack of data say, does not stop the others."""
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
    from ibaml.paper.folder import write_study
    from ibaml.parts import Parts

    settings = study.settings(quick, changes)
    folder.mkdir(parents=True, exist_ok=True)  # fails now, not at the end
    if fresh:
        for subfolder in ("parts", "runs"):
            shutil.rmtree(folder / subfolder, ignore_errors=True)
    parts = Parts(folder / "parts", study.name)
    say(f"{study.title}{' (quick)' if quick else ''}")
    # matrices are small, so a second thread only costs time (studies that train have a setting)
    with threads(1), counting() as progress:
        try:
            findings = study.run(settings, parts, progress)
        except KeyboardInterrupt:
            say(
                f"stopped; {parts.computed + parts.reused} parts and the checkpoints of runs are "
                "kept; the same command continues"
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
        say("no pictures: matplotlib is missing. Where it is installed, the same command with this")
        say("folder (parts/ is enough) draws them without computing anything.")
    say(f"{parts.computed} parts computed, {parts.reused} read. Files:")
    for file in files:
        say(f"  {file}")


def _written(name: str, value: Any) -> str:
    return f"--{name} {value}" if name in ("seed", "seeds") else f"--option {name}={value}"
