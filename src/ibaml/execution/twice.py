"""Where derivatives end: our operations have two, and say so where a third is asked for."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch


def last_derivative(backward: Callable[..., Any]) -> Callable[..., Any]:
    """For the ``backward`` of a function that is a first derivative itself. (Torch's
    ``once_differentiable`` says nothing where only some gradients are asked for.)"""

    @wraps(backward)
    def checked(ctx: Any, *gradients: Any) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "a third derivative was asked for, and the network's operations here have two: "
                'use execution="loop"'
            )
        return backward(ctx, *gradients)

    return checked
