"""Which gradients does somebody wait for? A function's ``needs_input_grad`` says only which inputs
could have one, and a product with one factor of a second derivative would compute all of them."""

from __future__ import annotations

from typing import Any

import torch


def needed_gradients(ctx: Any, inputs: int) -> tuple[bool, ...]:
    """For each of a function's first inputs (tensors, all of them), whether the backward pass that
    is running hands its gradient on to anybody."""
    return tuple(
        need and _is_needed(ctx.next_functions[i][0])
        for i, need in enumerate(ctx.needs_input_grad[:inputs])
    )


def _is_needed(node: Any) -> bool:
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # a leaf whose gradient was asked for
        return True
