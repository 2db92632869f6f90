"""What is a strategy? A way to run many weight sets through one whole network."""

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
        name: the word for it in ``execution=`` and in ``learner.strategy``.
        tied: whether tensors with several names are looked for.
    """

    name: ClassVar[str]
    tied: bool = True

    @classmethod
    def refusal(cls, model: nn.Module) -> str:
        """Why a model cannot be run this way, with the remedy; empty where it can be tried."""
        return ""

    @abstractmethod
    def run(
        self,
        model: nn.Module,
        weights: Mapping[str, Tensor],
        constants: Mapping[str, Tensor | None],
        x: Tensor,
    ) -> Tensor:
        """Outputs (T, S, N, …) of weights (T, S, …) on the tasks' inputs x (T, N, …); what has no
        sets (shared weights, buffers) is in ``constants``."""

    @abstractmethod
    def features(
        self,
        model: nn.Module,
        constants: Mapping[str, Tensor | None],
        x: Tensor,
        read: Callable[[Tensor], Tensor],
    ) -> Tensor:
        """What ``read`` finds inside the network, (T, N, …), where all weights are ``constants``.

        Args:
            read: takes what one call of the network returned, and gives what that call computed
                on the way. It is called after every call of the network.
        """

    def calls(self, sets: int) -> int:
        """How often the network is called for so many weight sets."""
        return sets

    @property
    def precision(self) -> torch.dtype | None:
        """Of activations and convolutions, None for that of the weights."""
        return None

    def with_precision(self, precision: torch.dtype | None) -> Strategy:
        """The same in another precision, where it has a choice of them."""
        return self
