"""How are random numbers drawn whose every bit depends on the seed alone?"""

from __future__ import annotations

import numpy as np

_TABLE = 2**20  # numbers in a table of what every place holds


class Numbers:
    """Random integers of a seed, from a counter-based generator whose bits never change."""

    def __init__(self, seed: int) -> None:
        self.bits = np.random.Philox(key=seed)

    def sample(self, total: int, count: int) -> np.ndarray:
        """``count`` different integers below ``total``, in random order (Fisher–Yates)."""
        return sample_from(self.raw(count), total)

    def raw(self, count: int) -> np.ndarray:
        """The next ``count`` numbers of 64 bits."""
        return self.bits.random_raw(count)


def sample_from(raw: np.ndarray, total: int) -> np.ndarray:
    """Different integers below ``total`` from as many raw numbers, in random order (Fisher–Yates).

    >>> sample_from(np.array([7, 7], np.uint64), 5)
    array([2, 4])
    """
    swapped: dict[int, int] = {}
    result = np.empty(len(raw), dtype=np.int64)
    for i in range(len(raw)):
        j = i + int(raw[i]) % (total - i)
        result[i] = swapped.get(j, j)
        swapped[j] = swapped.get(i, i)
    return result


def sample_rows(raw: np.ndarray, totals: np.ndarray) -> np.ndarray:
    """`sample_from` for every row of raw numbers (R, n) and its total (R,), all rows at once."""
    rows, count = raw.shape
    if not rows or rows * int(totals.max()) > _TABLE:  # many examples a class: few are drawn
        drawn = [sample_from(one, int(total)) for one, total in zip(raw, totals, strict=True)]
        return np.array(drawn, dtype=np.int64).reshape(rows, count)
    step = np.arange(count, dtype=np.uint64)
    places = (step + raw % (totals.astype(np.uint64)[:, None] - step)).astype(np.int64)
    table = np.tile(np.arange(totals.max()), (rows, 1))
    result = np.empty((rows, count), dtype=np.int64)
    row = np.arange(rows)
    for i in range(count):
        result[:, i] = table[row, places[:, i]]
        table[row, places[:, i]] = table[:, i]
    return result
