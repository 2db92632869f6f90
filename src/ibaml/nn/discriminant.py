"""What is the network for vectors whose base classes say how classes differ? One linear map, then
features of length 1, then the head.

The map is not trained: it comes in closed form from the base classes (`ibaml.heads.from_base`), as
do the variances of class means, which are the prior of `ibaml.ClassMeans`. Until it is taken, the
map is the identity.
"""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor, nn

from ibaml.arguments import check_count
from ibaml.nn.recipe import remember

WIDEST = 2048  # of more inputs, this many directions are kept


class Discriminant(nn.Module):
    """z = (x − center)·map, then a linear head without bias on z/‖z‖. The head starts at 0.

    Args:
        inputs: numbers in an input; inputs of more dimensions are flattened.
        outputs: classes.

    >>> Discriminant(8, 5)(torch.zeros(3, 8)).shape
    torch.Size([3, 5])
    """

    center: Tensor
    map: Tensor
    between: Tensor

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        width = min(inputs, WIDEST)
        self.register_buffer("center", torch.zeros(inputs))
        self.register_buffer("map", torch.eye(inputs, width))
        self.register_buffer("between", torch.ones(width))
        self.head = nn.Linear(width, outputs, bias=False)
        nn.init.zeros_(self.head.weight)

    def features(self, x: Tensor) -> Tensor:
        """What the head reads, (n, width)."""
        z = (x.flatten(1) - self.center) @ self.map
        return nn.functional.normalize(z, dim=-1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.features(x))
        return out

    @torch.no_grad()
    def take(self, center: Tensor, map: Tensor, between: Tensor) -> None:
        """Set the map, and the variances of class means along its directions. It may have fewer of
        them than the network, whose others stay silent."""
        inputs, width = self.map.shape
        if center.shape != (inputs,) or map.shape != (inputs, len(between)) or len(between) > width:
            raise ValueError(
                f"the map must be ({inputs}, {width}) or narrower, with a center of {inputs} and a "
                f"variance per direction; got {tuple(map.shape)}, {tuple(center.shape)} and "
                f"{tuple(between.shape)}"
            )
        self.center.copy_(center)
        self.map.zero_()[:, : len(between)] = map.to(self.map)
        self.between.fill_(1.0)[: len(between)] = between.to(self.between)


def discriminant(inputs: int, outputs: int) -> Discriminant:
    """The network for vectors with a map from the base classes; see `Discriminant`.

    >>> discriminant(8, 5).head
    Linear(in_features=8, out_features=5, bias=False)
    """
    check_count("inputs", inputs, 1)
    check_count("outputs", outputs, 1)
    return remember(Discriminant(inputs, outputs), "discriminant", inputs=inputs, outputs=outputs)


def for_inputs(shape: tuple[int, ...], outputs: int, *, regression: bool) -> Discriminant:
    """The network for inputs of this shape, as settings ask for it."""
    if regression:
        raise ValueError("model discriminant is for classes, and the targets are numbers: use mlp")
    return discriminant(prod(shape), outputs)
