"""``ibaml predict``, ``add``, ``remove``: how does a person get answers from a few photographs?"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ibaml.cli.data import decoding
from ibaml.cli.screen import errors_as_sentences, say
from ibaml.files import real
from ibaml.words import PRETRAINED

if TYPE_CHECKING:
    from ibaml.answers import Classifier, Prior
    from ibaml.answers.reading import Given

_PREDICT = """Name photographs (or vectors, or rows) after a few of each class.

    SUPPORT holds the examples: a folder (or zip) with a folder for each class, an .npz with x and
    y, a CSV table with a column label; or a classifier that --save wrote. QUERIES are what to
    answer: a folder, nested or not, one file, an .npz or a table.

    OUT gets predictions.csv, predictions.json and sheet.png to look at. What looks like none of the
    classes is called unknown. Files that cannot be read have a note, and no answer.

    Examples:

    ibaml predict products/ new/ --out answers --save shop.ibaml

    ibaml predict shop.ibaml tomorrow/ --out answers2 --false-alarms 0.1

    ibaml predict shop.ibaml shelf/ --out answers3 --suggest 5

    ibaml predict examples.csv new.csv --out answers4

    ibaml add shop.ibaml more/;  ibaml remove shop.ibaml --class tea

    The network for photographs comes with pip install "ibaml\\[backbones]". See
    docs/practitioner.md."""

_ADD = """Add examples to a classifier that `ibaml predict --save` wrote.

    Examples:

    ibaml add shop.ibaml more/                      (a folder for each class, new or not)

    ibaml add shop.ibaml new/photo7.jpg --class tea"""

_REMOVE = """Remove classes or examples from a classifier.

    Examples:

    ibaml remove shop.ibaml --class tea

    ibaml remove shop.ibaml --file tea/blurred.jpg"""


def commands(app: typer.Typer) -> None:
    """Add the commands."""
    app.command("predict", help=_PREDICT)(_predict)
    app.command("add", help=_ADD)(_add)
    app.command("remove", help=_REMOVE)(_remove)


def _predict(
    support: Annotated[Path, typer.Argument(help="Examples, or a saved classifier.")],
    queries: Annotated[Path, typer.Argument(help="What to answer.")],
    out: Annotated[Path, typer.Option(help="Folder for the answers.")],
    save: Annotated[Path | None, typer.Option(help="Keep the classifier in this file.")] = None,
    prior: Annotated[
        str | None,
        typer.Option(
            help="What is known of classes before: a name, vectors of other classes (.npz), a run, "
            "a file, or none.",
            show_default="photos for photographs, else none",
        ),
    ] = None,
    backbone: Annotated[
        str, typer.Option(help=f"The network for photographs: {' or '.join(PRETRAINED)}.")
    ] = PRETRAINED[0],
    class_level: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="1 takes the folders directly in SUPPORT as classes, 2 those in them, …",
            show_default="the innermost folders",
        ),
    ] = None,
    false_alarms: Annotated[
        float,
        typer.Option(min=0, max=0.99, help="Share of known queries that may be called unknown."),
    ] = 0.05,
    suggest: Annotated[
        int, typer.Option(min=0, help="Also say which so many queries to label next.")
    ] = 0,
    force: Annotated[bool, typer.Option("--force", help="Let --save write over a file.")] = False,
) -> None:
    with errors_as_sentences():
        from ibaml.answers.reading import read_queries
        from ibaml.answers.writing import check_out, write_answers

        began = time.monotonic()
        _there(support)
        _there(queries)
        if save is not None and save.exists() and not force:
            raise ValueError(f"--save {save} exists: choose another name, or --force")
        if save is not None and not save.absolute().parent.is_dir():
            raise ValueError(f"--save {save}: {save.absolute().parent} is not a folder")
        for word, folder in (("SUPPORT", support), ("QUERIES", queries)):
            if real(out).is_relative_to(real(folder)):
                raise ValueError(
                    f"--out {out} lies in {word}, where its pictures would be read the next time: "
                    "name a folder elsewhere"
                )
        check_out(out)
        classifier = _classifier(support, prior, backbone, class_level)
        with decoding("queries") as progress:
            found = read_queries(queries, classifier.source, progress)
        if not found.files:
            why = next(iter(found.failed.values()))
            raise ValueError(f"{queries}: none of {len(found.failed)} files can be read: {why}")
        answers = classifier.answer(found.x, false_alarms)
        chosen = classifier.suggest(found.x, suggest) if suggest else []
        files = write_answers(out, classifier, found, answers, chosen, false_alarms)
        if save is not None:
            files.append(classifier.save(save))
    unknown = int(answers.unknown.sum())
    say(
        f"{len(found.files)} answers, {len(classifier.classes)} classes, "
        f"{len(classifier.labels)} examples, prior "
        f"{'none' if classifier.prior is None else classifier.prior.name}, "
        f"{time.monotonic() - began:.0f} s; {unknown} look like none of the classes"
    )
    if found.failed:
        say(f"{len(found.failed)} files cannot be read, see their notes", style="yellow")
    if bool((answers.familiar != answers.familiar).all()):
        say("Which are unknown is not known: that needs a prior, or 20 examples of larger classes")
    if answers.sure is not None:
        say(
            f"{int(answers.sure.sum())} answers are sure: on tasks like those it was measured on, "
            "at most 5 % of such answers were wrong in 95 % of the tasks"
        )
    for place, row in enumerate(chosen, start=1):
        say(f"label next, {place}: {found.files[row]}")
    for file in files:
        say(f"  {file}")


def _add(
    classifier: Annotated[Path, typer.Argument(help="A file that `ibaml predict --save` wrote.")],
    examples: Annotated[Path, typer.Argument(help="Class folders, pictures, an .npz or a table.")],
    label: Annotated[str | None, typer.Option("--class", help="The class of all of them.")] = None,
    class_level: Annotated[int | None, typer.Option(min=1, help="As in predict.")] = None,
) -> None:
    with errors_as_sentences():
        from ibaml.answers import Classifier
        from ibaml.answers.reading import read_examples

        _there(classifier)
        _there(examples)
        shop = Classifier.load(classifier)
        with decoding("examples") as progress:
            found = read_examples(
                examples, "", label=label, class_level=class_level, source=shop.source,
                progress=progress,
            )  # fmt: skip
        _tell(found)
        fresh = shop.add_new(found.x, found.labels or (), found.files)
        shop.save(classifier)
    known = len(found.x) - fresh
    say(f"{fresh} examples added{f', {known} were there already' if known else ''}: {shop}")


def _remove(
    classifier: Annotated[Path, typer.Argument(help="A file that `ibaml predict --save` wrote.")],
    labels: Annotated[
        list[str] | None, typer.Option("--class", help="A class; may be repeated.")
    ] = None,
    files: Annotated[
        list[str] | None, typer.Option("--file", help="An example's file; may be repeated.")
    ] = None,
) -> None:
    with errors_as_sentences():
        from ibaml.answers import Classifier

        _there(classifier)
        if not labels and not files:
            raise ValueError("say what to remove: --class NAME or --file FILE")
        shop = Classifier.load(classifier)
        gone = shop.remove(classes=labels or (), files=files or ())
        shop.save(classifier)
    say(f"{gone} examples removed: {shop}")


def _there(path: Path) -> None:
    if not path.exists():
        raise ValueError(f"{path} does not exist")


def _classifier(
    support: Path, prior: str | None, backbone: str, class_level: int | None
) -> Classifier:
    from ibaml.answers import Classifier
    from ibaml.answers.reading import read_examples

    if support.is_file() and support.suffix.lower() not in (".npz", ".csv", ".tsv", ".zip"):
        if prior is not None or class_level is not None:
            raise ValueError(
                f"{support} is a classifier, which has its prior and classes: leave out --prior "
                "and --class-level"
            )
        return Classifier.load(support)
    with decoding("examples") as progress:
        found = read_examples(support, backbone, class_level=class_level, progress=progress)
    _tell(found)
    made = Classifier(**known(found.source, prior), source=found.source)
    made.add(found.x, found.labels or (), found.files)
    return made


def known(source: Any, prior: str | None) -> dict[str, Any]:
    """The prior, and the promises where there is none."""
    from ibaml.answers import Prior
    from ibaml.answers.prior import packaged_for

    own = packaged_for(source.get("embed"))
    if prior is None:
        return {"prior": None} if own is None else {"prior": own}
    if prior != "none":
        chosen = _fitted(Path(prior)) if prior.endswith(".npz") else Prior.open(prior)
        embed = source.get("embed") or {}
        if chosen.digest and embed and chosen.digest != embed.get("digest"):
            raise ValueError(
                f"--prior {prior} is for another network than {embed.get('backbone')}: leave it "
                "out, or give the --backbone it is for"
            )
        return {"prior": chosen}
    return {"prior": None, "promises": None if own is None else own.without}


def _fitted(path: Path) -> Prior:
    """A prior of other classes' vectors."""
    from dataclasses import replace

    import numpy as np
    import torch

    from ibaml.answers import fit_prior
    from ibaml.answers.reading import read_examples

    _there(path)
    found = read_examples(path, "")
    names, index = np.unique(found.labels or (), return_inverse=True)
    say(f"learning how {len(names)} classes of {path} differ …")
    made = fit_prior(torch.from_numpy(found.x), torch.from_numpy(index), path.stem)
    return replace(made, facts={"embed": found.source.get("embed")})


def _tell(found: Given) -> None:
    if found.failed:
        say(f"{len(found.failed)} examples cannot be read and are left out:", style="yellow")
        for why in list(found.failed.values())[:10]:
            say(f"  {why.splitlines()[0]}", style="yellow")
