"""How sure is a figure? Intervals over tasks, because tasks are drawn at random.

If tasks share groups (1,000 tasks drawn from 26 countries), only the groups are independent. Given
the group of each task, intervals are over the groups.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ibaml.extras import need

Statistic = Callable[[np.ndarray], np.ndarray]  # (…, *shape) sums over tasks to (…) figures

_CHUNK = 1 << 20  # numbers in memory at once while resampling


@dataclass(frozen=True)
class Interval:
    """A figure and the ends of its confidence interval."""

    value: float
    low: float
    high: float


def mean_interval(
    values: np.ndarray,
    level: float = 0.95,
    groups: Sequence[str] | None = None,
    resamples: int = 2000,
    seed: int = 0,
) -> Interval:
    """The mean of one value per task (T,), with Student's t interval; over groups by `bootstrap`.

    One task, or one group, says nothing about the spread, so its interval is infinite.
    """
    values = np.asarray(values, np.float64)
    if values.ndim != 1 or not len(values):
        raise ValueError(f"values must be one number per task, got shape {values.shape}")
    if not np.isfinite(values).all():
        bad = int(np.argwhere(~np.isfinite(values))[0][0])
        raise ValueError(f"values[{bad}] is {values[bad]}: every task needs a finite figure")
    if groups is not None:
        sums = np.stack([np.ones_like(values), values], -1)
        return bootstrap(_ratio, sums, resamples, seed, level, groups=groups)
    mean, n = float(values.mean()), len(values)
    if n == 1:
        return Interval(mean, -math.inf, math.inf)
    half = _t(level, n - 1) * float(values.std(ddof=1)) / math.sqrt(n)
    return Interval(mean, mean - half, mean + half)


def bootstrap(
    statistic: Statistic,
    sums: np.ndarray,
    resamples: int = 2000,
    seed: int = 0,
    level: float = 0.95,
    bounds: tuple[float, float] = (-math.inf, math.inf),
    groups: Sequence[str] | None = None,
) -> Interval:
    """A figure that is a function of sums over tasks (ECE, MCE).

    Tasks, or groups of them, are resampled whole. The interval is normal, its standard error e that
    of the resamples, and is corrected for bias, which resampling shows as b = mean of the
    resamples − value:

        [value − (1 + √2)·b − t·e,  value − b + t·e]    (mirrored if b < 0)

    widened to contain the value and cut at the bounds. For one task it is as wide as the bounds.

    Why two multiples of b: a sum of ``|gaps|`` is biased upwards by noise in gaps near zero. Far
    from zero b estimates that bias. Where all true gaps are zero, resampling doubles the noise's
    variance, the figure grows by √2 only, and the bias is b/(√2 − 1) = (1 + √2)·b.
    `docs/evaluation.md` has the measured coverage.

    Args:
        statistic: maps ``(…, *shape)`` to (…).
        sums: what each task adds, ``(T, *shape)``.
        bounds: the least and the largest figure there can be.
        groups: the group of each task, where several tasks share one.
    """
    sums = _of_groups(np.asarray(sums, np.float64), groups)
    value, drawn = _resample(statistic, sums, resamples, seed)
    interval = _interval(value, drawn, len(sums), level)
    return Interval(value, max(interval.low, bounds[0]), min(interval.high, bounds[1]))


def bootstrap_difference(
    statistic: Statistic,
    a: np.ndarray,
    b: np.ndarray,
    resamples: int = 2000,
    seed: int = 0,
    level: float = 0.95,
    groups: Sequence[str] | None = None,
) -> Interval:
    """statistic(b) − statistic(a) on the same tasks: both sides see the same resamples.

    The interval is `bootstrap`'s, of the difference.
    """
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    if a.shape != b.shape:
        raise ValueError(f"a and b must be sums of the same tasks, got {a.shape} and {b.shape}")

    def difference(pair: np.ndarray) -> np.ndarray:
        return statistic(pair[:, 1]) - statistic(pair[:, 0])

    pairs = _of_groups(np.stack([a, b], 1), groups)
    value, drawn = _resample(difference, pairs, resamples, seed)
    return _interval(value, drawn, len(pairs), level)


def _of_groups(sums: np.ndarray, groups: Sequence[str] | None) -> np.ndarray:
    """The sums of each group, from the sums of each task."""
    if groups is None:
        return sums
    if len(groups) != len(sums):
        raise ValueError(f"groups name {len(groups)} tasks, and there are {len(sums)}")
    index = {name: i for i, name in enumerate(dict.fromkeys(groups))}
    total = np.zeros((len(index), *sums.shape[1:]))
    np.add.at(total, [index[name] for name in groups], sums)
    return total


def _ratio(sums: np.ndarray) -> np.ndarray:
    return sums[..., 1] / sums[..., 0]


def _resample(
    statistic: Statistic, sums: np.ndarray, resamples: int, seed: int
) -> tuple[float, np.ndarray]:
    """The figure, and the figures of resampled tasks (R,), a few resamples at a time."""
    if sums.ndim < 1 or not len(sums):
        raise ValueError("sums must have one row per task, got none")
    if resamples < 2:
        raise ValueError(f"resamples must be 2 or more, got {resamples}")
    tasks, shape = len(sums), sums.shape[1:]
    flat = sums.reshape(tasks, -1)
    value = float(statistic(sums.sum(0)[None])[0])
    step = max(1, _CHUNK // (tasks + flat.shape[1]))
    rng, share = np.random.default_rng(seed), np.full(tasks, 1 / tasks)
    drawn = np.empty(resamples)
    for start in range(0, resamples, step):
        size = min(step, resamples - start)
        weights = rng.multinomial(tasks, share, size=size).astype(np.float64)
        drawn[start : start + size] = statistic((weights @ flat).reshape(size, *shape))
    return value, drawn


def _interval(value: float, drawn: np.ndarray, tasks: int, level: float) -> Interval:
    if tasks == 1:
        return Interval(value, -math.inf, math.inf)
    half = _t(level, tasks - 1) * float(drawn.std(ddof=1))
    bias = float(drawn.mean()) - value
    centers = (value - bias, value - (1 + math.sqrt(2)) * bias)
    return Interval(value, min(value, min(centers) - half), max(value, max(centers) + half))


def _t(level: float, freedom: int) -> float:
    if not 0 < level < 1:
        raise ValueError(f"level must be between 0 and 1, e.g. 0.95, got {level}")
    need("scipy")
    from scipy.special import stdtrit

    return float(stdtrit(freedom, (1 + level) / 2))
