"""How named weights lie in one flat vector, so that solvers see vectors and networks see names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

Slot = tuple[str, int, int]  # a name, and where it begins and ends in a vector


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

    @property
    def classes(self) -> int | None:
        """How many classes a tied head has; None where none is tied."""
        rows = [s[0] for n, s in zip(self.names, self.shapes, strict=True) if n in self.rows]
        return rows[0] if rows else None

    def slots(self, blocks: Mapping[str, int]) -> tuple[Slot, ...]:
        """Where each weight lies in a vector of these blocks side by side (names and sizes). The
        weights of a block other than the mean are named ``block.NAME``; a block that has not one
        entry for every weight is a slot of its own."""
        slots, at = [], 0
        for block, total in blocks.items():
            if total != self.size:
                slots.append((block, at, at + total))
                at += total
                continue
            prefix = "" if block == "mean" else f"{block}."
            for name, size in zip(self.names, self.sizes, strict=True):
                slots.append((prefix + name, at, at + size))
                at += size
        return tuple(slots)

    def shares(self, like: Tensor) -> Tensor:
        """How much of a parameter each entry is: 1, or 1/rows where a row is tied."""
        parts = [
            like.new_full((size,), 1 / shape[0] if name in self.rows else 1.0)
            for name, shape, size in zip(self.names, self.shapes, self.sizes, strict=True)
        ]
        return torch.cat(parts)

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
