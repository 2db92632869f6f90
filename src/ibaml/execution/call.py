"""How one weight set runs through a module: purely, and differentiable twice."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel


@contextmanager
def twice_differentiable(recurrent: bool) -> Iterator[None]:
    """Choose kernels whose second derivative exists.

    Fused attention and cuDNN's recurrent kernels have none, so attention takes its plain form and
    cuDNN is set aside for a module with a recurrent layer.
    """
    with sdpa_kernel(SDPBackend.MATH):
        if recurrent and torch.cuda.is_available():
            with torch.backends.cudnn.flags(enabled=False):
                yield
        else:
            yield


_TIED: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()


def _is_tied(model: nn.Module) -> bool:
    """Whether a tensor of the model has several names."""
    if model not in _TIED:
        found = [
            id(t)
            for of in (model.named_parameters, model.named_buffers)
            for _, t in of(remove_duplicate=False)
        ]
        _TIED[model] = len(set(found)) < len(found)
    return _TIED[model]


def call(model: nn.Module, tensors: Mapping[str, Tensor | None], x: Tensor) -> Tensor:
    """``model(x)`` with its parameters and buffers replaced by ``tensors``; nothing is written."""
    # looking for tied weights takes longer than a small layer
    output = functional_call(model, dict(tensors), (x,), tie_weights=_is_tied(model))  # type: ignore[arg-type]
    if not isinstance(output, Tensor):
        raise TypeError(
            f"{type(model).__name__} returned {type(output).__name__}, and one tensor is needed: "
            "wrap the model in a module that returns the tensor the likelihood reads"
        )
    return output
