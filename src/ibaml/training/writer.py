"""How are checkpoints written while the run goes on? From a copy of the state, by a thread."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Self

import torch
from torch import Tensor

_WAITING = 2  # copies of the state in memory: a checkpoint and the best


class Snapshot:
    """The values of tensors at this moment. On an accelerator the copies are made in the order of
    its work and travel to the host beside it; nobody waits."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._copies = {name: t.detach().clone() for name, t in tensors.items()}
        self._done: list[torch.cuda.Event] = []
        for device in {t.device for t in self._copies.values() if t.is_cuda}:
            self._send(device)

    def _send(self, device: torch.device) -> None:
        beside = torch.cuda.Stream(device)
        beside.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(beside):
            for name, copy in self._copies.items():
                if copy.device == device:
                    host = torch.empty_like(copy, device="cpu", pin_memory=True)
                    host.copy_(copy, non_blocking=True)
                    copy.record_stream(beside)  # its memory is not given away before
                    self._copies[name] = host
            done = torch.cuda.Event()
            done.record(beside)
        self._done.append(done)

    def tensors(self) -> dict[str, Tensor]:
        """The values on the host, once they have arrived."""
        for done in self._done:
            done.synchronize()
        return self._copies


class Writer:
    """Does one piece of work after the other in a thread, while it is open; at once if it is not.

    The error of a piece of work is raised by the next call of any method. Closing it waits.
    """

    def __init__(self) -> None:
        self._thread: ThreadPoolExecutor | None = None
        self._jobs: deque[Future[object]] = deque()

    def __enter__(self) -> Self:
        self._thread = ThreadPoolExecutor(1, "ibaml-writer")
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        assert self._thread is not None
        self._thread.shutdown()
        self._thread = None
        if kind is None:
            self.wait()
        self._jobs.clear()

    def submit(self, work: Callable[[], object]) -> None:
        """Have the work done. Waits if too much of it is waiting already."""
        if self._thread is None:
            work()
            return
        while len(self._jobs) >= _WAITING:
            self._jobs.popleft().result()
        self._jobs.append(self._thread.submit(work))

    def check(self) -> None:
        """Raise the error of work that failed meanwhile."""
        while self._jobs and self._jobs[0].done():
            self._jobs.popleft().result()

    def wait(self) -> None:
        """Wait until all work is done."""
        while self._jobs:
            self._jobs.popleft().result()
