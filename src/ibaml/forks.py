"""What holds in a process that was forked? Only the thread that forked goes on in it.

The others are gone: a lock that one of them held stays held, and torch's pool of threads waits for
ever. So locks are free when a process is forked, and torch takes one thread in it, as it does in a
DataLoader's workers.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable


def around_forks(
    before: Callable[[], None], after: Callable[[], None], in_child: Callable[[], None]
) -> None:
    """Have functions called before this process is forked, and after it in both."""
    if hasattr(os, "register_at_fork"):  # elsewhere nothing is forked
        os.register_at_fork(before=before, after_in_parent=after, after_in_child=in_child)


def _nothing() -> None:
    pass


def _one_thread() -> None:
    if (torch := sys.modules.get("torch")) is not None and torch.get_num_threads() > 1:
        torch.set_num_threads(1)


around_forks(_nothing, _nothing, _one_thread)
