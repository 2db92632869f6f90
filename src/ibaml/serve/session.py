"""What is on the page? Classes with their examples, photographs to name, and what is said of them.

It knows no HTTP. A picture is decoded and embedded once; whatever is added, moved or removed, only
the small head is solved again, in milliseconds. All methods may be called from several threads.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from threading import RLock
from typing import Any

import torch
from torch import Tensor

from ibaml import untrusted
from ibaml.answers import UNKNOWN, Classifier
from ibaml.tasks.errors import DataError

NEAREST = 3  # examples shown beside an answer
NEXT = 3  # photographs suggested to label next
OTHERS = 3  # classes whose probability is shown
_UNDO = 20  # removals that can be taken back


@dataclass(frozen=True)
class Picture:
    """A photograph on the page.

    Attributes:
        file: the name it came with, perhaps with folders.
        label: the number of its class; None for one that is to be named.
        thumbnail: a small JPEG; None for an example of a saved classifier, which holds no pictures.
    """

    number: int
    file: str
    vector: Tensor
    label: int | None
    thumbnail: bytes | None = None

    @property
    def name(self) -> str:
        return self.file.rsplit("/", 1)[-1]

    def file_in(self, folder: str) -> str:
        """Its name in a saved classifier, where it is of the class ``folder``."""
        there = self.file.split("/")[-2:-1] == [folder]
        return self.file if there else f"{folder}/{self.name}"


@dataclass(frozen=True)
class Read:
    """What became of a picture file: its vector (F,), and a small JPEG."""

    vector: Tensor
    thumbnail: bytes


@dataclass(frozen=True)
class _Removed:
    """What comes back by `Session.undo`: pictures, and the names of their classes."""

    words: str
    pictures: list[Picture]
    names: dict[int, str]


Reader = Callable[[bytes, str], Read]  # content and name; a `DataError` says why there is none


class Session:
    """A classifier that grows and shrinks, and photographs that it answers.

    Args:
        classifier: what there is at the beginning, examples or none.
        reader: makes vectors and thumbnails of picture files.
        false_alarms: as in `Classifier.answer`.
    """

    def __init__(
        self, classifier: Classifier, reader: Reader, *, false_alarms: float = 0.05
    ) -> None:
        if len(classifier.labels) > untrusted.SHOWN:
            raise DataError(
                f"the classifier has {len(classifier.labels)} examples, and the page shows at most "
                f"{untrusted.SHOWN}: use `ibaml predict`"
            )
        self._empty = Classifier(
            classifier.prior, promises=classifier.promises, source=classifier.source
        )
        self._reader, self._false_alarms = reader, false_alarms
        self._lock = RLock()
        self._numbers = 0
        self._names = {self._next(): name for name in classifier.classes}
        numbers = {name: number for number, name in self._names.items()}
        self._pictures: dict[int, Picture] = {}
        for file, label, vector in zip(
            classifier.files, classifier.labels, classifier.x, strict=True
        ):
            self._keep(Picture(self._next(), file, vector, numbers[label]))
        self._removed: list[_Removed] = []
        self._version = self._taught = self._saved = 0
        self._known: tuple[int, dict[str, Any]] | None = None

    # --- what a person does -----------------------------------------------------------------------

    def add(self, data: bytes, name: str, label: int | None) -> int:
        """A picture file becomes an example of a class, or a photograph to name; its number."""
        name = tidy(name)
        if not data:
            raise DataError(f"{name}: the file is empty")
        with self._lock:
            self._check_class(label)
            self._check_room()
            number = self._next()  # in the order in which they came, not were read
        read = self._reader(data, name)  # takes long: others may go on meanwhile
        with self._lock:
            self._check_class(label)  # it may be gone by now
            self._check_room()
            self._check_new(read.vector, label, name)
            self._keep(Picture(number, name, read.vector, label, read.thumbnail))
            self._changed(label is not None)
            return number

    def add_class(self, name: str) -> int:
        """A class without examples yet; returns its number."""
        with self._lock:
            name, number = self._free_name(name), self._next()
            self._names[number] = name
            self._changed()
            return number

    def rename(self, label: int, name: str) -> None:
        """Another name for a class."""
        with self._lock:
            self._check_class(label)
            if name.strip() != self._names[label]:
                self._names[label] = self._free_name(name)
                self._changed()

    def move(self, number: int, label: int | None) -> None:
        """A picture becomes an example of a class, or of none: a photograph to name."""
        with self._lock:
            picture = self._picture(number)
            self._check_class(label)
            if picture.label == label:
                return
            self._check_new(picture.vector, label, picture.name)
            self._keep(replace(picture, label=label))
            self._changed()

    def remove(self, numbers: Sequence[int]) -> None:
        """Pictures go."""
        with self._lock:
            gone = [self._picture(number) for number in dict.fromkeys(numbers)]
            if not gone:
                raise DataError("say which pictures to remove")
            words = gone[0].name if len(gone) == 1 else f"{len(gone)} photographs"
            names = {p.label: self._names[p.label] for p in gone if p.label is not None}
            self._remove(_Removed(words, gone, names))

    def remove_class(self, label: int) -> None:
        """A class goes with its examples."""
        with self._lock:
            self._check_class(label)
            gone = [p for p in self._pictures.values() if p.label == label]
            name = self._names.pop(label)
            self._remove(_Removed(f"the class {name}", gone, {label: name}))

    def undo(self) -> str:
        """What was removed last is there again; returns what that was."""
        with self._lock:
            if not self._removed:
                raise DataError("there is nothing to take back")
            last = self._removed[-1]
            self._check_room(len(last.pictures))
            lost = {label: name for label, name in last.names.items() if label not in self._names}
            if taken := sorted(set(lost.values()) & set(self._names.values())):
                raise DataError(f"there is another class {taken[0]} by now: rename that first")
            self._names = dict(sorted((self._names | lost).items()))
            for picture in last.pictures:
                self._keep(picture)
            self._removed.pop()
            self._changed(bool(last.names))
            return last.words

    def saved(self) -> bytes:
        """The file that `ibaml predict` and `ibaml serve` read."""
        with self._lock:
            classifier = self._classifier()
            if not classifier.labels:
                raise DataError("there is no example to save yet: add photographs to a class")
            with tempfile.TemporaryDirectory() as folder:
                content = classifier.save(Path(folder) / "classifier.ibaml").read_bytes()
            self._saved = self._taught
            return content

    # --- what is shown ----------------------------------------------------------------------------

    def thumbnail(self, number: int) -> bytes:
        with self._lock:
            if (content := self._picture(number).thumbnail) is None:
                raise DataError("a saved classifier holds no photographs")
            return content

    @property
    def unsaved(self) -> bool:
        """Whether changes of the examples would be lost."""
        with self._lock:
            return self._saved != self._taught and bool(self._examples())

    def state(self) -> dict[str, Any]:
        """Everything on the page, as JSON."""
        with self._lock:
            if self._known is None or self._known[0] != self._version:
                self._known = (self._version, self._described())
            last = self._removed[-1].words if self._removed else None
            return {**self._known[1], "undo": last, "unsaved": self.unsaved}

    def _described(self) -> dict[str, Any]:
        examples = self._examples()
        queries = [p for p in self._pictures.values() if p.label is None]
        classes = [
            {
                "id": label,
                "name": name,
                "examples": [_shown(p) for p in examples if p.label == label],
            }
            for label, name in self._names.items()
        ]
        shown = [_shown(p) for p in queries]
        notes: list[str] = []
        if examples and queries:
            notes = self._answer(examples, queries, shown)
        return {"version": self._version, "classes": classes, "queries": shown, "notes": notes}

    def _answer(
        self, examples: list[Picture], queries: list[Picture], shown: list[dict[str, Any]]
    ) -> list[str]:
        """Add to the queries what is said of them; returns what cannot be said."""
        classifier, x = self._classifier(), torch.stack([p.vector for p in queries])
        answers = classifier.answer(x, self._false_alarms)
        nearest = classifier.nearest(x, NEAREST)
        labels, best, classes = answers.labels, answers.best, answers.classes
        numbers = {name: label for label, name in self._names.items()}
        ranks: dict[int, int] = {}
        if len(queries) > 1:
            ranks = {row: place for place, row in enumerate(classifier.suggest(x, NEXT), 1)}
        for i, said in enumerate(shown):
            likely = answers.probabilities[i].argsort()[::-1][: OTHERS + 1]
            said |= {
                "label": labels[i],
                "best": numbers[best[i]],
                "unknown": bool(answers.unknown[i]),
                "sure": None if answers.sure is None else bool(answers.sure[i]),
                "classes": [
                    {
                        "name": classes[c],
                        "probability": float(answers.probabilities[i, c]),
                    }
                    for c in likely
                ],
                "nearest": [examples[row].number for row in nearest[i]],
                "next": ranks.get(i),
            }
        notes = []
        if any(math.isnan(value) for value in answers.familiar):
            notes.append(
                "Which photographs are of none of your classes is not known: that needs a prior, "
                "or 20 examples."
            )
        if len(answers.classes) == 1:
            notes.append(
                f"With one class the answer is {answers.classes[0]} or {UNKNOWN}: add a second one."
            )
        return notes

    # --- inside -----------------------------------------------------------------------------------

    def _next(self) -> int:
        self._numbers += 1
        return self._numbers

    def _keep(self, picture: Picture) -> None:
        """Those with smaller numbers come first, also after one comes back."""
        self._pictures[picture.number] = picture
        if picture.number != max(self._pictures):
            self._pictures = dict(sorted(self._pictures.items()))

    def _remove(self, gone: _Removed) -> None:
        for picture in gone.pictures:
            del self._pictures[picture.number]
        self._removed = [*self._removed, gone][-_UNDO:]
        self._changed(bool(gone.names))

    def _changed(self, taught: bool = True) -> None:
        """Something is new, among the examples or only among what is to be named."""
        self._version += 1
        self._taught += taught

    def _examples(self) -> list[Picture]:
        return [p for p in self._pictures.values() if p.label is not None]

    def _classifier(self) -> Classifier:
        empty, examples = self._empty, self._examples()
        made = Classifier(empty.prior, promises=empty.promises, source=empty.source)
        if examples:
            labels = [self._names[p.label] for p in examples if p.label is not None]
            files = [p.file_in(name) for p, name in zip(examples, labels, strict=True)]
            made.add(torch.stack([p.vector for p in examples]), labels, files)
        return made

    def _picture(self, number: int) -> Picture:
        if number not in self._pictures:
            raise DataError("this photograph is not there any more")
        return self._pictures[number]

    def _check_class(self, label: int | None) -> None:
        if label is not None and label not in self._names:
            raise DataError("this class is not there any more")

    def _check_room(self, count: int = 1) -> None:
        if len(self._pictures) + count > untrusted.SHOWN:
            raise DataError(
                f"the page holds at most {untrusted.SHOWN} photographs: remove some, or use "
                "`ibaml predict` for more"
            )

    def _check_new(self, vector: Tensor, label: int | None, name: str) -> None:
        for other in self._pictures.values():
            if other.label == label and torch.equal(other.vector, vector):
                where = f"in {self._names[label]}" if label else "among the photographs to name"
                raise DataError(f"{name}: this photograph is {where} already")

    def _free_name(self, name: str) -> str:
        name = name.strip()
        if not name or name == UNKNOWN:
            raise DataError(f"{name or 'nothing'} cannot be the name of a class: choose another")
        if not name.isprintable():
            raise DataError("the name of a class is one line of letters: leave out the others")
        if len(name) > untrusted.NAME:
            raise DataError(f"the name of a class has at most {untrusted.NAME} letters: shorten it")
        if name in self._names.values():
            raise DataError(f"there is a class {name} already")
        if len(self._names) >= untrusted.SHOWN:
            raise DataError(f"the page holds at most {untrusted.SHOWN} classes")
        return name


def tidy(name: str) -> str:
    """The name of a file as it is kept and shown: one line, no folders, no control characters."""
    name = name.replace("\\", "/").rstrip("/").rsplit("/", 1)[-1]
    name = "".join(c if c.isprintable() else "?" for c in name).strip()
    if len(name) > untrusted.NAME:
        name = name[: untrusted.NAME - 1] + "…"
    return name or "a file without a name"


def _shown(picture: Picture) -> dict[str, Any]:
    return {
        "id": picture.number, "name": picture.name, "picture": picture.thumbnail is not None,
    }  # fmt: skip
