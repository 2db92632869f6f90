"""Where do our own kernels run? On a CUDA device with Triton, for dtypes below float64."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor


def is_native(x: Tensor) -> bool:
    """Whether our kernels accept this tensor."""
    return x.is_cuda and x.dtype != torch.float64 and _has_triton()


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None
