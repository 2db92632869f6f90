"""How are named weights stored in one flat vector? Solvers see vectors, networks see names."""

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
    tied over their first dimension: all their rows have the same prior."""

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
        """How many classes a tied head has; None if no head is tied."""
        rows = [s[0] for n, s in zip(self.names, self.shapes, strict=True) if n in self.rows]
        return rows[0] if rows else None

    def slots(self, blocks: Mapping[str, int]) -> tuple[Slot, ...]:
        """Where each weight is in a vector of these blocks side by side (names and sizes). The
        weights of a block other than the mean are named ``block.NAME``; a block without one entry
        per weight is one slot."""
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
        """Which share of a parameter each entry is: 1, or 1/rows if rows are tied."""
        parts = [
            like.new_full((size,), 1 / shape[0] if name in self.rows else 1.0)
            for name, shape, size in zip(self.names, self.shapes, self.sizes, strict=True)
        ]
        return torch.cat(parts)

    def split(self, flat: Tensor) -> dict[str, Tensor]:
        """``(…, n)`` to ``{name: (…, *shape)}``."""
        parts = flat.split(self.sizes, -1)
        return {
            name: part.unflatten(-1, shape) if shape else part.squeeze(-1)
            for name, shape, part in zip(self.names, self.shapes, parts, strict=True)
        }

    def join(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """{name: shape, or (1, …) if rows are tied} to one vector (n,)."""
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
