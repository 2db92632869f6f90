"""One weight set after another through the network: works for any module, and is the oracle."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from ibaml.execution.call import call


def run_loop(
    model: nn.Module,
    weights: Mapping[str, Tensor],
    constants: Mapping[str, Tensor | None],
    x: Tensor,
    tied: bool = True,
) -> Tensor:
    """Outputs (T, S, N, …) of weights (T, S, …) on the tasks' inputs x (T, N, …)."""
    tasks, samples = next(iter(weights.values())).shape[:2]
    x = x.contiguous()  # a slice of weights is aligned for cuDNN's kernels of this format alone
    return torch.stack(
        [
            torch.stack(
                [
                    call(
                        model, {**constants, **{k: w[t, s] for k, w in weights.items()}}, x[t], tied
                    )
                    for s in range(samples)
                ]
            )
            for t in range(tasks)
        ]
    )
