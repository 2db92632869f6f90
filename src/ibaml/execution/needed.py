"""Which gradients does the running backward pass need? A function's ``needs_input_grad`` says only
which inputs could have one, so a second derivative in one factor would compute all of them."""

from __future__ import annotations

from typing import Any

import torch


def needed_gradients(ctx: Any, inputs: int) -> tuple[bool, ...]:
    """For each of a function's first inputs (all of them tensors), whether the running backward
    pass uses its gradient."""
    return tuple(
        need and _is_needed(ctx.next_functions[i][0])
        for i, need in enumerate(ctx.needs_input_grad[:inputs])
    )


def _is_needed(node: Any) -> bool:
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # a leaf whose gradient is requested
        return True
