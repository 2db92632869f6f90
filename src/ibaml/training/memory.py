"""How much memory will a meta-step take, and how many tasks fit at once?"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
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


class Meter:
    """Bytes allocated while it is open, above what was there before: those alive now, and the peak
    since it was opened or last restarted.

    On the CPU it counts tensors, which slows them: time elsewhere.
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
        """Let the peak begin again at what is alive now."""
        if self._cuda is None:
            self._count.peak = self._count.live
        else:
            torch.cuda.reset_peak_memory_stats(self._cuda)


def peak_bytes(function: Callable[[], object], device: torch.device | None = None) -> int:
    """Peak of the bytes allocated during ``function``, above what was there before."""
    with Meter(device) as meter:
        function()
        return meter.peak


@contextmanager
def within_free_memory(device: torch.device) -> Iterator[None]:
    """On the CPU of Linux, let an allocation beyond what is free fail, as a GPU's does, where the
    system would end the whole process."""
    free = free_bytes(device) if device.type == "cpu" else None
    try:
        import resource

        used = next(
            int(line.split()[1]) * 1024
            for line in Path("/proc/self/status").read_text().splitlines()
            if line.startswith("VmData:")
        )
    except (ImportError, OSError, StopIteration):
        free = None
    if free is None:
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = used + free
    for known in (soft, hard):
        limit = limit if known == resource.RLIM_INFINITY else min(limit, known)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


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
