"""How is a prior fitted to base classes, and how do its answers do on classes it has not seen? For
the second, the base classes are dealt into folds, each with the map of the others."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from ibaml.answers.head import Head
from ibaml.answers.prior import MANY, Prior, rooted
from ibaml.answers.promises import ERRORS, LEVELS, SHOTS, WAYS, Promises
from ibaml.extras import need
from ibaml.heads.from_base import FromBase, Whitening, fit
from ibaml.heads.from_data import class_folds, class_statistics
from ibaml.machine import threads

_FOLDS, _TASKS, _QUERIES = 3, 100, 10  # tasks of each size in each fold; queries of each class
_LEAST = 2  # queries of each class
_RISK = 0.05  # of the tasks may break a promise
_GRID = 1 - np.geomspace(1, 1e-4, 121)  # of confidences
_Answered = tuple[np.ndarray, np.ndarray, np.ndarray]  # scores, confidences, whether right


def fit_prior(x: Tensor, y: Tensor, name: str = "own", seed: int = 0, tasks: int = _TASKS) -> Prior:
    """A prior of base classes, with promises if they are enough.

    Args:
        x, y: vectors (n, F) and integer labels, of two classes or more.
        name: as it is shown.
        seed, tasks: see `calibrate`.
    """
    with threads(1):  # small products, for which threads wait longer than they work
        return _fitted(x, y, name, seed, tasks)


def _fitted(x: Tensor, y: Tensor, name: str, seed: int, tasks: int) -> Prior:
    root = x.shape[1] >= MANY and bool((x >= 0).all())
    found = fit(rooted(x) if root else x, y, seed=seed)

    def again(some: Tensor, theirs: Tensor) -> Prior:
        shape = Whitening.of(class_statistics((rooted(some) if root else some).double(), theirs))
        map, variances = shape.axes(found.scalars.shrinkage)
        between = math.exp(found.scalars.diagonal) + math.exp(found.scalars.between) * variances
        part = FromBase(shape.center, map, between, found.scalars, None)
        return Prior.of_base(part, name, root)

    promises = calibrate(x, y, again, seed, tasks)
    return Prior.of_base(found, name, root, promises=promises)


def calibrate(
    x: Tensor,
    y: Tensor,
    fitted: Callable[[Tensor, Tensor], Prior] | None,
    seed: int = 0,
    tasks: int = _TASKS,
) -> Promises | None:
    """Promises for a prior, or without one; None if there are too few classes or examples.

    Args:
        x, y: the base classes, (n, F) and integer labels.
        fitted: makes a prior of some of them; None for no prior.
        seed: deals the folds and draws the tasks.
        tasks: of each size in each fold; with fewer than 59 no answer is sure.
    """
    need("scipy", "Promises")
    classes, sizes = y.unique(return_counts=True)
    large = classes[sizes > _LEAST]
    if len(large) < 2 * _FOLDS:
        return None
    used = torch.isin(y, large)
    x, y = x[used], y[used]
    folds = class_folds(y, _FOLDS, seed)
    lengths: list[float] = []
    answers: dict[tuple[int, int], list[list[_Answered]]] = {}
    rng = np.random.default_rng(seed)
    for kept, left_out in folds:
        prior = None
        rows = torch.isin(y, kept)
        here, labels = x[~rows], y[~rows]
        if fitted is not None:
            prior = fitted(x[rows], y[rows])
            here = prior.mapped(here)
            prior = prior.done
        members = {int(c): (labels == c).nonzero()[:, 0].numpy() for c in left_out}
        index = labels.unique(return_inverse=True)[1]
        alone = Prior.of_support(here, index, len(members)) if prior is None else prior
        z = alone.mapped(here)
        lengths += [float(z[torch.from_numpy(m)].mean(0).square().sum()) for m in members.values()]
        for i, ways in enumerate(WAYS):
            for j, shots in enumerate(SHOTS):
                done = [_task(prior, here, members, ways, shots, rng) for _ in range(tasks)]
                answers.setdefault((i, j), []).append(done)
    scores = np.empty((len(WAYS), len(SHOTS), len(LEVELS)))
    confidence = np.empty((len(WAYS), len(SHOTS), len(ERRORS)))
    for at, by_fold in answers.items():
        known = np.concatenate([task[0] for fold in by_fold for task in fold])
        scores[at] = np.quantile(known, LEVELS)
        confidence[at] = [_surest(by_fold, error) for error in ERRORS]
    return Promises(scores, confidence, float(np.mean(lengths)))


def _task(
    prior: Prior | None,
    x: Tensor,
    members: dict[int, np.ndarray],
    ways: int,
    shots: int,
    rng: np.random.Generator,
) -> _Answered:
    """Scores, confidences and correctness of the queries of one task."""
    longest = sorted((len(rows) for rows in members.values()), reverse=True)
    shots = min(shots, longest[min(ways, len(longest)) - 1] - _LEAST)
    enough = [rows for rows in members.values() if len(rows) >= shots + _LEAST]
    ways = min(ways, len(enough))
    picked = [
        rng.permutation(enough[c])[: shots + _QUERIES] for c in rng.permutation(len(enough))[:ways]
    ]
    support = np.concatenate([rows[:shots] for rows in picked])
    query = np.concatenate([rows[shots:] for rows in picked])
    asked = np.repeat(np.arange(ways), [len(rows) - shots for rows in picked])
    shown = torch.arange(ways).repeat_interleave(shots)
    head = Head.of(prior, x[torch.from_numpy(support)], shown, ways)
    z = head.prior.mapped(x[torch.from_numpy(query)])
    best = head.log_probabilities(z).max(-1)
    total = head.likeness(z).numpy()
    return total, best.values.exp().numpy(), best.indices.numpy() == asked


def _surest(folds: list[list[_Answered]], error: float) -> float:
    """The lowest confidence from which on (and for all higher ones) in every fold, of other
    classes, as few tasks err too often that a share of `_RISK` explains more with 95 %."""
    from scipy.special import bdtr

    kept = np.ones(len(_GRID), bool)
    for tasks in folds:
        broken = np.zeros(len(_GRID), int)
        for _, confidence, right in tasks:
            at = np.searchsorted(_GRID, confidence, side="right") - 1
            answered = np.bincount(at, minlength=len(_GRID))[::-1].cumsum()[::-1]
            wrong = np.bincount(at, weights=~right, minlength=len(_GRID))[::-1].cumsum()[::-1]
            broken += wrong > error * answered
        kept &= bdtr(broken, len(tasks), _RISK) <= 0.05
    bad = np.flatnonzero(~kept)
    first = 0 if not len(bad) else int(bad[-1]) + 1
    return float(_GRID[first]) if first < len(_GRID) else 2.0
