"""What machine is this: which device, how much memory, how many threads, and what is it called?"""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from ibaml._version import __version__
from ibaml.fields import SettingsError

# --- the device ----------------------------------------------------------------------------------


def pick_device(name: str = "auto", local_rank: int = 0) -> torch.device:
    """The device that a name stands for: auto, cpu, cuda or cuda:N.

    Args:
        local_rank: which of this machine's processes this is; each takes a GPU of its own.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise _no_such_device(name) from error
    if device.type not in ("cpu", "cuda"):
        raise _no_such_device(name)
    if device.type == "cpu":
        return device
    if not torch.cuda.is_available():
        raise SettingsError(f"device {name!r}: there is no CUDA device here; use cpu")
    count = torch.cuda.device_count()
    if device.index is None:
        return torch.device("cuda", local_rank % count)
    if device.index >= count:
        raise SettingsError(f"device {name!r}: there are {count} devices, counted from 0")
    return device


def _no_such_device(name: str) -> SettingsError:
    return SettingsError(f"device must be auto, cpu, cuda or cuda:N, got {name!r}")


# --- threads -------------------------------------------------------------------------------------


@contextmanager
def threads(count: int | None) -> Iterator[None]:
    """Let torch use this many CPU threads inside the block; None changes nothing."""
    before = torch.get_num_threads()
    if count is not None:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# --- memory --------------------------------------------------------------------------------------

_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # of mallopt(3)


def keep_freed_memory() -> bool:
    """Have the C library keep large blocks that are freed, for the next of their size, instead of
    asking the system for new pages at every step. The process stays as large as it ever was, so
    this is for commands, not for imports. Returns whether the library can; settings of the user's
    own (MALLOC_…, see mallopt(3)) stand."""
    if any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ):
        return False
    with suppress(OSError, AttributeError, TypeError):  # another C library
        mallopt = ctypes.CDLL(None).mallopt
        return bool(mallopt(_MMAP_MAX, 0)) and bool(mallopt(_TRIM_THRESHOLD, 2**31 - 1))
    return False


def free_bytes(device: torch.device) -> int | None:
    """Memory that this process may still take; None where the system does not say."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(free + held)
    limits = []
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                limits.append(int(line.split()[1]) * 1024)
    except OSError:
        pass
    if (left := _group_bytes()) is not None:
        limits.append(left)
    return max(0, min(limits)) if limits else None


def _group_bytes() -> int | None:
    """Memory left under a container's limit; cached files count as free."""
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


@contextmanager
def within_free_memory(device: torch.device) -> Iterator[None]:
    """On Linux's CPU, let an allocation beyond the free memory raise an error, as on a GPU, instead
    of the system ending the whole process."""
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


# --- the description -----------------------------------------------------------------------------


def machine(device: torch.device | str = "cpu") -> dict[str, str]:
    """The machine's description, which is kept beside every measured figure."""
    device = torch.device(device)
    software = {
        "system": platform.system(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "ibaml": __version__,
    }
    if device.type == "cuda":
        convolutions = "in convolutions" if torch.backends.cudnn.allow_tf32 else "off"
        return {"device": torch.cuda.get_device_name(device), "tf32": convolutions, **software}
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "device": f"{processor()}, {cores} cores",
        "threads": str(torch.get_num_threads()),
        **software,
    }


def in_a_line(facts: Mapping[str, str]) -> str:
    """A machine's description as one line: the device, then every other fact with its name."""
    rest = (f"{name} {value}" for name, value in facts.items() if name != "device")
    return "; ".join((facts["device"], *rest))


def processor() -> str:
    """The CPU's name."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or "CPU"
