"""Peak bytes of live tensors on the CPU, after a first call that warms caches up."""

from __future__ import annotations

import gc
from collections.abc import Callable

from ibaml.training.memory import Meter
from ibaml.training.memory import peak_bytes as counted


def peak_bytes(function: Callable[[], object]) -> int:
    """Peak of the bytes allocated during ``function``."""
    function()
    return counted(function)


def live_bytes_after(function: Callable[[], object]) -> int:
    """Bytes allocated during ``function`` that are still alive after it."""
    function()
    gc.collect()
    with Meter() as meter:
        function()
        gc.collect()
        return meter.live
