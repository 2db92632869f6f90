"""What did a person name: training runs, a saved classifier, or a reproduction of the paper?"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ibaml.pages.blocks import Page
from ibaml.pages.classifier import classifier_page
from ibaml.pages.opened import OnTask, open_runs
from ibaml.pages.reproduction import reproduction_page, studies_in
from ibaml.pages.runs import runs_page
from ibaml.pages.write import write_page
from ibaml.tasks.errors import DataError
from ibaml.tasks.sources.decode import Progress

NAME = "report.html"
TASKS = 200  # validation tasks, where no evaluation is kept


def report(
    named: Mapping[str, Path],
    out: Path | None = None,
    *,
    tasks: int = TASKS,
    device: str = "auto",
    pictures: Path | None = None,
    on_task: OnTask | None = None,
    progress: Progress | None = None,
) -> Path:
    """Write the page of one or several run folders, of a classifier's file, or of a folder of
    `ibaml reproduce`; returns the file.

    Args:
        named: the paths, by what the page calls them.
        out: the file; None is report.html in the (first) folder, or NAME.html beside a classifier.
        tasks: validation tasks to judge on, if a run was not evaluated.
        pictures: the folder of a classifier's examples, to show them.
    """
    place = _checked_out(list(named.values()), out)
    return write_page(_page(named, tasks, device, pictures, on_task, progress), place)


def _page(
    named: Mapping[str, Path], tasks: int, device: str, pictures: Path | None,
    on_task: OnTask | None, progress: Progress | None,
) -> Page:  # fmt: skip
    paths = list(named.values())
    kinds = [_kind(path) for path in paths]
    if pictures is not None and kinds != ["classifier"]:
        raise DataError("--pictures is for a classifier alone: leave it out")
    if set(kinds) == {"run"}:
        return runs_page(open_runs(named, tasks, device, on_task, progress))
    if len(paths) > 1:
        other = next(p for p, kind in zip(paths, kinds, strict=True) if kind != "run")
        raise DataError(
            f"{other} is no run folder: several runs make one page, and a classifier or a "
            "reproduction makes one alone"
        )
    if kinds[0] == "classifier":
        return classifier_page(paths[0], pictures)
    return reproduction_page(paths[0])


def _kind(path: Path) -> str:
    if not path.exists():
        raise DataError(f"{path} does not exist")
    if path.is_file():
        return "classifier"
    if (path / "config.json").exists():
        return "run"
    if studies_in(path):
        return "reproduction"
    if (path / "run" / "config.json").exists():  # what `ibaml demo` makes
        raise DataError(f"{path} is no run folder, but {path / 'run'} is")
    raise DataError(
        f"{path} is nothing to report on: give run folders (`ibaml train`), a classifier "
        "(`ibaml predict --save`), or a folder of `ibaml reproduce`"
    )


def _checked_out(paths: list[Path], out: Path | None) -> Path:
    if not paths:
        raise DataError("report: name a run folder, a classifier or a reproduction")
    if out is None:
        first = paths[0]
        return first / NAME if first.is_dir() else first.with_name(f"{first.stem}-{NAME}")
    if out.is_dir():
        return out / NAME
    if out.suffix.lower() not in (".html", ".htm"):
        raise DataError(f"--out {out}: name a file that ends in .html, or a folder that exists")
    if any(out.resolve() == path.resolve() for path in paths):
        raise DataError(f"--out {out} is what the page is of: choose another name")
    return out
