"""How does a small tensor reach a device while nobody waits?"""

from __future__ import annotations

import torch
from torch import Tensor


def sent(values: Tensor, device: torch.device | str) -> Tensor:
    """The values on the device. From ordinary memory torch would wait until all earlier work of the
    device is done; from pinned memory the copy takes its turn."""
    if torch.device(device).type != "cuda":
        return values.to(device)
    return values.pin_memory().to(device, non_blocking=True)
