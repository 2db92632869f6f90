"""Which simple heads is a learner compared with, and which values may their hyper-parameters take?

Each reads one table of features, the same for all tasks, and answers a task in closed form or by a
convex problem (`ibaml.heads`). What it knows of other classes is from the training classes alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product

import torch
from torch import Tensor
from torch.nn.functional import normalize

from ibaml.assessment.heads_options import HEADS
from ibaml.heads.baselines import (
    gaussian_process,
    logistic_regression,
    nearest_centroid,
    protonet,
    ridge,
)
from ibaml.heads.from_data import TwoCovariance, class_statistics, lda, within_covariance
from ibaml.heads.one_vs_each import one_vs_each, probit_one_vs_each
from ibaml.heads.plda import plda_logits
from ibaml.heads.prior import HeadPrior
from ibaml.tasks import TaskBatch

Values = Mapping[str, float]  # of the hyper-parameters, by name

UNBOUNDED = ("scale", "C", "strength", "noise", "variance")  # where a wider grid might do better
UNKNOWNS = 200  # of one-vs-each in a task, ways² × shots; its time grows with their cube


@dataclass(frozen=True)
class Arm:
    """One head in the comparison.

    Args:
        name: as it is shown.
        grid: the values its hyper-parameters may take.
        table: features of all examples, (n, K), for given values.
        answer: logits (T, Q, C) of tasks whose examples are rows of that table.
        ways: the only number of classes it serves; None for any.
    """

    name: str
    grid: Sequence[Values]
    table: Callable[[Values], Tensor]
    answer: Callable[[TaskBatch, Values], Tensor]
    ways: int | None = None


class Tables:
    """Features as the heads read them, made once for all tasks.

    Args:
        examples: that tasks may draw, (n, F).
        base: examples of the training classes, (m, F).
        labels: the classes of those, (m,).
    """

    def __init__(self, examples: Tensor, base: Tensor, labels: Tensor) -> None:
        examples, base = examples.double(), base.double()
        center = base.mean(0)
        unit = normalize(examples - center, dim=-1)
        self._examples = (examples, unit)
        self._statistics = (
            class_statistics(base, labels),
            class_statistics(normalize(base - center, dim=-1), labels),
        )
        size = within_covariance(self._statistics[0], 0.0).trace().sqrt()
        self.scaled = (examples / size).float()
        self.unit = unit.float()
        self.model = lru_cache(maxsize=None)(self._model)
        self.mapped = lru_cache(maxsize=None)(self._mapped)
        self.turned = lru_cache(maxsize=None)(self._turned)

    def _model(self, shrinkage: float, unit: bool) -> TwoCovariance:
        """Of the training classes, as they are or centered and at length 1."""
        return lda(self._statistics[unit], shrinkage)

    def _mapped(self, shrinkage: float, unit: bool) -> Tensor:
        """In the coordinates of that model."""
        return self.model(shrinkage, unit).mapped(self._examples[unit]).float()

    def _turned(self, shrinkage: float) -> Tensor:
        """Mapped, then at length 1, without which unlike classes are told apart by it alone."""
        return normalize(self.mapped(shrinkage, False), dim=-1)


def simple_heads(tables: Tables, words: Sequence[str]) -> list[Arm]:
    """The heads of these words, see `HEADS`."""

    def unit(values: Values) -> Tensor:
        return tables.unit

    def turned(values: Values) -> Tensor:
        return tables.turned(values["shrinkage"])

    def centroid(batch: TaskBatch, values: Values) -> Tensor:
        return values["scale"] * nearest_centroid(*_of(batch))

    def logistic(batch: TaskBatch, values: Values) -> Tensor:
        return logistic_regression(*_of(batch), strength=values["C"], tol=1e-2)

    def plda(batch: TaskBatch, values: Values) -> Tensor:
        between = tables.model(values["shrinkage"], bool(values["unit"])).between
        between = (1 - values["floor"]) * between + values["floor"] * between.mean()
        return plda_logits(*_of(batch), between.to(batch.support_x))

    known: dict[str, tuple[Sequence[Values], Callable[[Values], Tensor], _Answer]] = {
        "centroid": (_grid(scale=(1, 3, 10, 30, 100)), unit, centroid),
        "protonet": (
            _grid(scale=(0.3, 1, 3, 10, 30, 100, 300)),
            lambda values: tables.scaled,
            lambda batch, values: values["scale"] * protonet(*_of(batch)),
        ),
        "logistic": (_grid(C=(1, 10, 100, 1e3, 1e4, 1e5)), unit, logistic),
        "ridge": (
            _grid(strength=_NOISES),
            unit,
            lambda batch, values: ridge(*_of(batch), strength=values["strength"]),
        ),
        "gp": (_grid(noise=_NOISES), unit, _gaussian_process),
        "one-vs-each": (_grid(variance=(0.1, 1, 10, 100)), unit, _one_vs_each),
        "lda": (
            _grid(shrinkage=(*_SHRINKAGES, 0.97), scale=(3, 10, 30)),
            turned,
            centroid,
        ),
        "lda-logistic": (_grid(shrinkage=_SHRINKAGES, C=(10, 1e3, 1e5)), turned, logistic),
        "plda": (
            _grid(shrinkage=_SHRINKAGES, floor=(0.3, 0.6, 1), unit=(0, 1)),
            lambda values: tables.mapped(values["shrinkage"], bool(values["unit"])),
            plda,
        ),
    }
    return [Arm(HEADS[word], *known[word]) for word in HEADS if word in words]


_Answer = Callable[[TaskBatch, Values], Tensor]
_SHRINKAGES = (0.1, 0.3, 0.6, 0.9)
_NOISES = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3)


def _grid(**values: Sequence[float]) -> list[Values]:
    """All combinations."""
    return [dict(zip(values, chosen, strict=True)) for chosen in product(*values.values())]


def _of(batch: TaskBatch) -> tuple[Tensor, Tensor, Tensor, int]:
    assert batch.classes is not None
    return batch.support_x, batch.support_y, batch.query_x, batch.classes


def _gaussian_process(batch: TaskBatch, values: Values) -> Tensor:
    """With the linear kernel of features of length 1."""
    support, labels, query, classes = _of(batch)
    own = query.square().sum(-1)
    answer = gaussian_process(
        support @ support.mT, labels, support @ query.mT, own, classes, values["noise"]
    )
    return answer.logits(values["noise"])


def _one_vs_each(batch: TaskBatch, values: Values) -> Tensor:
    support, labels, query, classes = _of(batch)
    zero = torch.zeros_like(support[0, 0])
    prior = HeadPrior(zero, torch.full_like(zero, values["variance"]).log())
    fitted = one_vs_each(prior, support, labels, classes, tol=1e-3)
    return probit_one_vs_each(*fitted.posterior.moments(query))
