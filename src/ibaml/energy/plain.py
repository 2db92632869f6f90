"""How does a function ``energy(v, params)`` of any structures become an energy?"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ibaml.weights import Precision, Slot


@dataclass(frozen=True)
class Structure:
    """How a tensor, or a dict/tuple/list of tensors, is stored in a vector (T, dim).

    ``tasks`` is None for one problem without a leading task dimension.
    """

    spec: Any
    shapes: tuple[torch.Size, ...]
    names: tuple[str, ...]
    tasks: int | None

    @classmethod
    def of(cls, value: Any, tasks: int | None) -> Structure:
        pairs, spec = pytree.tree_flatten_with_path(value)
        for path, leaf in pairs:
            if not isinstance(leaf, Tensor) or not leaf.is_floating_point():
                kind = leaf.dtype if isinstance(leaf, Tensor) else type(leaf).__name__
                raise TypeError(
                    f"start{pytree.keystr(path)} must be a floating-point tensor, got {kind}"
                )
            if tasks is not None and (leaf.dim() == 0 or leaf.shape[0] != tasks):
                raise ValueError(
                    f"the energy returned {tasks} values, so every tensor of start needs a leading "
                    f"dimension of {tasks}; start{pytree.keystr(path)} is {tuple(leaf.shape)}"
                )
        if not pairs:
            raise ValueError("start has no tensor, so there is nothing to solve for")
        names = tuple(".".join(str(_plain(k)) for k in path) or "v" for path, _ in pairs)
        return cls(spec, tuple(leaf.shape for _, leaf in pairs), names, tasks)

    @property
    def sizes(self) -> list[int]:
        return [shape.numel() // (self.tasks or 1) for shape in self.shapes]

    def join(self, value: Any) -> Tensor:
        leaves = pytree.tree_leaves(value)
        return torch.cat([leaf.reshape(self.tasks or 1, -1) for leaf in leaves], -1)

    def split(self, flat: Tensor) -> Any:
        parts = flat.split(self.sizes, -1)
        leaves = [p.reshape(shape) for p, shape in zip(parts, self.shapes, strict=True)]
        return pytree.tree_unflatten(leaves, self.spec)


def _plain(key: Any) -> Any:
    return getattr(key, "key", getattr(key, "idx", key))


@dataclass(frozen=True)
class PlainEnergy:
    """``function(v, params)`` with all of it in the loss and no penalty."""

    function: Callable[[Any, Any], Tensor]
    structure: Structure
    params: tuple[Any, ...]  # the leaves of the user's params
    params_spec: Any
    learned: tuple[int, ...]  # which of them are θ

    @property
    def theta(self) -> tuple[Tensor, ...]:
        return tuple(self.params[i] for i in self.learned)

    @property
    def slots(self) -> tuple[Slot, ...]:
        slots, at = [], 0
        for name, size in zip(self.structure.names, self.structure.sizes, strict=True):
            slots.append((name, at, at + size))
            at += size
        return tuple(slots)

    @property
    def lowest(self) -> None:
        return None

    def bind(self, theta: tuple[Tensor, ...]) -> PlainEnergy:
        params = list(self.params)
        for i, tensor in zip(self.learned, theta, strict=True):
            params[i] = tensor
        return replace(self, params=tuple(params))

    def resample(self, step: int) -> PlainEnergy:
        return self

    def __call__(self, v: Tensor) -> Tensor:
        params = pytree.tree_unflatten(self.params, self.params_spec)
        return self.function(self.structure.split(v), params).reshape(v.shape[0])

    def loss(self, v: Tensor) -> Tensor:
        return self(v)

    def penalty(self, v: Tensor) -> Tensor:
        return v.new_zeros(v.shape[0])

    def precision(self, v: Tensor) -> Precision | None:
        return None

    @property
    def penalized(self) -> frozenset[int]:
        return frozenset()

    def penalty_gradient(self, v: Tensor, u: Tensor, wanted: Collection[int]) -> dict[int, Tensor]:
        return {}
