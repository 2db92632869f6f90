"""Which statistics do batch-norm layers use? Those of the batch, of the support set, or running.

The network itself always runs in evaluation mode, so that a task's energy is one deterministic
function (no dropout, no buffer is written). The buffers that batch norm is given decide which
statistics it uses: without any it takes those of the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from threading import local
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.hooks import RemovableHandle

from ibaml.execution.deferred import force
from ibaml.execution.marks import folds_of, is_folded
from ibaml.execution.moments import MomentsListener, listen
from ibaml.execution.normalize import channel_moments
from ibaml.words import NORM_STATS, NormStats

Buffers = dict[str, Tensor | None]
Plan = dict[str, NormStats]  # layer name -> the statistics it uses
# layer name -> means and biased variances (folds, channels), and how many values each is over
Moments = dict[str, tuple[Tensor, Tensor, int]]


def norm_layers(model: nn.Module) -> dict[str, _BatchNorm]:
    """The batch-norm layers by name (instance, layer and group norm have no such choice)."""
    return {name: m for name, m in model.named_modules() if isinstance(m, _BatchNorm)}


def has_running(layer: _BatchNorm) -> bool:
    return layer.running_mean is not None and layer.running_var is not None


def _key(layer: str, buffer: str) -> str:
    return f"{layer}.{buffer}" if layer else buffer


def plan_norms(
    model: nn.Module,
    norm_stats: NormStats | None,
    adapted: Sequence[str],
    shared: Sequence[str],
    frozen: Sequence[str],
) -> Plan:
    """The statistics of every layer: those in ``norm_stats``; by default the support set's for
    adapted layers and the running ones for shared layers. Frozen layers always use running ones."""
    if norm_stats is not None and norm_stats not in NORM_STATS:
        raise ValueError(f"norm_stats must be one of {NORM_STATS}, got {norm_stats!r}")
    names = {id(p): n for n, p in model.named_parameters()}
    plan: Plan = {}
    for name, layer in norm_layers(model).items():
        owned = {names[id(p)] for p in layer.parameters()}
        if owned and owned <= set(frozen):
            kind: NormStats = "running"
        elif norm_stats is not None:
            kind = norm_stats
        elif owned & set(adapted) or not (owned or shared):
            kind = "support"
        else:
            kind = "running"
        if kind == "running" and not has_running(layer):
            kind = "support"
        plan[name] = kind
    return plan


def norm_buffers(model: nn.Module, plan: Mapping[str, NormStats]) -> Buffers:
    """The buffers that make each layer use its statistics. ``"support"`` counts as ``"batch"``: the
    two are the same while the support set itself runs through the network."""
    buffers: Buffers = {}
    for name, layer in norm_layers(model).items():
        if not has_running(layer):
            continue
        if plan.get(name, "batch") == "running":
            assert layer.running_mean is not None
            assert layer.running_var is not None
            buffers[_key(name, "running_mean")] = layer.running_mean.clone()
            buffers[_key(name, "running_var")] = layer.running_var.clone()
        else:
            buffers[_key(name, "running_mean")] = None
            buffers[_key(name, "running_var")] = None
    return buffers


def support_statistics(
    plan: Mapping[str, NormStats], passes: list[Moments], calls: int, tasks: int, samples: int
) -> dict[str, Tensor]:
    """Running statistics for every weight set, (T, S, channels), which give the layers planned as
    ``"support"`` the moments that they saw in the calls of the network on the support sets."""
    statistics = {}
    for name, kind in plan.items():
        if kind != "support":
            continue
        of_layer = [moments[name] for moments in passes if name in moments]
        if not of_layer:
            raise ValueError(f"batch norm {name!r} was not used in the pass of the support set")
        if len(of_layer) < calls:
            raise ValueError(
                f"batch norm {name} was used for some support sets and not for others, so not all "
                'of them have statistics: adapt with norm_stats="running" or "batch"'
            )
        if len(of_layer) > calls:
            raise ValueError(
                f"batch norm {name} is used more than once in a forward pass, so its support "
                'statistics are not unique: adapt with norm_stats="running" or "batch"'
            )
        means, variances, _ = zip(*of_layer, strict=True)  # for every weight set, or for every task
        for buffer, parts in (("running_mean", means), ("running_var", variances)):
            value = torch.cat(parts)
            value = value.view(tasks, -1, value.shape[-1]).expand(-1, samples, -1)
            statistics[_key(name, buffer)] = value
    return statistics


class _Watchers(local):
    """The modules watched in this thread, each with a function that registers the hooks."""

    def __init__(self) -> None:
        self.all: list[tuple[nn.Module, Callable[[], list[RemovableHandle]]]] = []


_watchers = _Watchers()


@contextmanager
def watched(model: nn.Module) -> Iterator[None]:
    """Inside, the network has the hooks of everything that watches it in this thread."""
    handles = [handle for of, add_hooks in _watchers.all if of is model for handle in add_hooks()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def watch_moments(model: nn.Module) -> Iterator[list[Moments]]:
    """Collect the moments of what every batch-norm layer sees in this thread, one entry per forward
    pass."""
    passes: list[Moments] = []
    names: list[set[str]] = []  # the layers that each pass has run
    listeners: dict[str, list[MomentsListener]] = {}

    def before(name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        def watch(_: nn.Module, args: tuple[Tensor, ...]) -> None:
            with torch._C.DisableTorchFunction():  # these operations are not the network's
                x = args[0]
                if not names or name in names[-1]:
                    passes.append({})
                    names.append(set())
                names[-1].add(name)
                moments, values = passes[-1], x.numel() // x.shape[1]
                listener = MomentsListener(
                    lambda mean, var: moments.update({name: (mean, var, values)})
                )
                if is_folded(x):
                    listen(x, listener)
                listeners.setdefault(name, []).append(listener)

        return watch

    def after(name: str) -> Callable[[nn.Module, tuple[Tensor, ...], Any], None]:
        def watch(_: nn.Module, args: tuple[Tensor, ...], __: Any) -> None:
            with torch._C.DisableTorchFunction():
                listener = listeners[name].pop()
                if not listener.expected:
                    x = force(args[0])
                    listener(*channel_moments(x.detach()), folds_of(x))

        return watch

    def add_hooks() -> list[RemovableHandle]:
        handles = []
        for name, layer in norm_layers(model).items():
            handles.append(layer.register_forward_pre_hook(before(name)))
            handles.append(layer.register_forward_hook(after(name)))
        return handles

    _watchers.all.append((model, add_hooks))
    try:
        yield passes
    finally:
        _watchers.all.pop()


class Statistics:
    """What the batch-norm layers saw in one meta-step, summed over its passes. Running statistics
    move once per meta-step, however its tasks are divided among calls and processes."""

    def __init__(self, model: nn.Module, plan: Mapping[str, NormStats]) -> None:
        self._layers = {
            name: layer
            for name, layer in norm_layers(model).items()
            if has_running(layer) and plan.get(name, "batch") != "running"
        }
        self._sums = {
            name: (torch.zeros_like(mean), torch.zeros_like(mean), mean.new_zeros(()))
            for name, layer in self._layers.items()
            if (mean := layer.running_mean) is not None
        }

    def tensors(self) -> list[Tensor]:
        """The sums themselves, to be added up over processes in place."""
        return [t for sums in self._sums.values() for t in sums]

    @torch.no_grad()
    def add(self, passes: list[Moments]) -> None:
        for moments in passes:
            for name, (mean, var, n) in moments.items():
                if name not in self._sums:
                    continue
                means, variances, count = self._sums[name]
                unbiased = var * (n / max(n - 1, 1))  # torch's convention for running variances
                finite = (mean.isfinite() & var.isfinite()).all(1, keepdim=True)
                means += torch.where(finite, mean, 0.0).sum(0)
                variances += torch.where(finite, unbiased, 0.0).sum(0)
                count += finite.sum()

    @torch.no_grad()
    def apply(self) -> None:
        """Move the running statistics once, towards the mean over all passes."""
        for name, layer in self._layers.items():
            means, variances, count = self._sums[name]
            has_values = count > 0
            rate: float | Tensor = 0.1 if layer.momentum is None else layer.momentum
            if layer.num_batches_tracked is not None:
                layer.num_batches_tracked += has_values
                if layer.momentum is None:
                    rate = 1.0 / layer.num_batches_tracked.clamp(min=1)
            for running, total in ((layer.running_mean, means), (layer.running_var, variances)):
                assert running is not None
                running += rate * torch.where(has_values, total / count.clamp(min=1) - running, 0.0)
