"""Which temperature makes predictions calibrated on classes that were not trained on?

One number t for all tasks minimizes the nll of the averaged predictions, mean_s softmax(t·z_s).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

LIMIT = 3.0  # largest |log t|, for tasks that do not bound it (all answers right, or all at chance)
_GRID, _HALVINGS = 13, 8  # of log t over all that is allowed, then around its best point
_AT_ONCE = {"cpu": 2**16, "cuda": 2**26}  # numbers: a CPU's cache, an accelerator's memory


@torch.no_grad()
def fit_log_temperature(
    logits: Sequence[Tensor],
    labels: Sequence[Tensor],
    add_up: Callable[[Sequence[Tensor]], None] = lambda tensors: None,
    device: torch.device | str = "cpu",
) -> float:
    """log t with the least nll, to 0.001; the same in all processes whose sums are added up.

    Args:
        logits: of tasks, (T, S, M, C) each: S draws, M predictions.
        labels: (T, M) each.
        add_up: sums tensors over processes, in place.
        device: of the logits, which a process without tasks cannot tell.
    """
    pieces = [piece for z, y in zip(logits, labels, strict=True) for piece in _pieces(z, y)]

    def totals(grid: Sequence[float]) -> list[float]:
        """The nll for each log t. (The host waits for the device here, and nowhere else.)"""
        sums = torch.zeros(len(grid), dtype=torch.float64, device=device)
        for z, y in pieces:
            sums += torch.stack([_nll(z, y, log_t) for log_t in grid])
        add_up([sums])
        return sums.tolist()

    reach = 2 * LIMIT / (_GRID - 1)
    grid = [i * reach - LIMIT for i in range(_GRID)]
    # of equals the largest: where all answers are right the nll rounds to zero
    least, center = min(zip(totals(grid), grid, strict=True), key=lambda one: (one[0], -one[1]))
    for _ in range(_HALVINGS):
        reach /= 2
        around = [max(center - reach, -LIMIT), min(center + reach, LIMIT)]
        beside = min(zip(totals(around), around, strict=True))
        if beside[0] < least:
            least, center = beside
    return center


def _pieces(z: Tensor, y: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Logits (C, T, S, M), the classes first as `ibaml.heads.few` explains, and labels to pick from
    them, a few tasks at a time: they are read again and again, from the processor's cache."""
    tasks = max(1, _AT_ONCE.get(z.device.type, 2**16) // max(1, z[0].numel()))
    for some, theirs in zip(z.split(tasks), y.split(tasks), strict=True):
        index = theirs.long()[None, :, None].expand(1, *some.shape[:-1])
        yield some.movedim(-1, 0).contiguous(), index


def _nll(z: Tensor, index: Tensor, log_t: float) -> Tensor:
    """−log of the averaged probability of the right class, summed over all predictions."""
    right = (z * math.exp(log_t)).log_softmax(0).gather(0, index)[0]
    averaged = right.logsumexp(1) - math.log(right.shape[1])
    return -averaged.sum(dtype=torch.float64)
