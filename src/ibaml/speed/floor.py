"""How fast could a run be if only its network's convolutions and products cost anything?"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from ibaml.tasks import TaskBatch

_SUMS = ("convolution", "mm", "bmm", "addmm", "linear")
_SIZE, _COPIED = 4096, 2**28  # of the product and the bytes that a device's own speed is timed with


@dataclass(frozen=True)
class Floor:
    """What one task's features need, once forward and once backward.

    Attributes:
        flops: of convolutions and products.
        bytes: of their inputs and outputs, as if all between them cost nothing.
        tasks_per_second: at the speed at which this device multiplies matrices or copies memory,
            whichever is slower here.
    """

    flops: int
    bytes: int
    tasks_per_second: float


class _Bytes(TorchDispatchMode):
    """Adds up what convolutions and products read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__.removesuffix("_backward") in _SUMS:
            tensors = [t for t in tree_leaves((args, kwargs, out)) if isinstance(t, torch.Tensor)]
            self.total += sum(t.numel() * t.element_size() for t in tensors)
        return out


def floor_of(model: nn.Module, batch: TaskBatch) -> Floor:
    """The floor of learning from one task of the batch by a pass over its examples."""
    x = torch.cat([batch.support_x[0], batch.query_x[0]])
    parameters = [p for p in model.parameters() if p.requires_grad]
    counted, moved = FlopCounterMode(display=False), _Bytes()
    with counted, moved:
        torch.autograd.grad(model(x).sum(), parameters, allow_unused=True)
    flops = counted.get_total_flops()
    seconds = max(flops / _flops_per_second(x.device), moved.total / _bytes_per_second(x.device))
    return Floor(flops, moved.total, 1 / seconds)


def _flops_per_second(device: torch.device) -> float:
    """Of a product of float32 matrices, in TF32 if convolutions use it."""
    size = _SIZE if device.type == "cuda" else _SIZE // 4
    x = torch.randn(size, size, device=device)
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32
    try:
        return 2 * size**3 / seconds_of(lambda: x @ x, device)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def _bytes_per_second(device: torch.device) -> float:
    x = torch.empty(_COPIED // 4, device=device)
    y = torch.zeros_like(x)
    return 2 * _COPIED / seconds_of(lambda: y.copy_(x), device)


def seconds_of(work: Callable[[], Any], device: torch.device, times: int = 5) -> float:
    """Seconds of one call, the least of a few, by the clock of this device."""
    least, now = float("inf"), clock_of(device)
    for _ in range(times + 1):  # the first one warms up
        wait_for(device)
        began = now()
        work()
        wait_for(device)
        least = min(least, now() - began)
    return least


def clock_of(device: torch.device) -> Callable[[], float]:
    """Processor time on one CPU thread, which other work on the machine does not change; else the
    time that passes."""
    one_thread = device.type == "cpu" and torch.get_num_threads() == 1
    return time.process_time if one_thread else time.perf_counter


def wait_for(device: torch.device) -> None:
    """Wait until the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
