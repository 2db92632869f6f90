"""How good are a learner's answers, as they are and with the best scale that one number can give?

The scale is a temperature of class probabilities, or a factor of predictive deviations. At its own
best scale a learner is judged by what it knows, not by how sure it is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ibaml.energy import Likelihood
from ibaml.evaluation import bin_sums, ece
from ibaml.evaluation.temperature import LIMIT, fit_log_temperature
from ibaml.execution import NormStats
from ibaml.learner import MetaLearner
from ibaml.posterior import Posteriors
from ibaml.tasks import TaskBatch

SAMPLES = 10  # draws of a prediction, where it needs draws
POINTS = 64  # that stand for a Gaussian head's outputs otherwise
_HUGE = 1e12  # stands for squares and variances that are not finite


@dataclass(frozen=True)
class Answers:
    """Answers to the queries of T tasks.

    Attributes:
        nll: of the queries as they are answered, (T,).
        informed: the same at the best scale, (T,).
        scale: that scale: t above 1 (a factor of σ below 1) says that answers were not sure enough.
        right: mean accuracy, or 1 − mse/variance of the targets of a task.
        skill: 0 for answers that ignore the input, 1 for perfect ones.
        known: nats a query that the answers, at their best scale, are ahead of such answers.
        confidence: mean probability of the answer, or how often the target is inside the 95 %
            interval.
        error: expected calibration error, or the distance of that share from 95 %.
        gap: confidence minus accuracy, or 95 % minus the share inside: above 0 is too sure.
        drawn: the share of the variance of outputs that comes from the draws, not from the inputs.
        diverged: the share of tasks whose adaptation diverged; there the prior answers.
    """

    nll: np.ndarray
    informed: np.ndarray
    scale: float
    right: float
    skill: float
    known: float
    confidence: float
    error: float
    gap: float
    drawn: float
    diverged: float


@torch.no_grad()
def answers(
    learner: MetaLearner,
    batches: Sequence[TaskBatch],
    norm_stats: NormStats | None = None,
    *,
    alone: int = 0,
) -> Answers:
    """The answers of a learner to the queries of some tasks.

    Args:
        alone: ask so many queries of each task, one at a time where it makes a difference (0: all
            of them, together).
    """
    asked = [_some(batch, alone) for batch in batches]
    one_by_one = bool(alone) and "batch" in learner.norm_plan(norm_stats).values()
    posteriors = [learner.adapt_all(batch, norm_stats=norm_stats) for batch in asked]
    if asked[0].query_y.is_floating_point():
        noise = learner.likelihood.noise_variance()
        return _numbers(posteriors, asked, 0.0 if noise is None else float(noise), one_by_one)
    return _labels(posteriors, asked, learner.likelihood, one_by_one)


def _some(batch: TaskBatch, count: int) -> TaskBatch:
    """The batch with ``count`` of its queries, evenly spread."""
    if not count or count >= batch.query_x.shape[1]:
        return batch
    total = batch.query_x.shape[1]
    where = torch.linspace(0, total - 1, count).round().long().to(batch.query_x.device)
    return TaskBatch(
        batch.support_x, batch.support_y, batch.query_x[:, where], batch.query_y[:, where],
        batch.keys, validate=False, classes=batch.classes,
    )  # fmt: skip


def _parts(x: Tensor, alone: bool) -> Sequence[Tensor]:
    return x.split(1, 1) if alone else (x,)


def _labels(
    posteriors: Sequence[Posteriors],
    batches: Sequence[TaskBatch],
    likelihood: Likelihood,
    alone: bool,
) -> Answers:
    logs, labels, shares = [], [], []
    for of, batch in zip(posteriors, batches, strict=True):
        outputs = torch.cat([_outputs(of, x) for x in _parts(batch.query_x, alone)], 2)
        p = likelihood.probabilities(outputs.flatten(0, 2)).view_as(outputs)
        logs.append(p.clamp(min=torch.finfo(p.dtype).tiny).log().nan_to_num(-math.log(p.shape[-1])))
        labels.append(batch.query_y)
        shares.append(_drawn(outputs - outputs.mean(-1, keepdim=True)))
    scale = _best_temperature(logs, labels)
    averaged = [log.exp().mean(1) for log in logs]
    at_best = [(scale * log).log_softmax(-1).exp().mean(1) for log in logs]
    confidence = np.concatenate([_flat(p.amax(-1)) for p in averaged]).clip(0, 1)
    correct = np.concatenate(
        [_flat(p.argmax(-1) == y) > 0 for p, y in zip(averaged, labels, strict=True)]
    )
    informed = _nll(at_best, labels)
    right, chance = float(correct.mean()), 1 / averaged[0].shape[-1]
    return Answers(
        nll=_nll(averaged, labels),
        informed=informed,
        scale=scale,
        right=right,
        skill=(right - chance) / (1 - chance),
        known=-math.log(chance) - float(informed.mean()),
        confidence=float(confidence.mean()),
        error=float(ece(bin_sums(confidence, correct).sum(0))),
        gap=float(confidence.mean()) - right,
        drawn=float(torch.cat(shares).mean()),
        diverged=_diverged(posteriors),
    )


def _outputs(of: Posteriors, x: Tensor) -> Tensor:
    """What the network says under draws, or at the points that stand for them, (T, S, M, C)."""
    at_points = of.outputs_at_points(x, count=POINTS)
    return of.outputs(x, SAMPLES) if at_points is None else torch.cat(list(at_points), 2)


def _best_temperature(logs: Sequence[Tensor], labels: Sequence[Tensor]) -> float:
    """The temperature with the least nll; answers that all but ignore their inputs need more than
    one fit reaches."""
    total = 1.0
    for _ in range(3):
        fit = fit_log_temperature([total * log for log in logs], labels)
        total *= math.exp(fit)
        if abs(fit) < 0.9 * LIMIT:
            break
    return total


def _nll(probabilities: Sequence[Tensor], labels: Sequence[Tensor]) -> np.ndarray:
    rows = []
    for p, y in zip(probabilities, labels, strict=True):
        right = p.gather(-1, y.long()[..., None])[..., 0].double()
        rows.append(-right.clamp(min=torch.finfo(p.dtype).tiny).log().mean(1).cpu().numpy())
    return np.concatenate(rows)


def _numbers(
    posteriors: Sequence[Posteriors], batches: Sequence[TaskBatch], noise: float, alone: bool
) -> Answers:
    squares, variances, spreads, shares = [], [], [], []
    for of, batch in zip(posteriors, batches, strict=True):
        parts = [of.predict(x, SAMPLES) for x in _parts(batch.query_x, alone)]
        mean, variance = (_flat(torch.cat(group, 1)) for group in zip(*parts, strict=True))
        y = _flat(batch.query_y)
        variances.append(np.nan_to_num(variance, nan=_HUGE).clip(1e-12, _HUGE))
        squares.append(np.nan_to_num(np.square(mean - y), nan=_HUGE).clip(0, _HUGE))
        spreads.append(np.square(y - y.mean(1, keepdims=True)).sum())
        within = (variances[-1] - noise).clip(0).mean(1)
        shares.append(within / (within + mean.var(1)).clip(1e-12))
    tasks = list(zip(squares, variances, strict=True))
    ratios = np.concatenate([(square / variance).ravel() for square, variance in tasks])
    scale = max(math.sqrt(float(ratios.mean())), 1e-6)

    def nll(factor: float) -> np.ndarray:
        return np.concatenate([
            (square / (factor**2 * variance) + np.log(2 * math.pi * factor**2 * variance)).mean(1)
            for square, variance in tasks
        ]) / 2  # fmt: skip

    inside = float((ratios <= 1.96**2).mean())
    explained = 1 - float(sum(square.sum() for square in squares)) / max(float(sum(spreads)), 1e-12)
    return Answers(
        nll=nll(1.0),
        informed=nll(scale),
        scale=scale,
        right=explained,
        skill=explained,
        known=-0.5 * math.log(max(1 - explained, 1e-12)),
        confidence=inside,
        error=abs(0.95 - inside),
        gap=0.95 - inside,
        drawn=float(np.concatenate(shares).mean()),
        diverged=_diverged(posteriors),
    )


def _flat(values: Tensor) -> np.ndarray:
    """Numbers of every task, (T, M)."""
    flat: np.ndarray = values.flatten(1).double().cpu().numpy()
    return flat


def _drawn(outputs: Tensor) -> Tensor:
    """The share of the variance over draws and queries that is over draws, (T,)."""
    within = outputs.double().var(1, correction=0).mean((-1, -2))
    between = outputs.double().mean(1).var(1, correction=0).mean(-1)
    return (within / (within + between).clamp(min=1e-12)).nan_to_num(1.0)


def _diverged(posteriors: Sequence[Posteriors]) -> float:
    solutions = [of.solution for of in posteriors]
    flags = [s.diverged.double().cpu() for s in solutions if s is not None]
    return float(torch.cat(flags).mean())
