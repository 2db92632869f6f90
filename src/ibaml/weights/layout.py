"""How named weights lie in one flat vector, so that solvers see vectors and networks see names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor


@dataclass(frozen=True)
class Layout:
    """Names and shapes of the adapted weights, in order. ``rows`` names the weights whose prior is
    tied over their first dimension: one row of prior serves any number of rows."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    rows: frozenset[str] = frozenset()

    @property
    def sizes(self) -> list[int]:
        return [prod(shape) for shape in self.shapes]

    @property
    def size(self) -> int:
        return sum(self.sizes)

    def split(self, flat: Tensor) -> dict[str, Tensor]:
        """(…, n) to {name: (…, *shape)}."""
        parts = flat.split(self.sizes, -1)
        return {
            name: part.unflatten(-1, shape) if shape else part.squeeze(-1)
            for name, shape, part in zip(self.names, self.shapes, parts, strict=True)
        }

    def join(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """{name: shape, or (1, …) where the rows are tied} to one vector (n,)."""
        return torch.cat(
            [
                tensors[name].expand(shape).reshape(-1)
                for name, shape in zip(self.names, self.shapes, strict=True)
            ]
        )

    def for_classes(self, classes: int) -> Layout:
        """The layout of a network with this many classes; only tied rows change."""
        if not self.rows:
            return self
        shapes = tuple(
            (classes, *shape[1:]) if name in self.rows else shape
            for name, shape in zip(self.names, self.shapes, strict=True)
        )
        return Layout(self.names, shapes, self.rows)
