"""How does one model run here: the whole network by a strategy, or its adapted head by itself?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from ibaml.execution.call import twice_differentiable
from ibaml.execution.head import run_features, run_head
from ibaml.execution.locks import held
from ibaml.execution.loop import Loop
from ibaml.execution.norm import watched
from ibaml.execution.strategy import Strategy


@dataclass(frozen=True)
class Runner:
    """Runs weight sets (T, S, …) through a model on inputs (T, N, …), twice differentiable.

    Attributes:
        whole: how the whole network runs.
        head: the layer that has every adapted weight, if the layers before it may run once per
            task instead of once per weight set.
        recurrent: whether the model has a recurrent layer.
        linear: whether that layer was seen to read one vector per example.
    """

    whole: Strategy
    head: str | None = None
    recurrent: bool = False
    linear: bool = False

    @property
    def strategy(self) -> str:
        """In words."""
        name = self.whole.name if self.head is None else f"head, {self.whole.name} before it"
        return name if self.precision is None else f"{name}, {str(self.precision)[6:]}"

    @property
    def precision(self) -> torch.dtype | None:
        """The dtype of activations and convolutions, None for that of the weights."""
        return self.whole.precision

    def with_precision(self, precision: torch.dtype | None) -> Runner:
        """The same in another precision, if the strategy has a choice."""
        return replace(self, whole=self.whole.with_precision(precision))

    def calls(self, sets: int) -> int:
        """How often the network is called for this many weight sets."""
        return self.whole.calls(sets)

    def looped(self) -> Runner:
        """The same, with the loop for the whole network."""
        return replace(self, whole=Loop(self.whole.tied))

    def plain(self) -> Runner:
        """The loop, without a separate head: the oracle for every other way."""
        return replace(self.looped(), head=None, linear=False)

    def __call__(
        self,
        model: nn.Module,
        weights: Mapping[str, Tensor],
        constants: Mapping[str, Tensor | None],
        x: Tensor,
    ) -> Tensor:
        with self._ready(model):
            return self.whole.run(model, weights, constants, x)

    def features(
        self, model: nn.Module, constants: Mapping[str, Tensor | None], x: Tensor
    ) -> Tensor | None:
        """What the head reads; None if no head runs by itself."""
        if self.head is None:
            return None
        with self._ready(model):
            return run_features(model, self.head, self.whole, constants, x)

    def from_features(
        self,
        weights: Mapping[str, Tensor],
        constants: Mapping[str, Tensor | None],
        features: Tensor,
    ) -> Tensor:
        assert self.head is not None
        return run_head(self.head, weights, constants, features)

    @contextmanager
    def _ready(self, model: nn.Module) -> Iterator[None]:
        """Inside, this thread alone runs the model, with hooks and twice-differentiable kernels."""
        with held(model), watched(model), twice_differentiable(self.recurrent):
            yield
