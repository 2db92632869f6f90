"""How are logits of few classes computed fast on a CPU? With the classes first in memory.

torch's softmax over a last dimension that is shorter than a vector register goes one number after
another: 12 classes take ten times as long as 16. So the logits of few classes lie as (C, rows),
where neighbors in memory are examples; shapes stay (…, C). Results agree to rounding.
"""

from __future__ import annotations

import torch
from torch import Tensor

FEW = 16  # float32 numbers of the widest register
SMALL = 4096  # so few numbers are quickest in one call


def classes_first(logits: Tensor) -> bool:
    """Whether logits (…, C) are better laid out with the classes first."""
    return logits.device.type == "cpu" and 1 < logits.shape[-1] < FEW


def log_softmax(logits: Tensor) -> Tensor:
    """`Tensor.log_softmax` over the last dimension."""
    if not classes_first(logits):
        return logits.log_softmax(-1)
    return logits.movedim(-1, 0).contiguous().log_softmax(0).movedim(0, -1)


def softmax(logits: Tensor) -> Tensor:
    """`Tensor.softmax` over the last dimension."""
    if not classes_first(logits):
        return logits.softmax(-1)
    return logits.movedim(-1, 0).contiguous().softmax(0).movedim(0, -1)


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """`torch.nn.functional.cross_entropy` of every row, logits (N, C) and labels (N,)."""
    if logits.numel() < SMALL:
        return torch.nn.functional.cross_entropy(logits, labels, reduction="none")
    return torch.nn.functional.nll_loss(log_softmax(logits), labels, reduction="none")
