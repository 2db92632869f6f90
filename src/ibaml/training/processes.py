"""Which process does what? Tasks are split over processes, and their sums are added up.

torchrun starts the processes and numbers them in the environment. A single process runs the same
code with nothing to add up.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Processes:
    """The number of this process among all of them."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    local_world: int = 1
    restarts: int = 0  # by torchrun's elastic agent

    @property
    def first(self) -> bool:
        """Whether this is the first process, the only one that writes."""
        return self.rank == 0

    def share(self, keys: Sequence[int]) -> Sequence[int]:
        """The keys this process works on: a contiguous part, split as evenly as possible."""
        begin = len(keys) * self.rank // self.world
        end = len(keys) * (self.rank + 1) // self.world
        return keys[begin:end]

    @torch.no_grad()
    def add_up(self, tensors: Sequence[Tensor]) -> None:
        """Sum tensors of one dtype over all processes, in place and in one message."""
        if self.world == 1 or not tensors:
            return
        flat = torch.cat([t.detach().reshape(-1) for t in tensors])
        dist.all_reduce(flat)
        for t, part in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
            t.copy_(part.view_as(t))

    def from_first(self, content: bytes | None, device: torch.device) -> bytes | None:
        """The first process's bytes (or None), in every process."""
        if self.world == 1:
            return content
        size = torch.tensor([-1 if content is None else len(content)], device=device)
        dist.broadcast(size, 0)
        if int(size) < 0:
            return None
        if content is not None:
            data = torch.frombuffer(bytearray(content), dtype=torch.uint8).to(device)
        else:
            data = torch.empty(int(size), dtype=torch.uint8, device=device)
        dist.broadcast(data, 0)
        return data.cpu().numpy().tobytes()

    def least(self, number: int, device: torch.device) -> int:
        """The smallest of all processes' numbers."""
        if self.world == 1:
            return number
        smallest = torch.tensor([number], device=device)
        dist.all_reduce(smallest, dist.ReduceOp.MIN)
        return int(smallest.item())

    def all_agree(self, agreed: bool, device: torch.device) -> bool:
        """Whether something is true in every process."""
        return bool(self.least(int(agreed), device))


def this_process() -> Processes:
    """This process as torchrun's environment describes it; a single one where there is none."""
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return Processes()
    return Processes(
        int(os.environ["RANK"]),
        int(os.environ["WORLD_SIZE"]),
        int(os.environ.get("LOCAL_RANK", 0)),
        int(os.environ.get("LOCAL_WORLD_SIZE", 1)),
        int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)),
    )


def launch() -> dict[str, str] | None:
    """Which torchrun started this process; None if none did."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    return {
        "id": os.environ["TORCHELASTIC_RUN_ID"],
        "host": platform.node(),
        "agent": str(os.getppid()),  # stays the same when it restarts its processes
    }


def same_launch(one: Any, other: Any) -> bool:
    """Whether two descriptions are of one torchrun. On another host it has another agent."""
    if not isinstance(one, dict) or not isinstance(other, dict) or one.get("id") != other.get("id"):
        return False
    return one.get("host") != other.get("host") or one.get("agent") == other.get("agent")


@contextmanager
def joined(processes: Processes, device: torch.device) -> Iterator[None]:
    """Inside the block this process is in the group (gloo on CPUs, on GPUs NCCL, and gloo for what
    hosts agree on)."""
    if processes.world == 1:
        yield
        return
    if device.type == "cuda":
        torch.cuda.set_device(device)
    # torchrun keeps one store over its restarts: without a prefix of their own, restarted processes
    # read the addresses of dead ones
    store, rank, world = next(dist.rendezvous("env://"))
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        store=dist.PrefixStore(f"ibaml-{processes.restarts}", store),
        rank=rank,
        world_size=world,
        timeout=timedelta(minutes=10),  # a wait this long means that another process died
    )
    try:
        yield
        dist.barrier()  # no process leaves while another still communicates
    finally:
        dist.destroy_process_group()
