"""What identifies a training run on any machine?"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from ibaml.training.settings import Settings

# settings that do not change a result, or belong to one machine
_OF_THE_MACHINE = (
    "root", "device", "threads", "execution", "micro_batch", "checkpoint_every", "keep",
    "log_every", "tensorboard", "patience",
)  # fmt: skip


def identity(settings: Settings) -> dict[str, Any]:
    """What identifies a training run on any machine: the settings without those of a machine, and
    the data by name, not by path."""
    identifying = dataclasses.asdict(settings)
    for name in _OF_THE_MACHINE:
        del identifying[name]
    for name in ("data", "splits"):
        identifying[name] = identifying[name] and Path(identifying[name]).name
    return identifying
