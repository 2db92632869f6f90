"""How good is a learner on tasks? Adapt to each, predict its queries and score them, in batches of
tasks so that memory does not grow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace

import torch
from torch import Tensor

from ibaml.energy import Categorical
from ibaml.evaluation.at_once import tasks_at_once
from ibaml.evaluation.scores import ClassScores, RegressionScores, Scores
from ibaml.evaluation.temperature import fit_log_temperature
from ibaml.execution import NormStats
from ibaml.extras import need
from ibaml.learner import MetaLearner
from ibaml.posterior import Posteriors
from ibaml.tasks import TaskBatch, TaskSource

FIT_POINTS = 256  # that stand for a Gaussian head's outputs while a temperature is fitted


@torch.no_grad()
def score_tasks(
    learner: MetaLearner,
    tasks: TaskSource,
    split: str,
    keys: Sequence[int],
    *,
    samples: int = 10,
    norm_stats: NormStats | None = None,
    batch: int | None = None,
    progress: Callable[[int], None] | None = None,
    diverged: list[int] | None = None,
) -> Scores:
    """Scores of the tasks of these keys. If the source has groups or a target with units, the
    scores have the groups, and errors in those units.

    Args:
        samples: Monte-Carlo samples of a prediction.
        norm_stats: batch norm's statistics, see `MetaLearner.adapt`.
        batch: tasks at once; None: as many as fit (16 on a CPU).
        progress: called with the number of tasks done so far.
        diverged: gets the keys of tasks whose adaptation diverged; there the prior predicts.
    """
    if not keys:
        raise ValueError("keys: at least one task is needed")
    if batch is None:
        batch = batch_for(learner, tasks, split, samples=samples, norm_stats=norm_stats)
    if batch < 1:
        raise ValueError(f"batch must be 1 or more, got {batch}")
    parts: list[Scores] = []
    done = 0
    for begin in range(0, len(keys), batch):
        chunk = keys[begin : begin + batch]
        for group in tasks.batches(split, chunk):
            posteriors = learner.adapt_all(group, norm_stats=norm_stats)
            parts.append(score_posteriors(posteriors, group, samples))
            if diverged is not None and posteriors.solution is not None:
                flags = posteriors.solution.diverged.tolist()
                diverged += [k for k, flag in zip(group.task_keys, flags, strict=True) if flag]
        done += len(chunk)
        if progress is not None:
            progress(done)
    scores: Scores = type(parts[0]).join(parts)  # type: ignore[arg-type]
    scores = replace(scores, groups=tasks.groups(split, scores.keys))
    if isinstance(scores, RegressionScores) and tasks.target is not None:
        scores = replace(scores, mse=scores.mse * tasks.target.unit**2)
    return scores


@torch.no_grad()
def fit_temperature(
    learner: MetaLearner,
    tasks: TaskSource,
    split: str,
    keys: Sequence[int],
    *,
    samples: int = 10,
    norm_stats: NormStats | None = None,
    batch: int | None = None,
    add_up: Callable[[Sequence[Tensor]], None] = lambda tensors: None,
) -> Scores | None:
    """Fit the temperature of predictions on the tasks of these keys, for a learner whose likelihood
    is ``Categorical("fitted")`` or ``"both"``. Returns the scores of these tasks with it, or None
    without keys, which one of several processes may have.

    Args:
        norm_stats: batch norm's statistics, see `MetaLearner.adapt`; a temperature is right for the
            statistics it was fitted with.
        batch: tasks at once; None: as many as fit (16 on a CPU).
        add_up: sums tensors over processes, in place.
    """
    likelihood = learner.likelihood
    if not isinstance(likelihood, Categorical) or likelihood.log_fit is None:
        raise ValueError(
            "this learner's temperature is not fitted: make it with "
            'likelihood=Categorical("fitted")'
        )
    if batch is None:
        batch = batch_for(learner, tasks, split, samples=samples, norm_stats=norm_stats)
    predicted: list[tuple[TaskBatch, Tensor]] = []
    for begin in range(0, len(keys), batch):
        for group in tasks.batches(split, keys[begin : begin + batch]):
            posteriors = learner.adapt_all(group, norm_stats=norm_stats)
            at_points = posteriors.outputs_at_points(group.query_x, count=FIT_POINTS)
            if at_points is None:
                outputs = posteriors.outputs(group.query_x, samples)
            else:
                outputs = torch.cat(list(at_points), 2)
            predicted.append((group, outputs))
    temperature = float(likelihood.log_temperature.exp())
    # values that are not finite are refused below, when no process waits for this one any more
    logits = [outputs.nan_to_num() * temperature for _, outputs in predicted]
    labels = [group.query_y for group, _ in predicted]
    fit = fit_log_temperature(logits, labels, add_up, learner.reference.device)
    likelihood.log_fit.fill_(fit)
    parts: list[Scores] = []
    for group, outputs in predicted:
        rows = likelihood.probabilities(outputs.flatten(0, 2))
        probabilities = rows.view_as(outputs).mean(1)
        _finite(probabilities, group)
        parts.append(ClassScores.of(group.task_keys, probabilities, group.query_y))
    return type(parts[0]).join(parts) if parts else None  # type: ignore[arg-type]


@torch.no_grad()
def batch_for(
    learner: MetaLearner,
    tasks: TaskSource,
    split: str,
    *,
    samples: int = 10,
    norm_stats: NormStats | None = None,
) -> int:
    """How many of these tasks to judge at once."""

    def judge(count: int) -> None:
        for group in tasks.batches(split, range(count)):
            posteriors = learner.adapt_all(group, norm_stats=norm_stats)
            with suppress(FloatingPointError):  # the tasks that count will tell
                score_posteriors(posteriors, group, samples)

    return tasks_at_once(learner, judge)


def score_posteriors(posteriors: Posteriors, batch: TaskBatch, samples: int = 10) -> Scores:
    """Scores of one batch of tasks."""
    if batch.query_y.is_floating_point():
        return _regression(posteriors, batch, samples)
    probabilities = posteriors.predict_proba(batch.query_x, samples)
    _finite(probabilities, batch)
    return ClassScores.of(batch.task_keys, probabilities, batch.query_y)


def _regression(posteriors: Posteriors, batch: TaskBatch, samples: int) -> RegressionScores:
    need("scipy")
    from scipy.special import ndtri

    nll = posteriors.nll(batch.query_x, batch.query_y, samples)
    mean, variance = posteriors.predict(batch.query_x, samples)
    _finite(mean, batch)
    _finite(nll, batch)
    error = (mean - batch.query_y).flatten(1)
    _finite(error.square(), batch)
    inside = error.abs() <= float(ndtri(0.975)) * variance.flatten(1).sqrt()
    per_task = [nll.mean(1), error.square().mean(1), inside.double().mean(1)]
    nlls, mses, insides = (t.double().cpu().numpy() for t in per_task)
    count = torch.full((len(batch),), batch.query_y.shape[1]).numpy()
    return RegressionScores(batch.task_keys, count, nlls, mses, insides)


def _finite(predictions: Tensor, batch: TaskBatch) -> None:
    not_finite = ~predictions.flatten(1).isfinite().all(1)
    if bool(not_finite.any()):
        key = batch.task_keys[int(not_finite.nonzero()[0, 0])]
        raise FloatingPointError(
            f"the predictions for task {key} are not finite: are the learner's weights finite?"
        )
