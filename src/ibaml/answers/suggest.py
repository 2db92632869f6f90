"""Which queries are worth a label?

One whose label says much about many others: it is like queries that are unsure or unfamiliar, and
that no example is like yet. With k(i, j) the squared cosine of two vectors (0 if it is negative)
and u_j = 1 − confidence·familiarity, the next one has the largest

    Σ_j u_j · max(0, k(i, j) − what j is already covered),

and from then on counts as an example itself, so that several suggestions differ.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ibaml.answers.head import Head

_POOL = 4000  # of more queries, the unsurest are looked at


def suggested(head: Head, z: Tensor, count: int) -> list[int]:
    """Rows of z (m, K), the most useful first; all of them if there are no more."""
    confidence = head.log_probabilities(z).amax(-1).exp()
    familiar = torch.from_numpy(np.nan_to_num(head.familiar(z), nan=1.0)).to(confidence)
    unsure = 1 - confidence * familiar
    pool = unsure.argsort(descending=True, stable=True)[: max(_POOL, count)]
    z, unsure = z[pool], unsure[pool]
    alike = likeness(head, z, z)
    covered = likeness(head, z, head.z).amax(-1)
    chosen: list[int] = []
    for _ in range(min(count, len(z))):
        gain = (alike - covered).clamp_min(0) @ unsure
        gain[chosen] = -1
        chosen.append(int(gain.argmax()))
        covered = torch.maximum(covered, alike[chosen[-1]])
    return [int(row) for row in pool[chosen]]


def likeness(head: Head, a: Tensor, b: Tensor) -> Tensor:
    """How much mapped vectors (n, K) and (m, K) are alike, from 0 to 1, (n, m)."""
    if head.prior.unit:
        return (a @ b.mT).clamp(0, 1).square()
    return (-torch.cdist(a, b).square() / (2 * a.shape[1])).exp()
