"""Peak bytes of live tensors on the CPU, counted storage by storage as they come and go."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class _Count(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.live = 0
        self.peak = 0
        self.known: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        for t in tree_leaves((args, kwargs)):
            if isinstance(t, torch.Tensor):
                self.known.add(t.untyped_storage()._cdata)  # made before: not ours to count
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


def peak_bytes(function: Callable[[], object]) -> int:
    """Peak of the bytes allocated during ``function`` (a first call warms caches up)."""
    function()
    gc.collect()
    with _Count() as count:
        function()
    return count.peak


def live_bytes_after(function: Callable[[], object]) -> int:
    """Bytes allocated during ``function`` that are still alive after it."""
    function()
    gc.collect()
    with _Count() as count:
        function()
        gc.collect()
    return count.live
