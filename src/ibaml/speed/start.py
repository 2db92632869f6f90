"""How long does it take from the command to the first step?"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Start:
    """One start of the command in a new process, through its first step.

    Attributes:
        processor: of all its threads, with its children.
    """

    what: str
    seconds: float
    processor: float | None


def starts(data: str, folder: Path, device: str, threads: int | None) -> list[Start]:
    """The command with one iteration, the first time (all images are decoded) and twice again."""
    command = [sys.executable, "-m", "ibaml", "train", "--data", data, "--iterations", "1"]
    command += ["--val-every", "0", "--device", device]
    command += [] if threads is None else ["--threads", str(threads)]
    found = []
    for i, what in enumerate(("first time", "again", "once more")):
        before, began = _used(), time.perf_counter()
        done = subprocess.run(
            [*command, "--out", str(folder / f"start-{i}")], capture_output=True, text=True
        )
        seconds = time.perf_counter() - began
        if done.returncode:
            raise ValueError(f"ibaml train failed: {(done.stdout + done.stderr).strip()[-500:]}")
        after = _used()
        used = None if before is None or after is None else after - before
        found.append(Start(what, seconds, used))
    return found


def _used() -> float | None:
    """Processor seconds of all child processes that ended; None where the system does not say."""
    if os.name != "posix":
        return None
    import resource

    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
