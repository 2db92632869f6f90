"""How do all weight sets run at once by `torch.func.vmap`? Fast for small dense networks.

Torch's fused normalization layers have silently wrong second derivatives under vmap, and a user's
forward may branch on values, so only networks made of the layers listed here run this way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn
from torch.func import vmap

from ibaml.execution.call import call
from ibaml.execution.strategy import Strategy

_SAFE: tuple[type[nn.Module], ...] = (
    nn.Sequential,
    nn.Linear,
    nn.Bilinear,
    nn.Flatten,
    nn.Unflatten,
    nn.Identity,
    nn.ReLU,
    nn.LeakyReLU,
    nn.ELU,
    nn.GELU,
    nn.SiLU,
    nn.Mish,
    nn.Softplus,
    nn.Sigmoid,
    nn.Tanh,
)


@dataclass(frozen=True)
class Vmap(Strategy):
    """Tasks × samples folded into one vmapped dimension."""

    name: ClassVar[str] = "vmap"

    @classmethod
    def refusal(cls, model: nn.Module) -> str:
        # exact types: a subclass may do anything
        unsafe = sorted({type(m).__name__ for m in model.modules() if type(m) not in _SAFE})
        if not unsafe:
            return ""
        return (
            "second derivatives under vmap are not known to be correct for "
            f'{", ".join(unsafe)}; use execution="loop"'
        )

    def run(
        self,
        model: nn.Module,
        weights: Mapping[str, Tensor],
        constants: Mapping[str, Tensor | None],
        x: Tensor,
    ) -> Tensor:
        tasks, samples = next(iter(weights.values())).shape[:2]
        folded = {k: w.flatten(0, 1) for k, w in weights.items()}
        inputs = x[:, None].expand(tasks, samples, *x.shape[1:]).flatten(0, 1)
        outputs = vmap(lambda w, z: call(model, {**constants, **w}, z, self.tied))(folded, inputs)
        return outputs.unflatten(0, (tasks, samples))

    def features(
        self,
        model: nn.Module,
        constants: Mapping[str, Tensor | None],
        x: Tensor,
        read: Callable[[Tensor], Tensor],
    ) -> Tensor:
        # its layers treat every example independently, so all tasks are one batch
        features = read(call(model, constants, x.flatten(0, 1), self.tied))
        return features.unflatten(0, x.shape[:2])

    def calls(self, sets: int) -> int:
        return 1
