"""How do weight sets run one after another? This works for any module, and is the oracle."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from ibaml.execution.call import call
from ibaml.execution.strategy import Strategy


@dataclass(frozen=True)
class Loop(Strategy):
    """One weight set after another, with the model unchanged."""

    name: ClassVar[str] = "loop"

    def run(
        self,
        model: nn.Module,
        weights: Mapping[str, Tensor],
        constants: Mapping[str, Tensor | None],
        x: Tensor,
    ) -> Tensor:
        tasks, samples = next(iter(weights.values())).shape[:2]
        x = x.contiguous()  # cuDNN's kernels for other formats refuse a slice's alignment

        def one(t: int, s: int) -> Tensor:
            tensors = {**constants, **{name: w[t, s] for name, w in weights.items()}}
            return call(model, tensors, x[t], self.tied)

        return torch.stack([torch.stack([one(t, s) for s in range(samples)]) for t in range(tasks)])

    def features(
        self,
        model: nn.Module,
        constants: Mapping[str, Tensor | None],
        x: Tensor,
        read: Callable[[Tensor], Tensor],
    ) -> Tensor:
        return torch.stack([read(call(model, constants, part, self.tied)) for part in x])
