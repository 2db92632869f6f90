"""How is the prior updated? The optimizer, its step size, and the average of the iterates."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ibaml.training.settings import Settings

_OPTIMIZERS: dict[str, type[torch.optim.Optimizer]] = {
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "sgd": torch.optim.SGD,
    "rmsprop": torch.optim.RMSprop,
    "radam": torch.optim.RAdam,
    "nadam": torch.optim.NAdam,
    "adagrad": torch.optim.Adagrad,
}
_ON_DEVICE = {
    "adam": ("fused",), "adamw": ("fused",), "rmsprop": ("capturable",), "radam": ("capturable",),
    "nadam": ("capturable",),
}  # fmt: skip


def build_optimizer(
    settings: Settings, parameters: Iterable[nn.Parameter]
) -> torch.optim.Optimizer:
    parameters = list(parameters)
    options: dict[str, Any] = {"lr": settings.meta_lr, "weight_decay": settings.weight_decay}
    if settings.momentum is not None:
        options["momentum"] = settings.momentum
    if parameters[0].is_cuda:  # steps are counted on the device, where `step_where` takes them back
        options |= dict.fromkeys(_ON_DEVICE.get(settings.optimizer, ()), True)
    return _OPTIMIZERS[settings.optimizer](parameters, **options)


@torch.no_grad()
def step_where(optimizer: torch.optim.Optimizer, moved: Tensor) -> None:
    """The optimizer's step if a flag on the device says so, else nothing; the host does not look.

    (Adagrad counts its steps on the host, and this one too. It reads them for a decay that we do
    not use.)
    """
    if optimizer.defaults.get("fused"):
        optimizer.found_inf = (~moved).float()  # type: ignore[attr-defined]  # as GradScaler does
        optimizer.step()
        return
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    before = {p: p.clone() for p in parameters}
    known = {p: {n: t.clone() for n, t in _state(optimizer, p, moved)} for p in parameters}
    optimizer.step()
    for p in parameters:
        p.copy_(torch.where(moved, p, before[p]))
        for name, value in _state(optimizer, p, moved):
            # what the first step made begins at zero, but NAdam's product at one
            begins = torch.ones_like if name == "mu_product" else torch.zeros_like
            old = known[p].get(name, begins(value))
            value.copy_(torch.where(moved, value, old))


def _state(
    optimizer: torch.optim.Optimizer, parameter: Tensor, flag: Tensor
) -> list[tuple[str, Tensor]]:
    """What the optimizer remembers of a parameter, where the flag is."""
    memory = optimizer.state.get(parameter, {})
    return [
        (name, value)
        for name, value in memory.items()
        if isinstance(value, Tensor) and value.device == flag.device
    ]


def rate_at(settings: Settings, step: int) -> float:
    """The step size of iteration ``step`` (0 is the first), which depends on nothing else."""
    assert settings.meta_lr is not None
    if step < settings.warmup:
        return settings.meta_lr * (step + 1) / settings.warmup
    share = (step - settings.warmup) / max(1, settings.iterations - settings.warmup)
    if settings.schedule == "constant":
        return settings.meta_lr
    if settings.schedule == "linear":
        return settings.meta_lr * (1 - share)
    return settings.meta_lr * (1 + math.cos(math.pi * share)) / 2


class Average:
    """An exponential moving average of parameters, corrected for its start: after n updates the
    weight of iterate i is proportional to decay^(n−i)."""

    def __init__(self, decay: float, named: Iterable[tuple[str, nn.Parameter]]) -> None:
        self.decay = decay
        self._live = dict(named)
        self.values = {name: p.detach().clone() for name, p in self._live.items()}
        like = next(iter(self.values.values()))
        self.updates = torch.zeros((), dtype=torch.float64, device=like.device)

    @torch.no_grad()
    def update(self, moved: Tensor) -> None:
        """Take the parameters into the average if the flag says so; the host does not look."""
        self.updates += moved
        weight = (1 - self.decay) / (1 - self.decay**self.updates) if self.decay < 1 else (
            1 / self.updates
        )  # fmt: skip
        for name, value in self.values.items():
            moves = torch.lerp(value, self._live[name].detach(), weight.to(value.dtype))
            value.copy_(torch.where(moved, moves, value))

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Inside the block the parameters hold their average."""
        live = {name: p.detach().clone() for name, p in self._live.items()}
        self._fill(self.values)
        try:
            yield
        finally:
            self._fill(live)

    @torch.no_grad()
    def _fill(self, values: dict[str, Tensor]) -> None:
        for name, parameter in self._live.items():
            parameter.copy_(values[name])


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimizer's state as tensors named INDEX/NAME."""
    tensors = {}
    for index, memory in optimizer.state_dict()["state"].items():
        for name, value in memory.items():
            tensors[f"{index}/{name}"] = torch.as_tensor(value)
    return tensors


def restore_optimizer(optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]) -> None:
    """Restore the optimizer's state; its settings stay those it was built with."""
    state: dict[int, dict[str, Any]] = {}
    parameters = dict(enumerate(p for group in optimizer.param_groups for p in group["params"]))
    for key, value in tensors.items():
        index, _, name = key.partition("/")
        own = parameters[int(index)]
        if value.dim() and value.shape != own.shape:
            raise ValueError(f"the optimizer's {name} of parameter {index} has another shape")
        # NAdam keeps a 0-dimensional product, every optimizer its step: tensors all
        state.setdefault(int(index), {})[name] = value
    if len({frozenset(of_one) for of_one in state.values()}) > 1:
        raise ValueError("the optimizer's state has gaps")
    optimizer.load_state_dict({**optimizer.state_dict(), "state": state})
