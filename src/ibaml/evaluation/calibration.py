"""Is a learner right as often as it says? Confidence against accuracy, in bins."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

BINS = 15


@dataclass(frozen=True)
class Reliability:
    """Per bin: mean confidence, accuracy (both NaN where the bin is empty) and count, (B,)."""

    confidence: np.ndarray
    accuracy: np.ndarray
    count: np.ndarray


def bin_sums(confidence: np.ndarray, correct: np.ndarray, bins: int = BINS) -> np.ndarray:
    """Sums over the predictions of each task, (T, B, 3): count, sum of confidence, number right.

    The definition is torchmetrics'. Only the top label counts. Bin k of ``bins`` is
    [k/bins, (k+1)/bins), closed below, and a confidence of exactly 1 has a bin of its own, so that
    B = bins + 1. A confidence is rounded to float32 to find its bin, and the boundaries are
    torch's float32 ``linspace(0, 1, bins + 1)``.

    Args:
        confidence: the largest class probability of each prediction, in [0, 1], (T, M).
        correct: whether that class is the right one, (T, M).
    """
    confidence, correct = np.asarray(confidence, np.float64), np.asarray(correct)
    if confidence.ndim != 2 or confidence.shape != correct.shape:
        raise ValueError(
            f"confidence and correct must be (tasks, predictions) alike, got {confidence.shape} "
            f"and {correct.shape}"
        )
    if bins < 1:
        raise ValueError(f"bins must be 1 or more, got {bins}")
    if not ((confidence >= 0) & (confidence <= 1)).all():
        raise ValueError("confidence must be in [0, 1]: give probabilities, not logits")
    edges = torch.linspace(0, 1, bins + 1, dtype=torch.float32).numpy()
    bin_of = np.searchsorted(edges, confidence.astype(np.float32), side="right") - 1
    tasks, slots = len(confidence), bins + 1
    flat = (np.arange(tasks)[:, None] * slots + bin_of).ravel()
    columns = (np.ones(confidence.size), confidence.ravel(), correct.ravel().astype(np.float64))
    sums = [np.bincount(flat, column, tasks * slots) for column in columns]
    return np.stack(sums, -1).reshape(tasks, slots, 3)


def ece(sums: np.ndarray) -> np.ndarray:
    """Expected calibration error of sums (…, B, 3) over tasks: mean over predictions of the gap
    ``|accuracy − mean confidence|`` of their bins, (…)."""
    count, confidence, right = _columns(sums)
    return np.abs(right - confidence).sum(-1) / count.sum(-1)


def mce(sums: np.ndarray) -> np.ndarray:
    """Maximum calibration error of sums (…, B, 3) over tasks: the largest gap of a bin, (…).

    Empty bins do not count; a bin of one prediction counts as much as any other.
    """
    count, confidence, right = _columns(sums)
    gap = np.abs(right - confidence) / np.where(count > 0, count, 1)
    return gap.max(-1)


def reliability(sums: np.ndarray) -> Reliability:
    """The bins of sums (B, 3) over tasks, for drawing."""
    count, confidence, right = _columns(sums)
    size = np.where(count > 0, count, np.nan)
    return Reliability(confidence / size, right / size, count)


def _columns(sums: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return sums[..., 0], sums[..., 1], sums[..., 2]
