"""How much memory will a meta-step take, and how many tasks fit at once?"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

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


def peak_bytes(function: Callable[[], object], device: torch.device | None = None) -> int:
    """Peak of the bytes allocated during ``function``, above what was there before."""
    gc.collect()
    if device is not None and device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        function()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    with _Count() as count:
        function()
    return count.peak


def free_bytes(device: torch.device) -> int | None:
    """Memory a process may still take; None where nobody says."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(free + held)
    found = []
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                found.append(int(line.split()[1]) * 1024)
    except OSError:
        pass
    if (left := _group_bytes()) is not None:
        found.append(left)
    return max(0, min(found)) if found else None


def _group_bytes() -> int | None:
    """What the control group (a container's limit) leaves; files in the cache give way."""
    group = Path("/sys/fs/cgroup")
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        try:
            most, taken = (int((group / name).read_text()) for name in (limit, used))
            stat = (group / limit).with_name("memory.stat").read_text()
            cached = [int(line.split()[1]) for line in stat.splitlines() if "inactive_file" in line]
            return most - taken + max(cached, default=0)
        except (OSError, ValueError):  # no such group, or no limit
            continue
    return None
