"""How does Adam solve a task? For problems whose weights have different scales."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ibaml.arguments import check_number
from ibaml.energy import Energy
from ibaml.solve.base import Descent, Rate


@dataclass(frozen=True)
class Adam(Descent):
    """Adam on E with bias correction (as `torch.optim.Adam`), every task with its own moments."""

    lr: Rate = 0.01
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("beta1", self.beta1, least=0, below=1)
        check_number("beta2", self.beta2, least=0, below=1)
        check_number("eps", self.eps, above=0)

    def memory(self, v: Tensor) -> tuple[Tensor, ...]:
        return torch.zeros_like(v), torch.zeros_like(v)

    def move(
        self,
        energy: Energy,
        v: Tensor,
        gradient: Tensor,
        memory: tuple[Tensor, ...],
        step: int,
        rate: Tensor | float,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        first, second = memory
        first = self.beta1 * first + (1 - self.beta1) * gradient
        second = self.beta2 * second + (1 - self.beta2) * gradient.square()
        corrected = second / (1 - self.beta2 ** (step + 1))
        # the root has no derivative at a gradient of exactly zero: its step is zero
        size = torch.where(corrected > 0, corrected, torch.ones_like(corrected)).sqrt()
        size = torch.where(corrected > 0, size, torch.zeros_like(size)) + self.eps
        return v - rate * (first / (1 - self.beta1 ** (step + 1))) / size, (first, second)
