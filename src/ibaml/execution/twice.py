"""Where do derivatives end? Our operations have two, and a third one is an error."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch


def last_derivative(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Decorates the ``backward`` of a function that is a first derivative itself. (Torch's
    ``once_differentiable`` raises nothing if only some gradients are asked for.)"""

    @wraps(backward)
    def checked(ctx: Any, *gradients: Any) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "a third derivative was asked for, but the network's operations here have two: "
                'use execution="loop"'
            )
        return backward(ctx, *gradients)

    return checked
