"""What do all contenders share? Weights, data, noise and hyper-parameters."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ibaml import TaskBatch

Method = Literal["maml", "imaml", "abml", "ibaml"]
METHODS: tuple[Method, ...] = get_args(Method)
# by parameter name; those of log-variances as log_var.NAME
Gradients = dict[str, Tensor]
Step = Callable[[], Gradients]


@dataclass(frozen=True)
class Case:
    """One meta-gradient to be computed: the mean over the tasks of the batch."""

    method: Method
    net: nn.Module
    batch: TaskBatch
    steps: int = 5
    lr: float = 0.01
    cg_steps: int = 5
    lam: float = 100.0  # so that H is positive definite, and CG goes all its steps
    samples: int = 5
    log_var: float = -6.0
    curvature: Literal["energy", "ggn"] = "energy"
    seed: int = 0

    def own_net(self) -> nn.Module:
        """A copy that normalizes by the statistics of the batch and keeps none, as the examples of
        the peers do (it is also the faster way for them)."""
        net = copy.deepcopy(self.net).train()
        for layer in net.modules():
            if isinstance(layer, _BatchNorm):
                layer.track_running_stats = False
                layer.running_mean = layer.running_var = layer.num_batches_tracked = None
        return net

    def tasks(self) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
        """Task by task: support inputs and labels, query inputs and labels."""
        b = self.batch
        yield from zip(b.support_x, b.support_y, b.query_x, b.query_y, strict=True)

    def generator(self) -> torch.Generator:
        """What our learner draws its seed from."""
        return torch.Generator().manual_seed(self.seed)


def nll(outputs: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(outputs, y)


def gradients_of(net: nn.Module) -> Gradients:
    """What ``backward()`` left in the network's parameters."""
    return {name: p.grad.detach() for name, p in net.named_parameters() if p.grad is not None}
