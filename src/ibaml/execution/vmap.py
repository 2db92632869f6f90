"""All weight sets at once, by `torch.func.vmap`: fast for small dense networks.

Torch's fused normalisation layers give silently wrong second derivatives under vmap, and a user's
forward may branch on values; so only networks made of the layers listed here are run this way.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn
from torch.func import vmap

from ibaml.execution.call import call

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


def unsafe_layers(model: nn.Module) -> list[str]:
    """The layers that keep a network from being run under vmap (exact types: a subclass may do
    anything)."""
    return sorted({type(m).__name__ for m in model.modules() if type(m) not in _SAFE})


def run_vmap(
    model: nn.Module,
    weights: Mapping[str, Tensor],
    constants: Mapping[str, Tensor | None],
    x: Tensor,
    tied: bool = True,
) -> Tensor:
    """As `run_loop`, with tasks × samples folded into one vmapped dimension."""
    tasks, samples = next(iter(weights.values())).shape[:2]
    folded = {k: w.flatten(0, 1) for k, w in weights.items()}
    inputs = x[:, None].expand(tasks, samples, *x.shape[1:]).flatten(0, 1)
    outputs = vmap(lambda w, z: call(model, {**constants, **w}, z, tied))(folded, inputs)
    return outputs.unflatten(0, (tasks, samples))
