"""How are random numbers drawn whose every bit depends on the seed alone?"""

from __future__ import annotations

import numpy as np


class Numbers:
    """Random integers of a seed, from a counter-based generator whose bits never change."""

    def __init__(self, seed: int) -> None:
        self.bits = np.random.Philox(key=seed)

    def sample(self, total: int, count: int) -> np.ndarray:
        """``count`` different integers below ``total``, in random order (Fisher–Yates)."""
        raw = self.bits.random_raw(count)
        swapped: dict[int, int] = {}
        result = np.empty(count, dtype=np.int64)
        for i in range(count):
            j = i + int(raw[i]) % (total - i)
            result[i] = swapped.get(j, j)
            swapped[j] = swapped.get(i, i)
        return result
