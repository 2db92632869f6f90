"""What holds the examples, and answers, grows, shrinks and is saved?"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ibaml.answers.head import Head
from ibaml.answers.prior import Prior
from ibaml.answers.promises import Promises
from ibaml.answers.suggest import likeness, suggested
from ibaml.container import MISFITS, ArtifactError, read_artifact, write_artifact

UNKNOWN = "unknown"  # the label of a query that looks like none of the classes


@dataclass(frozen=True)
class Answers:
    """What a classifier says of some queries.

    Attributes:
        classes: the names of the columns of ``probabilities``.
        probabilities: given that the class is one of those, (m, C).
        familiar: which share of the queries of known classes looks less familiar, (m,); NaN where
            that is not known.
        unknown: whether a query looks like a class never shown, (m,).
        sure: whether the answer is among those that are wrong at most so often, (m,); None where
            nothing was measured.
    """

    classes: tuple[str, ...]
    probabilities: np.ndarray
    familiar: np.ndarray
    unknown: np.ndarray
    sure: np.ndarray | None

    @property
    def best(self) -> list[str]:
        """The likeliest class of every query, also where it is unknown."""
        return [self.classes[i] for i in self.probabilities.argmax(1)]

    @property
    def labels(self) -> list[str]:
        """The answers: the likeliest class, or "unknown"."""
        return [UNKNOWN if u else b for u, b in zip(self.unknown, self.best, strict=True)]


class Classifier:
    """A few examples of each class, and what was known before.

    Any numbers of classes and of examples of each, which may differ; one class alone is answered
    by whether it is that or unknown.

    Args:
        prior: what is known of classes before; None for nothing but the examples.
        promises: what was measured with such vectors, for a prior that has none.
        source: what turns inputs into vectors, for `save`; any JSON.

    >>> shop = Classifier()
    >>> shop.add(np.eye(40)[:3], ["tea", "tea", "rice"])
    >>> shop.answer(np.eye(40)[2:3]).best
    ['rice']
    """

    def __init__(
        self,
        prior: Prior | None = None,
        *,
        promises: Promises | None = None,
        source: Mapping[str, Any] | None = None,
    ) -> None:
        self.prior, self.promises = prior, promises
        self.source = dict(source or {})
        self.x = torch.zeros(0, 0 if prior is None else prior.features)
        self.labels: list[str] = []
        self.files: list[str] = []
        self._head: Head | None = None

    def __repr__(self) -> str:
        counts = {c: self.labels.count(c) for c in self.classes}
        name = "none" if self.prior is None else self.prior.name
        return f"Classifier(prior={name!r}, examples={counts})"

    @property
    def classes(self) -> tuple[str, ...]:
        return tuple(sorted(set(self.labels)))

    def add(self, x: Any, labels: Sequence[str], files: Sequence[str] | None = None) -> None:
        """Add examples: vectors (n, F), their classes, and the names to remove them by."""
        vectors = self._checked(x)
        files = [""] * len(labels) if files is None else list(files)
        if not len(vectors) == len(labels) == len(files):
            raise ValueError(
                f"there are {len(vectors)} vectors, {len(labels)} labels and {len(files)} files: "
                "give one of each for every example"
            )
        if wrong := [label for label in labels if not str(label).strip() or label == UNKNOWN]:
            raise ValueError(f"{str(wrong[0])!r} cannot be the name of a class: rename it")
        self.x = torch.cat([self.x, vectors]) if len(self.x) else vectors
        self.labels += [str(label) for label in labels]
        self.files += [str(file) for file in files]
        self._head = None

    def add_new(self, x: Any, labels: Sequence[str], files: Sequence[str]) -> int:
        """Add those examples that are not there already; returns how many were new."""
        vectors = self._checked(x)
        there = {
            (label, row.numpy().tobytes()) for label, row in zip(self.labels, self.x, strict=True)
        }
        new = []
        for i, label in enumerate(labels):
            key = (str(label), vectors[i].numpy().tobytes())
            if key not in there:
                new.append(i)
                there.add(key)
        if new:
            self.add(vectors[new], [labels[i] for i in new], [files[i] for i in new])
        return len(new)

    def remove(self, *, classes: Iterable[str] = (), files: Iterable[str] = ()) -> int:
        """Remove classes, and examples by their files; returns how many examples went."""
        gone_classes, gone_files = set(classes), set(files)
        if missing := sorted(gone_classes - set(self.labels)):
            raise ValueError(
                f"there is no class {missing[0]!r}; the classes are {', '.join(self.classes)}"
            )
        if missing := sorted(gone_files - set(self.files)):
            raise ValueError(f"no example is of the file {missing[0]!r}")
        stay = [
            i for i, (label, file) in enumerate(zip(self.labels, self.files, strict=True))
            if label not in gone_classes and file not in gone_files
        ]  # fmt: skip
        if not stay:
            raise ValueError("nothing would be left: a classifier needs an example")
        gone = len(self.labels) - len(stay)
        self.x = self.x[stay]
        self.labels = [self.labels[i] for i in stay]
        self.files = [self.files[i] for i in stay]
        self._head = None
        return gone

    @torch.no_grad()
    def answer(self, x: Any, false_alarms: float = 0.05, error: float = 0.05) -> Answers:
        """Answers for query vectors (m, F).

        Args:
            false_alarms: at which share of known queries *unknown* is said.
            error: how often *sure* answers may be wrong.
        """
        for name, value in (("false_alarms", false_alarms), ("error", error)):
            if not 0 <= value < 1:
                raise ValueError(f"{name} must be from 0 to less than 1, e.g. 0.05, got {value}")
        head = self.head()
        z = head.prior.mapped(self._checked(x))
        probabilities = head.log_probabilities(z).exp().double().numpy()
        familiar = head.familiar(z)
        unknown = np.nan_to_num(familiar, nan=1.0) < false_alarms
        sure = None
        if head.promises is not None and head.classes > 1:
            shots = float(head.counts.min())
            sure = probabilities.max(1) >= head.promises.sure(error, head.classes, shots)
            sure &= ~unknown
        return Answers(self.classes, probabilities, familiar, unknown, sure)

    @torch.no_grad()
    def suggest(self, x: Any, count: int = 5) -> list[int]:
        """Which of the queries (m, F) to label next, the most useful first."""
        if count < 1:
            raise ValueError(f"count must be 1 or more, got {count}")
        head = self.head()
        return suggested(head, head.prior.mapped(self._checked(x)), count)

    @torch.no_grad()
    def nearest(self, x: Any, count: int = 3) -> list[list[int]]:
        """Which examples look most like each of the queries (m, F), the likest first."""
        if count < 1:
            raise ValueError(f"count must be 1 or more, got {count}")
        head = self.head()
        alike = likeness(head, head.prior.mapped(self._checked(x)), head.z)
        return [list(row) for row in alike.topk(min(count, len(head.z)), -1).indices.tolist()]

    def head(self) -> Head:
        """The head of all examples."""
        if not self.labels:
            raise ValueError("there are no examples yet: add some")
        if self._head is None:
            index = {name: i for i, name in enumerate(self.classes)}
            y = torch.tensor([index[label] for label in self.labels])
            with torch.no_grad():
                self._head = Head.of(self.prior, self.x, y, len(index), self.promises)
        return self._head

    def _checked(self, x: Any) -> Tensor:
        array = np.asarray(x.detach().cpu() if isinstance(x, Tensor) else x)
        if array.dtype.kind not in "fiub" or array.ndim != 2:
            raise ValueError(
                f"vectors must be numbers of shape (n, F), got {array.dtype} {array.shape}"
            )
        tensor = torch.from_numpy(np.ascontiguousarray(array, dtype=np.float32))
        expected = self.x.shape[1] or tensor.shape[1]
        if tensor.shape[1] != expected:
            owner = "the prior's" if not len(self.x) else "the examples'"
            raise ValueError(f"vectors have {tensor.shape[1]} features, and {owner} {expected}")
        if not bool(tensor.isfinite().all()):
            row = int((~tensor.isfinite()).any(1).nonzero()[0])
            raise ValueError(f"vector {row} holds a value that is not finite: leave it out")
        return tensor

    # --- files ---

    def save(self, path: str | Path) -> Path:
        """Write it to one file, which needs neither examples nor prior to answer."""
        tensors = {"x": self.x}
        facts: dict[str, Any] = {
            "labels": self.labels, "files": self.files, "source": self.source, "prior": None,
        }  # fmt: skip
        if self.prior is not None:
            facts["prior"], own = self.prior.described()
            tensors |= {f"prior/{n}": t for n, t in own.items()}
        if self.promises is not None:
            tensors |= self.promises.tensors()
        return write_artifact(Path(path), "classifier", facts, tensors)

    @classmethod
    def load(cls, path: str | Path) -> Classifier:
        """The classifier in a file. Nothing in it is executed."""
        path = Path(path)
        facts, tensors = read_artifact(path, "classifier")
        try:
            own = {n[6:]: t for n, t in tensors.items() if n.startswith("prior/")}
            prior = None if facts["prior"] is None else Prior.read(facts["prior"], own)
            source = facts["source"]
            if not isinstance(source, dict):
                raise ValueError("the source is no table")
            found = cls(prior, promises=Promises.read(tensors), source=source)
            for name in ("labels", "files"):
                if not all(isinstance(value, str) for value in facts[name]):
                    raise ValueError(f"{name} are not all text")
            found.add(tensors["x"], facts["labels"], facts["files"])
        except MISFITS as error:
            raise ArtifactError(f"the parts of {path} do not match: {error}") from error
        return found
