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

from ibaml.evaluation import bin_sums, ece
from ibaml.evaluation.predict import FIT_POINTS
from ibaml.evaluation.temperature import LIMIT, fit_log_temperature
from ibaml.execution import NormStats
from ibaml.learner import MetaLearner
from ibaml.posterior import Posteriors
from ibaml.tasks import TaskBatch

SAMPLES = 10  # draws of a prediction, where it needs draws


@dataclass(frozen=True)
class Answers:
    """Answers to the queries of T tasks.

    Attributes:
        nll: of the queries as they are answered, (T,).
        informed: the same at the best scale, (T,).
        scale: that scale: t above 1 (a factor of σ below 1) says that answers were not sure enough.
        right: mean accuracy, or 1 − mse/variance of the targets of a task.
        skill: 0 for answers that ignore the input, 1 for perfect ones.
        confidence: mean probability of the answer, or how often the target is inside the 95 %
            interval.
        error: expected calibration error, or the distance of that share from 95 %.
        drawn: the share of the variance of outputs that comes from the draws, not from the inputs.
        energy: E at the solutions, (T,); NaN where nothing is minimized.
        diverged: the share of tasks whose adaptation diverged.
    """

    nll: np.ndarray
    informed: np.ndarray
    scale: float
    right: float
    skill: float
    confidence: float
    error: float
    drawn: float
    energy: np.ndarray
    diverged: float

    @property
    def gap(self) -> float:
        """Confidence minus accuracy: above 0 is too sure. (Of intervals: 95 % minus the share
        inside.)"""
        return self.confidence - self.right if self.labels else 0.95 - self.confidence

    labels: bool = True


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
    judge = _numbers if asked[0].query_y.is_floating_point() else _labels
    return judge(learner, posteriors, asked, one_by_one)


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
    learner: MetaLearner, posteriors: Sequence[Posteriors], batches: Sequence[TaskBatch],
    alone: bool,
) -> Answers:  # fmt: skip
    logs, labels, shares = [], [], []
    for of, batch in zip(posteriors, batches, strict=True):
        parts = []
        for x in _parts(batch.query_x, alone):
            at_points = of.outputs_at_points(x, count=FIT_POINTS)
            parts.append(
                of.outputs(x, SAMPLES) if at_points is None else torch.cat(list(at_points), 2)
            )
        outputs = torch.cat(parts, 2)
        rows = learner.likelihood.probabilities(outputs.flatten(0, 2))
        logs.append(
            rows.view_as(outputs)
            .clamp(min=torch.finfo(rows.dtype).tiny)
            .log()
            .nan_to_num(-math.log(rows.shape[-1]))
        )
        labels.append(batch.query_y)
        shares.append(_drawn(outputs - outputs.mean(-1, keepdim=True)))
    scale = _best_temperature(logs, labels)
    p = [log.exp().mean(1) for log in logs]
    at_best = [(scale * log).log_softmax(-1).exp().mean(1) for log in logs]
    confidence = np.concatenate([one.amax(-1).double().cpu().numpy() for one in p]).clip(0, 1)
    correct = np.concatenate(
        [(one.argmax(-1) == y).cpu().numpy() for one, y in zip(p, labels, strict=True)]
    )
    chance = 1 / p[0].shape[-1]
    right = float(correct.mean())
    return Answers(
        nll=_nll(p, labels),
        informed=_nll(at_best, labels),
        scale=scale,
        right=right,
        skill=(right - chance) / (1 - chance),
        confidence=float(confidence.mean()),
        error=float(ece(bin_sums(confidence, correct).sum(0))),
        drawn=float(torch.cat(shares).mean()),
        **_solved(posteriors),
    )


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
    learner: MetaLearner, posteriors: Sequence[Posteriors], batches: Sequence[TaskBatch],
    alone: bool,
) -> Answers:  # fmt: skip
    squares, variances, spreads, nlls, shares = [], [], [], [], []
    noise = learner.likelihood.noise_variance()
    for of, batch in zip(posteriors, batches, strict=True):
        parts = [of.predict(x, SAMPLES) for x in _parts(batch.query_x, alone)]
        mean, variance = (torch.cat(group, 1) for group in zip(*parts, strict=True))
        y = batch.query_y.view_as(mean)
        squares.append((mean - y).square().flatten(1).double().nan_to_num(1e12))
        variances.append(variance.flatten(1).double().nan_to_num(1e12).clamp(min=1e-12))
        spreads.append((y - y.mean(1, keepdim=True)).square().flatten(1).double())
        between = mean.flatten(1).double().var(1, correction=0)
        within = (variances[-1] - (0.0 if noise is None else float(noise))).clamp(min=0).mean(1)
        shares.append(within / (within + between).clamp(min=1e-12))
    scale = math.sqrt(
        float(
            torch.cat([(s / v).flatten() for s, v in zip(squares, variances, strict=True)]).mean()
        )
    )
    scale = max(scale, 1e-6)

    def nll(factor: float) -> np.ndarray:
        return np.concatenate(
            [
                (0.5 * (s / (v * factor**2) + (2 * math.pi * v * factor**2).log()))
                .mean(1)
                .cpu()
                .numpy()
                for s, v in zip(squares, variances, strict=True)
            ]
        )

    inside = float(
        torch.cat(
            [(s <= 1.96**2 * v).double().flatten() for s, v in zip(squares, variances, strict=True)]
        ).mean()
    )
    error = sum(float(s.sum()) for s in squares) / max(sum(float(s.sum()) for s in spreads), 1e-12)
    return Answers(
        nll=nll(1.0),
        informed=nll(scale),
        scale=scale,
        right=1 - error,
        skill=1 - error,
        confidence=inside,
        error=abs(0.95 - inside),
        drawn=float(torch.cat(shares).mean()),
        labels=False,
        **_solved(posteriors),
    )


def _drawn(outputs: Tensor) -> Tensor:
    """The share of the variance over draws and queries that is over draws, (T,)."""
    within = outputs.double().var(1, correction=0).mean((-1, -2))
    between = outputs.double().mean(1).var(1, correction=0).mean(-1)
    return (within / (within + between).clamp(min=1e-12)).nan_to_num(1.0)


def _solved(posteriors: Sequence[Posteriors]) -> dict[str, object]:
    energies, diverged = [], []
    for of in posteriors:
        solution = of.solution
        assert solution is not None
        after = solution.energy_after
        energies.append(np.full(len(of), np.nan) if after is None else after.double().cpu().numpy())
        diverged.append(solution.diverged.double().cpu().numpy())
    return {"energy": np.concatenate(energies), "diverged": float(np.concatenate(diverged).mean())}
