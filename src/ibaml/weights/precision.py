"""What is the Hessian of a penalty at a point? An operator: products, and a preconditioner."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

Preconditioner = Callable[[Tensor], Tensor]  # r -> about P⁻¹ r, symmetric and positive definite


class Precision(Protocol):
    """P at a point; vectors are (T, dim), and every task has its own P. No gradient reaches θ."""

    @property
    def diagonal(self) -> Tensor | None:
        """The diagonal of P, (T, dim); None if P is not a diagonal matrix."""

    @property
    def precondition(self) -> Preconditioner | None:
        """P⁻¹, or a positive definite approximation; None if none is known."""

    def product(self, u: Tensor) -> Tensor:
        """P u."""

    def times(self, factor: float | Tensor) -> Precision:
        """factor · P."""


@dataclass(frozen=True)
class DiagonalPrecision:
    """A diagonal P."""

    diagonal: Tensor

    def product(self, u: Tensor) -> Tensor:
        return self.diagonal * u

    def precondition(self, r: Tensor) -> Tensor:
        return r / self.diagonal

    def times(self, factor: float | Tensor) -> DiagonalPrecision:
        return DiagonalPrecision(factor * self.diagonal)


class AutogradPrecision:
    """P by a second backward pass; one graph of the penalty's gradient serves all products."""

    diagonal = None

    def __init__(
        self, penalty: Callable[[Tensor], Tensor], v: Tensor, inverse: Preconditioner | None = None
    ) -> None:
        with torch.enable_grad():
            self._v = v.detach().clone().requires_grad_()
            (self._slope,) = torch.autograd.grad(penalty(self._v).sum(), self._v, create_graph=True)
        self._inverse = inverse
        self._factor: float | Tensor = 1.0

    @property
    def precondition(self) -> Preconditioner | None:
        inverse, factor = self._inverse, self._factor
        return None if inverse is None else lambda r: inverse(r) / factor

    def product(self, u: Tensor) -> Tensor:
        if not self._slope.requires_grad:  # the penalty is linear
            return torch.zeros_like(u)
        (product,) = torch.autograd.grad(
            self._slope, self._v, u, retain_graph=True, allow_unused=True
        )
        return torch.zeros_like(u) if product is None else self._factor * product

    def times(self, factor: float | Tensor) -> AutogradPrecision:
        made = object.__new__(AutogradPrecision)
        made.__dict__.update(self.__dict__, _factor=factor * self._factor)
        return made
