"""What is in a saved classifier, how do its examples answer each other, and when is it sure?"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ibaml.answers import Classifier, Head
from ibaml.answers.promises import ERRORS
from ibaml.heads.plda import class_means
from ibaml.pages.blocks import (
    Block,
    Card,
    Cards,
    Commands,
    Episode,
    Page,
    Section,
    Table,
    Text,
    Tile,
)
from ibaml.pages.pictures import TILE, picture
from ibaml.pages.prior import spectrum
from ibaml.pages.words import count, number, percent
from ibaml.tasks.errors import DataError
from ibaml.tasks.images import decode
from ibaml.tasks.tree import Tree

_MOST = 400  # examples that are answered by the others; of more, evenly spaced ones
_PAIRS = 12  # of classes that are alike
_SHOWN = 6  # pictures of a class


@dataclass(frozen=True)
class Check:
    """How the other examples answer an example."""

    row: int
    said: str
    probability: float  # of what is said
    familiar: float  # the share of known queries that look less familiar; NaN if unknown


def classifier_page(path: Path, pictures: Path | None = None) -> Page:
    """The page of a file that `ibaml predict --save` wrote.

    Args:
        pictures: the folder of its examples, to show them; the file itself holds no pictures.
    """
    shop = Classifier.load(path)
    checks = answered_by_the_others(shop)
    counts = [shop.labels.count(c) for c in shop.classes]
    each = f"{min(counts)}" if min(counts) == max(counts) else f"{min(counts)} to {max(counts)}"
    lead = (
        f"It tells {count(len(shop.classes), 'class', 'classes')} apart from {each} "
        f"{'example' if each == '1' else 'examples'} of each, and says when something looks like "
        "none of them."
    )
    shown = [] if pictures is None else [_gallery(shop, checks, pictures)]
    sections = [
        Section("Classes and examples", [*_examples(shop, checks), *shown]),
        Section("Examples to look at", _doubtful(shop, checks)),
        Section("When to trust an answer", _trust(shop)),
        Section("Classes that are alike", _alike(shop)),
        Section("What was known before", _prior(shop)),
        Section("Use it", _commands(path)),
    ]
    return Page(path.name, "A classifier from a few examples", lead, sections)


@torch.no_grad()
def answered_by_the_others(shop: Classifier) -> list[Check]:
    """What the other examples say of each one whose class has others."""
    classes = shop.classes
    several = [i for i, label in enumerate(shop.labels) if shop.labels.count(label) > 1]
    step = max(1, -(-len(several) // _MOST))
    y = torch.tensor([classes.index(label) for label in shop.labels])
    prior = None if shop.prior is None else shop.prior.done
    z = shop.x if shop.prior is None else shop.prior.mapped(shop.x)
    checks = []
    for i in several[::step]:
        others = torch.arange(len(z)) != i
        head = Head.of(prior, z[others], y[others], len(classes), shop.promises)
        query = head.prior.mapped(z[i : i + 1])
        p = head.log_probabilities(query).exp()[0]
        best = int(p.argmax())
        checks.append(Check(i, classes[best], float(p[best]), float(head.familiar(query)[0])))
    return checks


def _examples(shop: Classifier, checks: Sequence[Check]) -> list[Block]:
    right = sum(check.said == shop.labels[check.row] for check in checks)
    embed = shop.source.get("embed")
    network = embed.get("backbone") if isinstance(embed, dict) else None
    cards = [
        Card("classes", f"{len(shop.classes):,}"),
        Card("examples", f"{len(shop.labels):,}"),
        Card("prior", "none" if shop.prior is None else shop.prior.name,
             "what was known of classes before"),
        Card("reads", "pictures" if network else str(shop.source.get("kind", "vectors")),
             f"by {network}" if network else ""),
    ]  # fmt: skip
    rows = []
    for name in shop.classes:
        own = [c for c in checks if shop.labels[c.row] == name]
        good = sum(c.said == name for c in own)
        taken = sorted({c.said for c in own if c.said != name})
        rows.append((name, str(shop.labels.count(name)), f"{good} of {len(own)}" if own else "–",
                     ", ".join(taken) or "–"))  # fmt: skip
    blocks: list[Block] = [Cards(cards)]
    if checks:
        blocks.append(
            Text(
                f"Each example was answered by the others, as if it were new: {right} of "
                f"{len(checks)} rightly. That is a hint and no test: the examples of a class are "
                "often more alike than what comes later."
            )
        )
    else:
        blocks.append(
            Text("Every class has one example, so that none can be checked by the others.", "note")
        )
    head = ("class", "examples", "answered rightly by the others", "taken for")
    blocks.append(Table("The classes", head, rows, words=frozenset({3})))
    return blocks


def _gallery(shop: Classifier, checks: Sequence[Check], folder: Path) -> Episode:
    """The examples of each class as pictures, those first that the others answer otherwise."""
    tree = Tree.open(folder.expanduser())
    there, said = set(tree.names), {check.row: check for check in checks}
    classes: list[tuple[str, list[Tile], list[Tile]]] = []
    found = 0
    with tree.reading() as read:
        for name in shop.classes:
            rows = [i for i, c in enumerate(shop.labels) if c == name and shop.files[i] in there]
            rows.sort(key=lambda i: i not in said or said[i].said == name)
            found += len(rows)
            tiles = [_tile(read, shop.files[i], name, said.get(i)) for i in rows[:_SHOWN]]
            classes.append((name, [], tiles))
    if not found:
        raise DataError(
            f"--pictures {folder} holds none of the examples of the classifier (such as "
            f"{shop.files[0]!r}): give the folder that `ibaml predict` learned from"
        )
    text = f"Up to {_SHOWN} of each class; below each what the others say of it."
    return Episode("The examples", text, classes)


def _tile(read: Callable[[str], bytes], file: str, name: str, check: Check | None) -> Tile:
    pixels = torch.from_numpy(decode(read(file), file, TILE)) / 255
    if check is None:
        return Tile(picture(pixels, f"example of {name}: {file}"))
    right = check.said == name
    alt = f"example of {name}: {file}; the others say {check.said}"
    text = percent(check.probability)
    return Tile(picture(pixels, alt), text if right else f"{check.said} {text}", right)


def _doubtful(shop: Classifier, checks: Sequence[Check]) -> list[Block]:
    """Examples that the others would name otherwise, or find unfamiliar."""
    wrong = [c for c in checks if c.said != shop.labels[c.row]]
    strange = [c for c in checks if c.familiar < 0.05 and c not in wrong]
    if not wrong and not strange:
        return [Text("The examples agree with each other: none stands out.", "good")]
    text = (
        "These examples the others would answer otherwise, or call unknown. Look at them first: a "
        "wrong label among a few examples costs much. If one is right, more examples of its class "
        "help."
    )
    rows = [
        (shop.files[c.row] or f"example {c.row + 1}", shop.labels[c.row],
         f"{c.said} ({percent(c.probability)})" if c in wrong else "unfamiliar")
        for c in sorted(wrong, key=lambda c: -c.probability) + strange
    ]  # fmt: skip
    head = ("example", "its class", "the others say")
    return [Text(text), Table("Examples to look at", head, rows, words=frozenset({1, 2}))]


def _trust(shop: Classifier) -> list[Block]:
    head = shop.head()
    if head.promises is None:
        return [Text("Nothing was measured for such vectors, so that no answer is called sure.")]
    if head.classes < 2:
        return [Text("There is one class: an answer is that class, or unknown.")]
    shots = float(head.counts.min())
    rows = []
    for error in ERRORS:
        least = head.promises.sure(error, head.classes, shots)
        said = "never" if least > 1 else percent(least, 1) if least > 0 else "any"
        rows.append((percent(error), said))
    text = (
        f"Measured on tasks of {count(head.classes, 'class', 'classes')} with "
        f"{shots:.0f} or so examples each, whose classes the prior had never seen: answers with "
        "at least this confidence were wrong at most so often, in 95 % of such tasks. Photographs "
        "unlike those it was measured on may do worse."
    )
    table = Table("From which confidence on an answer is sure", ("wrong at most", "confidence"),
                  rows)  # fmt: skip
    unknown = (
        "A query that is less familiar than 95 % of the known ones is called unknown, so that "
        "about 1 in 20 good queries is called so too (--false-alarms)."
    )
    return [Text(text), table, Text(unknown)]


@torch.no_grad()
def _alike(shop: Classifier) -> list[Block]:
    if len(shop.classes) < 2:
        return [Text("There is one class.")]
    head = shop.head()
    means = class_means(head.z[None], head.y[None], head.classes)[1][0]
    if head.prior.unit:
        means = torch.nn.functional.normalize(means, dim=-1)
        nearness, word = means @ means.mT, "cosine"
    else:
        nearness, word = -torch.cdist(means, means), "distance"
    pairs = [
        (float(nearness[i, j]), i, j)
        for i in range(head.classes) for j in range(i + 1, head.classes)
    ]  # fmt: skip
    rows = [
        (f"{shop.classes[i]} and {shop.classes[j]}", number(abs(near)))
        for near, i, j in sorted(pairs, reverse=True)[:_PAIRS]
    ]
    text = (
        "Pairs of classes whose examples lie closest to each other. More examples of these help "
        "most; two names for one thing belong into one class."
    )
    return [Text(text), Table("The most alike pairs", ("classes", word), rows)]


def _prior(shop: Classifier) -> list[Block]:
    prior = shop.prior
    if prior is None:
        return [Text("Nothing: the examples alone answer (--prior none).")]
    text = (
        f"The prior {prior.name} knows how classes differ from classes it was made from: which "
        "directions of a picture’s vector tell classes apart, how far class means lie apart "
        "there, and how sure to be."
    )
    known = [(str(n), _said(v)) for n, v in prior.facts.items() if not isinstance(v, dict | list)]
    rows = [("numbers in a vector", f"{prior.features:,}"),
            ("directions kept", f"{len(prior.between):,}"),
            ("temperature t", number(prior.temperature)), *known]  # fmt: skip
    return [
        Text(text),
        spectrum(prior.between.double().numpy(), "prior"),
        Table("The prior", ("", "value"), rows, words=frozenset({1})),
    ]


def _said(value: Any) -> str:
    return number(value, 4) if isinstance(value, float) else str(value)


def _commands(path: Path) -> list[Block]:
    file = shlex.quote(str(path))
    return [
        Commands(
            [
                ("answer new ones", f"ibaml predict {file} new/ --out answers"),
                ("say which to label next", f"ibaml predict {file} new/ --out next --suggest 5"),
                ("add examples", f"ibaml add {file} more/"),
                ("remove one", f"ibaml remove {file} --file CLASS/FILE"),
                ("this page", f"ibaml report {file}"),
            ]
        )
    ]  # fmt: skip
