"""How does one weight set run through a module? Without side effects, and twice differentiable."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

from ibaml.execution.locks import Everywhere


@contextmanager
def _without_cudnn() -> Iterator[None]:
    before = torch.backends.cudnn.enabled
    torch.backends.cudnn.enabled = False
    try:
        yield
    finally:
        torch.backends.cudnn.enabled = before


_plain_attention = Everywhere(lambda: sdpa_kernel(SDPBackend.MATH))
_plain_recurrence = Everywhere(_without_cudnn)


@contextmanager
def twice_differentiable(recurrent: bool) -> Iterator[None]:
    """Choose kernels whose second derivative exists.

    Fused attention and cuDNN's recurrent kernels have none, so attention takes its plain form, and
    cuDNN is off for a module with a recurrent layer.
    """
    with _plain_attention(), _plain_recurrence() if recurrent else nullcontext():
        yield


def is_tied(model: nn.Module) -> bool:
    """Whether a tensor of the model has several names."""
    addresses = [
        id(t)
        for of in (model.named_parameters, model.named_buffers)
        for _, t in of(remove_duplicate=False)
    ]
    return len(set(addresses)) < len(addresses)


def call(
    model: nn.Module, tensors: Mapping[str, Tensor | None], x: Tensor, tied: bool = True
) -> Tensor:
    """``model(x)`` with its parameters and buffers replaced by ``tensors``, without side effects.

    Args:
        tied: whether to look for tensors with several names, which takes longer than a small layer.
    """
    output = functional_call(model, dict(tensors), (x,), tie_weights=tied)  # type: ignore[arg-type]
    if not isinstance(output, Tensor):
        raise TypeError(
            f"{type(model).__name__} returned {type(output).__name__}, but one tensor is needed: "
            "wrap the model in a module that returns the tensor the likelihood reads"
        )
    return output
