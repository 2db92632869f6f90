"""What is a strategy? A way to run many weight sets through a whole network."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Strategy(ABC):
    """Runs weight sets (T, S, …) through a model on the tasks' inputs (T, N, …).

    A new one is a file like `loop` or `vmap`, and its name in `choice`.

    Attributes:
        name: its name in ``execution=`` and in ``learner.strategy``.
        tied: whether to look for tensors with several names.
    """

    name: ClassVar[str]
    tied: bool = True

    @classmethod
    def refusal(cls, model: nn.Module) -> str:
        """Why a model cannot run this way, with the remedy; empty if it can be tried."""
        return ""

    @abstractmethod
    def run(
        self,
        model: nn.Module,
        weights: Mapping[str, Tensor],
        constants: Mapping[str, Tensor | None],
        x: Tensor,
    ) -> Tensor:
        """Outputs (T, S, N, …) of weights (T, S, …) on the tasks' inputs x (T, N, …). Tensors that
        are the same for all weight sets (shared weights, buffers) are in ``constants``."""

    @abstractmethod
    def features(
        self,
        model: nn.Module,
        constants: Mapping[str, Tensor | None],
        x: Tensor,
        read: Callable[[Tensor], Tensor],
    ) -> Tensor:
        """Intermediate values of the network, (T, N, …), returned by ``read``; all weights are in
        ``constants``.

        Args:
            read: maps the output of one call of the network to values that were computed during
                that call. It is called after every call of the network.
        """

    def calls(self, sets: int) -> int:
        """How often the network is called for this many weight sets."""
        return sets

    @property
    def precision(self) -> torch.dtype | None:
        """The dtype of activations and convolutions, None for that of the weights."""
        return None

    def with_precision(self, precision: torch.dtype | None) -> Strategy:
        """The same in another precision, if it has a choice."""
        return self
