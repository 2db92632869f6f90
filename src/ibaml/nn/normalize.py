"""Which normalization layers can a backbone have?"""

from __future__ import annotations

from math import gcd
from typing import Literal

from torch import nn

from ibaml.arguments import check_word

Norm = Literal["batch", "group", "none"]


def norm_layer(norm: Norm, channels: int) -> nn.Module:
    """Batch norm; group norm with at most 8 groups (statistics of one example only); or none."""
    check_word("norm", norm, ("batch", "group", "none"))
    if norm == "batch":
        return nn.BatchNorm2d(channels)
    if norm == "group":
        return nn.GroupNorm(gcd(8, channels), channels)
    return nn.Identity()
