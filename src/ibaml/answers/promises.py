"""What was measured on classes never shown, so that an answer can be relied on?

For tasks of some numbers of ways and shots, from classes that the map had not seen:

- *familiar*: quantiles of the score of queries whose class was shown. The score of a query is
  log Σ_c exp(t·cos_c): with classes that are von Mises and Fisher's densities on the sphere, whose
  answer is softmax(t·cos), it is the log likelihood ratio of the classes shown against a new one
  that may lie anywhere. A query whose score is below the 5 % quantile is called unknown, at 5 %
  false alarms.
- *sure*: the confidence from which on answers were wrong at most so often in 95 % of the tasks.

Between the measured ways and shots both are interpolated in their logarithms.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import log

import numpy as np
import torch
from torch import Tensor

WAYS = (1, 2, 5, 10, 20)
SHOTS = (1, 2, 5, 10, 20)
LEVELS = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.07, 0.1, 0.15, 0.2, 0.3, 0.5, 0.7, 0.9, 0.98)
ERRORS = (0.01, 0.02, 0.05, 0.1, 0.2)


@dataclass(frozen=True)
class Promises:
    """Tables over `WAYS` and `SHOTS`.

    Attributes:
        scores: quantiles at `LEVELS`, (W, S, L).
        confidence: from which answers keep each of `ERRORS`, (W, S, E); above 1 if none do.
        apart: mean squared length of the mean of a class, whose vectors have length 1.
    """

    scores: np.ndarray
    confidence: np.ndarray
    apart: float

    def familiar(self, scores: np.ndarray, ways: int, shots: np.ndarray) -> np.ndarray:
        """Which share of known queries scores lower, for each query; ``shots`` is of its class."""
        result = np.empty(len(scores))
        logs = np.log(LEVELS)
        for some in np.unique(shots):
            here = shots == some
            result[here] = np.exp(
                np.interp(scores[here], _at(self.scores, ways, float(some)), logs)
            )
        return result

    def median(self, ways: int, shots: float) -> float:
        """The usual score of known queries."""
        return float(_at(self.scores, ways, shots)[LEVELS.index(0.5)])

    def sure(self, error: float, ways: int, shots: float) -> float:
        """The confidence from which answers are wrong at most so often."""
        column = _at(self.confidence, ways, shots)
        return float(np.interp(error, ERRORS, column)) if error >= ERRORS[0] else 2.0

    def tensors(self, name: str = "promises") -> dict[str, Tensor]:
        """For a file."""
        return {
            f"{name}/scores": torch.from_numpy(self.scores).float(),
            f"{name}/confidence": torch.from_numpy(self.confidence).float(),
            f"{name}/apart": torch.tensor(self.apart),
        }

    @classmethod
    def read(cls, tensors: Mapping[str, Tensor], name: str = "promises") -> Promises | None:
        """Those among the tensors of a file; None if there are none."""
        if f"{name}/scores" not in tensors:
            return None
        scores, confidence, apart = (
            tensors[f"{name}/{part}"] for part in ("scores", "confidence", "apart")
        )
        shape = (len(WAYS), len(SHOTS))
        if scores.shape != (*shape, len(LEVELS)) or confidence.shape != (
            *shape,
            len(ERRORS),
        ):
            raise ValueError("the tables of what was measured have another shape")
        if not bool(scores.isfinite().all() and confidence.isfinite().all()):
            raise ValueError("the tables of what was measured are not finite")
        if not 0 <= float(apart) <= 1:
            raise ValueError(f"the means of classes have a squared length of {float(apart)}")
        return cls(scores.double().numpy(), confidence.double().numpy(), float(apart))


def _at(table: np.ndarray, ways: float, shots: float) -> np.ndarray:
    """A table (W, S, …) at a number of ways and shots; beyond its ends it stays as it is."""
    i, a = _place(WAYS, ways)
    j, b = _place(SHOTS, shots)
    low = (1 - b) * table[i, j] + b * table[i, j + 1]
    high = (1 - b) * table[i + 1, j] + b * table[i + 1, j + 1]
    result: np.ndarray = (1 - a) * low + a * high
    return result


def _place(grid: Sequence[int], value: float) -> tuple[int, float]:
    """The interval of the grid that a value lies in, and how far along it, in logarithms."""
    value = min(max(value, grid[0]), grid[-1])
    at = min(bisect_right(grid, value) - 1, len(grid) - 2)
    return at, (log(value) - log(grid[at])) / (log(grid[at + 1]) - log(grid[at]))
