"""``ibaml data``: which datasets are there, what is in one, and is it fit for use?"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from ibaml.cli.screen import console, errors_as_sentences, notes_as_sentences, say
from ibaml.extras import need

if TYPE_CHECKING:
    from ibaml.tasks.dataset import Dataset

app = typer.Typer(
    no_args_is_help=True,
    help="List, show, check and download datasets; clear the cache.",
    rich_markup_mode="rich",
)

Spec = Annotated[
    str,
    typer.Argument(
        help="A name from `ibaml data list`, an image folder or zip, a CSV list, or an .npz."
    ),
]
Level = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Folder: 1 takes the folders directly in it as classes, 2 those in them, …",
        show_default="the innermost folders",
    ),
]
Root = Annotated[
    Path | None, typer.Option(help="Folder of the files (default: $IBAML_DATA/NAME, or data/NAME).")
]
Splits = Annotated[
    Path | None, typer.Option(help='JSON file: {"train": \\[class, …], "val": …, "test": …}.')
]
Size = Annotated[
    int | None,
    typer.Option(
        min=4, help="Side in pixels of your own images (folder or list).", show_default="84"
    ),
]


def load(
    spec: str, root: Path | None, splits: Path | None, size: int | None, level: int | None = None
) -> Dataset:
    """Open a dataset, with a progress bar while it is decoded for the first time."""
    from ibaml.tasks.catalog import open_data

    with decoding() as progress:
        return open_data(
            spec, root=root, splits=splits, image_size=size, class_level=level, progress=progress
        )


@contextmanager
def decoding(what: str = "preparing") -> Iterator[Callable[[int, int], None]]:
    """A progress bar that shows only while data are prepared: a dataset is decoded or embedded for
    the first time, or a network starts from the base classes. What a person should know of the
    data is printed as a sentence."""
    counted = TextColumn("{task.completed}/{task.total}")
    columns = (TextColumn(what), BarColumn(), counted, TimeRemainingColumn())
    bars: list[Progress] = []

    def progress(done: int, total: int) -> None:
        if not bars:
            bars.append(Progress(*columns, console=console, transient=True))
            bars[0].add_task(what, total=total)
            bars[0].start()
        bars[0].update(bars[0].task_ids[0], completed=done, total=total)
        if done >= total:
            bars.pop().stop()

    try:
        with notes_as_sentences():
            yield progress
    finally:
        for bar in bars:
            bar.stop()


@app.command("list")
def list_() -> None:
    """List the datasets that have a name."""
    from ibaml.tasks.catalog import CATALOG

    table = Table()
    for title in ("name", "what", "license"):
        table.add_column(title)
    for known in CATALOG.values():
        table.add_row(known.name, known.about, known.license)
    console.print(table)
    console.print("Or give the path of an image folder, a zip of one, or a CSV (path,label,split).")


@app.command()
def info(
    spec: Spec,
    root: Root = None,
    splits: Splits = None,
    image_size: Size = None,
    class_level: Level = None,
) -> None:
    """Show classes, images, splits, license, mean and standard deviation."""
    with errors_as_sentences():
        data = load(spec, root, splits, image_size, class_level)
    counts = [data.count(c) for c in range(len(data.classes))]
    mean, std = data.moments
    table = Table(title=escape(data.name), show_header=False)
    table.add_row(
        "images", f"{len(data.examples):,}, {' × '.join(map(str, data.examples.shape[1:]))}"
    )
    table.add_row("classes", f"{len(data.classes):,}")
    table.add_row("images per class", f"{min(counts)} to {max(counts)}")
    for split, members in data.splits.items():
        images = sum(counts[c] for c in members)
        table.add_row(f"split {split}", f"{len(members)} classes, {images:,} images")
    table.add_row("mean", ", ".join(f"{m:.4f}" for m in mean))
    table.add_row("deviation", ", ".join(f"{s:.4f}" for s in std))
    table.add_row("license", data.license)
    table.add_row("digest", data.digest[:24])
    console.print(table, markup=False)


@app.command()
def preview(
    spec: Spec,
    root: Root = None,
    splits: Splits = None,
    image_size: Size = None,
    class_level: Level = None,
    split: Annotated[str, typer.Option(help="train, val or test.")] = "test",
    ways: Annotated[int, typer.Option(min=1, help="Classes per episode.")] = 5,
    shots: Annotated[int, typer.Option(min=1, help="Support images per class.")] = 1,
    queries: Annotated[int, typer.Option(min=1, help="Query images per class.")] = 5,
    key: Annotated[
        int, typer.Option(help="Which episode: the same number draws the same one.")
    ] = 0,
    out: Annotated[
        Path | None, typer.Option(help="File for the picture (default: in runs/preview).")
    ] = None,
) -> None:
    """Draw one episode: support above, query below, with labels."""
    from ibaml.report import draw_episode
    from ibaml.tasks.episodes import Episodes

    with errors_as_sentences():
        need("matplotlib")  # fails before anything is decoded
        data = load(spec, root, splits, image_size, class_level)
        episodes = Episodes(data, split, ways, shots, queries, normalize=False)
        batch = episodes.batch([key])
        rows, _ = episodes.draw(key)
    names = [data.classes[data.labels[r[0]]] for r in rows]
    support = batch.support_x[0].unflatten(0, (ways, shots))
    query = batch.query_x[0].unflatten(0, (ways, queries))
    path = out or Path("runs") / "preview" / f"{data.name}-{split}-{key}.png"
    headline = f"{data.name}, {split}: {ways}-way {shots}-shot, episode {key}"
    if path.suffix.lower() not in (".png", ".pdf", ".svg"):
        path = path.with_name(f"{path.name}.png")
    with errors_as_sentences():
        say(draw_episode(support, query, names, path, headline))


@app.command()
def check(
    spec: Spec,
    root: Root = None,
    splits: Splits = None,
    image_size: Size = None,
    class_level: Level = None,
    ways: Annotated[int, typer.Option(min=1, help="Classes per episode.")] = 5,
    shots: Annotated[int, typer.Option(min=1, help="Support images per class.")] = 1,
    queries: Annotated[int, typer.Option(min=1, help="Query images per class.")] = 15,
) -> None:
    """Look for unreadable images, duplicates, leaks and small classes.

    A leak is the same image in two splits. The check also prints the accuracy of
    nearest centroids on raw pixels, which any learner must beat.
    """
    from ibaml.tasks.inspect import inspect_dataset, nearest_centroid

    with errors_as_sentences():
        data = load(spec, root, splits, image_size, class_level)
    report = inspect_dataset(data, shots + queries)

    def where(row: int) -> str:
        return data.files[row] if data.files else f"{data.classes[data.labels[row]]} #{row}"

    for title, pairs in (
        ("the same image in two splits", report.leaks),
        ("the same image twice in a split", report.duplicates),
    ):
        console.print(f"{title}: {len(pairs)}")
        for a, b in pairs[:5]:
            say(f"  {where(a)} = {where(b)}")
    console.print(f"classes with fewer than {shots + queries} images: {len(report.small)}")
    for name, count in report.small[:5]:
        say(f"  {name}: {count}")
    console.print(f"classes in no split: {len(report.unassigned)}")
    for split in data.splits:
        try:
            floor = float(nearest_centroid(data, split, ways, shots, queries).mean())
        except ValueError as error:
            say(f"{split}: {error}")
        else:
            setting = f"{ways}-way {shots}-shot nearest centroid on pixels"
            say(f"{split}: {setting} {100 * floor:.1f} % (chance {100 / ways:.0f} %)")
    if report.serious:
        say("The same image is in two splits: remove one before you trust a test.", style="red")
        raise typer.Exit(1)


@app.command()
def get(
    name: Annotated[str, typer.Argument(help="A name from `ibaml data list`.")],
    root: Root = None,
) -> None:
    """Download a dataset, or say where to get it and where to put it."""
    from ibaml.tasks.catalog import CATALOG, data_folder
    from ibaml.tasks.download import fetch

    if name not in CATALOG:
        say(f"Error: {name!r} is none of {', '.join(CATALOG)}", style="red")
        raise typer.Exit(1)
    known = CATALOG[name]
    folder = data_folder(name, root)
    if not known.remotes:
        console.print(f"{name}: {known.about}\nlicense: {known.license}\nyou need: {known.layout}")
        if known.open is not None:
            say(f"put it in: {folder}")
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TimeRemainingColumn(),
    )
    with errors_as_sentences(), Progress(*columns, console=console) as bar:
        for remote in known.remotes:
            task = bar.add_task(remote.url.rsplit("/", 1)[-1], total=None)
            fetch(remote, folder, partial(_advance, bar, task))
    say(f"{name} is in {folder} ({known.license})")


@app.command()
def cache(
    clear: Annotated[
        bool, typer.Option("--clear", help="Remove them; they are decoded again when needed.")
    ] = False,
) -> None:
    """List decoded datasets and embeddings on disk, or remove them."""
    from ibaml.tasks import cache as store

    with errors_as_sentences():
        if clear:
            cleared = store.clear()
            say(f"removed {_count(cleared.removed)}: {_size(cleared.freed)} freed")
            for left in cleared.left:
                say(f"left alone: {left} (not a finished dataset of ibaml's)")
            return
        datasets, folder = store.entries(), store.store_folder()
    table = Table(box=None)
    table.add_column("name")
    table.add_column("size", justify="right")
    table.add_column("made")
    for entry in datasets:
        made = time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.made))
        table.add_row(entry.name, _size(entry.size), made)
    if datasets:
        console.print(table, markup=False)
    say(f"{_count(len(datasets))}, {_size(sum(entry.size for entry in datasets))}, in {folder}")


def _count(entries: int) -> str:
    return f"{entries} dataset{'' if entries == 1 else 's'}"


def _size(count: int) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count / 1e3:.1f} kB"


def _advance(bar: Progress, task: TaskID, done: int, total: int | None) -> None:
    bar.update(task, completed=done, total=total)
