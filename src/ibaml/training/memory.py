"""How much memory does a piece of work take?"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any, Self

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class _Count(TorchDispatchMode):
    """Counts the bytes of live tensors, storage by storage as they come and go."""

    def __init__(self) -> None:
        super().__init__()
        self.live = 0
        self.peak = 0
        self.known: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any | None = None
    ) -> Any:
        for t in tree_leaves((args, kwargs)):
            if isinstance(t, torch.Tensor):
                self.known.add(t.untyped_storage()._cdata)  # made before, so it is not counted
        out = func(*args, **(kwargs or {}))
        for t in tree_leaves(out):
            if not isinstance(t, torch.Tensor):
                continue
            storage = t.untyped_storage()
            key = storage._cdata
            if key in self.known:
                continue
            self.known.add(key)
            size = storage.nbytes()
            self.live += size
            self.peak = max(self.peak, self.live)
            weakref.finalize(storage, self._free, key, size)
        return out

    def _free(self, key: int, size: int) -> None:
        self.live -= size
        self.known.discard(key)


class Meter:
    """Counts the bytes allocated while it is open: those alive now, and the peak since it was
    opened or last restarted.

    On the CPU it intercepts every operation, which is slow: do not time inside it.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self._cuda = device if device is not None and device.type == "cuda" else None
        self._count = _Count()
        self._before = 0

    def __enter__(self) -> Self:
        gc.collect()
        if self._cuda is None:
            self._count.__enter__()
        else:
            torch.cuda.synchronize(self._cuda)
            self._before = torch.cuda.memory_allocated(self._cuda)
            torch.cuda.reset_peak_memory_stats(self._cuda)
        return self

    def __exit__(self, *error: Any) -> None:
        if self._cuda is None:
            self._count.__exit__(*error)

    @property
    def live(self) -> int:
        if self._cuda is None:
            return self._count.live
        return torch.cuda.memory_allocated(self._cuda) - self._before

    @property
    def peak(self) -> int:
        if self._cuda is None:
            return self._count.peak
        torch.cuda.synchronize(self._cuda)
        return torch.cuda.max_memory_allocated(self._cuda) - self._before

    def restart(self) -> None:
        """Restart the peak at the bytes alive now."""
        if self._cuda is None:
            self._count.peak = self._count.live
        else:
            torch.cuda.reset_peak_memory_stats(self._cuda)


def peak_bytes(function: Callable[[], object], device: torch.device | None = None) -> int:
    """The peak of the bytes that ``function`` allocates."""
    with Meter(device) as meter:
        function()
        return meter.peak


def held_bytes(function: Callable[[], object], device: torch.device) -> int:
    """The peak of the bytes that are kept for ``function``. On an accelerator these are more than
    it allocates: memory is taken in large pieces, and a recorded meta-step keeps its own."""
    if device.type != "cuda":
        return peak_bytes(function)
    gc.collect()
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved(device)
    torch.cuda.reset_peak_memory_stats(device)
    function()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_reserved(device) - before
