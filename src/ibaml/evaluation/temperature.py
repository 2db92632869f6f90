"""Which temperature makes predictions calibrated on classes that were not trained on?

One number t for all tasks minimizes the nll of the averaged predictions, mean_s softmax(t·z_s).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

LIMIT = 3.0  # largest |log t|, for tasks that do not bound it (all answers right, or all at chance)
_ROUNDS, _POINTS = 4, 13
_AT_ONCE, _ON_DEVICE = 2**16, 2**22  # numbers


@torch.no_grad()
def fit_log_temperature(
    logits: Sequence[Tensor],
    labels: Sequence[Tensor],
    add_up: Callable[[Sequence[Tensor]], None] = lambda tensors: None,
) -> float:
    """log t with the least nll, to 0.0012; the same in all processes whose sums are added up.

    Args:
        logits: of tasks, (T, S, M, C) each: S draws, M predictions.
        labels: (T, M) each.
        add_up: sums tensors over processes, in place.
    """
    pieces = [piece for z, y in zip(logits, labels, strict=True) for piece in _pieces(z, y)]
    center, reach = 0.0, LIMIT
    for _ in range(_ROUNDS):
        grid = torch.linspace(-1, 1, _POINTS, dtype=torch.float64) * reach + center
        grid = grid.clamp(-LIMIT, LIMIT)
        sums = torch.zeros_like(grid)
        for z, y in pieces:  # a device is waited for once a piece
            sums += torch.stack([_nll(z, y, log_t) for log_t in grid.tolist()]).cpu()
        add_up([sums])
        best = int(sums.argmin())
        center = float(grid[best])
        reach *= 2 / (_POINTS - 1)
    return center


def _pieces(z: Tensor, y: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Logits (C, T, S, M), the classes first as `ibaml.heads.few` explains, and labels to pick from
    them, a few tasks at a time: they are read 52 times, from the processor's cache. A device takes
    more at a time, for every piece costs it a wait."""
    at_once = _AT_ONCE if z.device.type == "cpu" else _ON_DEVICE
    tasks = max(1, at_once // max(1, z[0].numel()))
    for some, theirs in zip(z.split(tasks), y.split(tasks), strict=True):
        index = theirs.long()[None, :, None].expand(1, *some.shape[:-1])
        yield some.double().movedim(-1, 0).contiguous(), index


def _nll(z: Tensor, index: Tensor, log_t: float) -> Tensor:
    """−log of the averaged probability of the right class, summed over all predictions."""
    right = (z * math.exp(log_t)).log_softmax(0).gather(0, index)[0]
    averaged = right.logsumexp(1) - math.log(right.shape[1])
    return -averaged.sum(dtype=torch.float64)
