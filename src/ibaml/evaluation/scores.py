"""What is kept of predictions, and which figures summarize it? Scores are kept per task, so that
tasks can be joined, resampled and paired."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from itertools import pairwise
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from ibaml.evaluation.calibration import bin_sums, ece, mce
from ibaml.evaluation.intervals import Interval, Statistic, bootstrap, mean_interval

Row = dict[str, Any]

_SUM_TOLERANCE = 0.02  # bfloat16 probabilities of many classes sum to 1 no better than this


@dataclass(frozen=True, eq=False)
class _PerTask:
    """Fields with one entry per task, kept in the order of the keys.

    Attributes:
        groups: the name of the group that each task was drawn from, if tasks share groups (the rows
            of one country). Intervals are then over the groups.
    """

    keys: tuple[int, ...]
    groups: tuple[str, ...] | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        keys = tuple(int(key) for key in self.keys)
        if not keys:
            raise ValueError("keys: there are no tasks, and figures need at least one")
        if self.groups is not None and len(self.groups) != len(keys):
            raise ValueError(f"groups is of {len(self.groups)} tasks and keys of {len(keys)}")
        order = sorted(range(len(keys)), key=keys.__getitem__)
        ranked = tuple(keys[i] for i in order)
        for first, second in pairwise(ranked):
            if first == second:
                raise ValueError(f"keys: task {first} is there twice; every task counts once")
        for name, values in self._arrays().items():
            if len(values) != len(keys):
                raise ValueError(f"{name} is of {len(values)} tasks and keys of {len(keys)}")
            if not np.isfinite(values).all():
                bad = keys[int(np.argwhere(~np.isfinite(values))[0][0])]
                raise ValueError(f"{name} of task {bad} is not finite")
            object.__setattr__(self, name, values[order])
        object.__setattr__(self, "keys", ranked)
        if self.groups is not None:
            object.__setattr__(self, "groups", tuple(self.groups[i] for i in order))

    @property
    def distinct(self) -> int:
        """The number that intervals are over: of groups if there are any, else of tasks."""
        return len(set(self.keys if self.groups is None else self.groups))

    def _arrays(self) -> dict[str, np.ndarray]:
        names = [f.name for f in fields(self) if f.name not in ("keys", "groups")]
        given = {name: np.asarray(getattr(self, name)) for name in names}
        return {n: a.astype(np.float64) if a.dtype.kind == "f" else a for n, a in given.items()}

    @classmethod
    def join(cls, parts: Sequence[Self]) -> Self:
        """The tasks of several parts as one; the way they were divided makes no difference."""
        if not parts:
            raise ValueError("join needs at least one part, got none")
        arrays = [part._arrays() for part in parts]
        for name, first in arrays[0].items():
            for other in arrays[1:]:
                if other[name].shape[1:] != first.shape[1:]:
                    raise ValueError(
                        f"{name}: the parts have {first.shape[1:]} and {other[name].shape[1:]} "
                        "predictions a task; evaluate every task on as many queries"
                    )
        grouped = [part.groups for part in parts if part.groups is not None]
        if len(grouped) not in (0, len(parts)):
            raise ValueError("groups: some parts have them and some do not; give them to all")
        keys = tuple(key for part in parts for key in part.keys)
        groups = tuple(name for names in grouped for name in names) if grouped else None
        joined = {name: np.concatenate([a[name] for a in arrays]) for name in arrays[0]}
        return cls(keys=keys, groups=groups, **joined)

    def _rows(self, columns: dict[str, np.ndarray]) -> list[Row]:
        named = {} if self.groups is None else {"task": self.groups}
        lists = {"key": self.keys, **named, **{n: a.tolist() for n, a in columns.items()}}
        return [dict(zip(lists, row, strict=True)) for row in zip(*lists.values(), strict=True)]


@dataclass(frozen=True, eq=False)
class ClassScores(_PerTask):
    """Classification: M predictions in each of T tasks.

    Attributes:
        keys: of the tasks, ascending.
        nll: −log of the right class's probability, (T, M).
        confidence: the largest class probability, (T, M).
        correct: whether that class (the first, if several are equal) is the right one, (T, M).
        brier: Σ over classes of (p − [class is right])², (T, M).
    """

    nll: np.ndarray
    confidence: np.ndarray
    correct: np.ndarray
    brier: np.ndarray

    def __post_init__(self) -> None:
        shape = np.shape(self.nll)
        if len(shape) != 2 or 0 in shape[1:]:
            raise ValueError(f"nll must be (tasks, predictions), got {shape}")
        for name, values in self._arrays().items():
            if values.shape != shape:
                raise ValueError(f"{name} is {values.shape} and nll {shape}: they must be alike")
        object.__setattr__(self, "correct", np.asarray(self.correct, bool))
        super().__post_init__()

    @classmethod
    def of(
        cls, keys: Sequence[int], probabilities: Tensor | np.ndarray, labels: Tensor | np.ndarray
    ) -> ClassScores:
        """From probabilities (T, M, C) and labels (T, M).

        A probability below the smallest normal number of its dtype counts as that number, so that
        the nll stays finite (at most 87.3 in float32, 708.4 in float64).
        """
        p, y = _numpy(probabilities), _numpy(labels)
        if p.ndim != 3 or p.dtype.kind != "f":
            raise ValueError(
                f"probabilities must be floating, (tasks, predictions, classes), got {p.shape} "
                f"{p.dtype}"
            )
        tasks, predictions, classes = p.shape
        if y.shape != (tasks, predictions) or y.dtype.kind not in "iu":
            raise ValueError(
                f"labels must be integers ({tasks}, {predictions}), got {y.shape} {y.dtype}"
            )
        if len(keys) != tasks:
            raise ValueError(f"probabilities are of {tasks} tasks and keys of {len(keys)}")
        if y.size and not (y.min() >= 0 and y.max() < classes):
            raise ValueError(f"labels must be 0 … {classes - 1}, got {y.min()} … {y.max()}")
        tiny = np.finfo(p.dtype).tiny
        p = p.astype(np.float64)
        wrong = ~((p >= 0).all(-1) & (np.abs(p.sum(-1) - 1) <= _SUM_TOLERANCE))
        if wrong.any():
            task, m = np.argwhere(wrong)[0]
            raise ValueError(
                f"probabilities of task {keys[task]}, prediction {m}, are no distribution: "
                f"{p[task, m][:5]}; give probabilities, not logits"
            )
        right = np.take_along_axis(p, y[..., None], -1)[..., 0]
        onehot = np.arange(classes) == y[..., None]
        return cls(
            keys=tuple(keys),
            nll=-np.log(np.maximum(right, tiny)),
            confidence=np.minimum(p.max(-1), 1.0),
            correct=p.argmax(-1) == y,
            brier=np.square(p - onehot).sum(-1),
        )

    @property
    def count(self) -> np.ndarray:
        """The number of predictions of each task, (T,)."""
        return np.full(len(self.keys), self.nll.shape[1])

    def means(self) -> dict[str, np.ndarray]:
        """Figures that are a mean over tasks: of each task, (T,)."""
        return {
            "accuracy": self.correct.mean(1),
            "nll": self.nll.mean(1),
            "brier": self.brier.mean(1),
        }

    def bins(self) -> np.ndarray:
        """Calibration sums of each task, (T, B, 3): see `calibration.bin_sums`."""
        return bin_sums(self.confidence, self.correct)

    def pooled(self) -> dict[str, tuple[Statistic, np.ndarray]]:
        """Figures that are a function of sums over tasks: that function, what each task adds."""
        sums = self.bins()
        return {"ece": (ece, sums), "mce": (mce, sums)}

    def summary(
        self, level: float = 0.95, resamples: int = 2000, seed: int = 0
    ) -> dict[str, Interval]:
        """accuracy, nll, brier (mean over tasks, t interval); ece, mce (bootstrap over tasks)."""
        result = {
            name: mean_interval(values, level, self.groups, resamples, seed)
            for name, values in self.means().items()
        }
        for name, (statistic, sums) in self.pooled().items():
            result[name] = bootstrap(
                statistic, sums, resamples, seed, level, (0.0, 1.0), self.groups
            )
        return result

    def selective(self, points: int = 100) -> tuple[np.ndarray, np.ndarray]:
        """Accuracy if only the surest predictions are answered: coverage and accuracy, (points,).

        Coverage is the share answered, 1/points to 1. Equally sure predictions count as in random
        order.
        """
        if points < 1:
            raise ValueError(f"points must be 1 or more, got {points}")
        sure, group = np.unique(-self.confidence.ravel(), return_inverse=True)
        group = group.ravel()
        count = np.bincount(group, minlength=len(sure))
        right = np.bincount(group, self.correct.ravel(), len(sure))
        coverage = np.arange(1, points + 1) / points
        answered = coverage * self.correct.size
        ends = np.concatenate([[0], np.cumsum(count)])
        return coverage, np.interp(answered, ends, np.append(0, np.cumsum(right))) / answered

    def rows(self) -> list[Row]:
        """One row per task: key (and task, its group), accuracy, nll, brier, mean confidence."""
        return self._rows({**self.means(), "confidence": self.confidence.mean(1)})


@dataclass(frozen=True, eq=False)
class RegressionScores(_PerTask):
    """Regression: one number per task, (T,) each.

    Attributes:
        keys: of the tasks, ascending.
        count: queries of the task.
        nll: mean over its queries of −log predictive density (for a table, of the standardized
            target).
        mse: mean squared error of the predictive mean (for a table, in the target's own units).
        inside: share of the queries inside the 95 % predictive interval.
    """

    count: np.ndarray
    nll: np.ndarray
    mse: np.ndarray
    inside: np.ndarray

    def __post_init__(self) -> None:
        for name, values in self._arrays().items():
            if values.ndim != 1:
                raise ValueError(f"{name} must be one number per task, got shape {values.shape}")
        super().__post_init__()

    def means(self) -> dict[str, np.ndarray]:
        """Figures that are a mean over tasks: of each task, (T,)."""
        return {"nll": self.nll, "coverage": self.inside}

    def pooled(self) -> dict[str, tuple[Statistic, np.ndarray]]:
        """Figures that are a function of sums over tasks: that function, what each task adds."""
        return {"rmse": (_root_mean, np.stack([np.ones(len(self.mse)), self.mse], -1))}

    def summary(
        self, level: float = 0.95, resamples: int = 2000, seed: int = 0
    ) -> dict[str, Interval]:
        """nll, coverage (mean over tasks, t interval); rmse, the root of the mean over tasks of
        the mse and of the ends of its interval."""
        result = {
            name: mean_interval(values, level, self.groups, resamples, seed)
            for name, values in self.means().items()
        }
        mse = mean_interval(self.mse, level, self.groups, resamples, seed)
        ends = (math.sqrt(max(end, 0.0)) for end in (mse.value, mse.low, mse.high))
        return {**result, "rmse": Interval(*ends)}

    def rows(self) -> list[Row]:
        """One row per task: key (and task, its group), count, nll, mse, coverage."""
        return self._rows(
            {"count": self.count, "nll": self.nll, "mse": self.mse, "coverage": self.inside}
        )


Scores = ClassScores | RegressionScores


def _root_mean(sums: np.ndarray) -> np.ndarray:
    return np.sqrt(sums[..., 1] / sums[..., 0])


def _numpy(values: Tensor | np.ndarray) -> np.ndarray:
    if isinstance(values, Tensor):
        values = values.detach().cpu()
        values = (values.float() if values.dtype == torch.bfloat16 else values).numpy()
    values = np.asarray(values)
    return values.astype(np.float32) if values.dtype == np.float16 else values
