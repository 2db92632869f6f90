"""How does a network run if only its head is adapted? Shared layers once per task, then the head.

The features do not depend on the adapted weights, so K steps, S samples and L products share one
pass. Whether a network is "features, then a linear head" is checked when it runs: the head must be
called once, and its output must be the network's output. Any other network takes the loop.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from ibaml.execution.deferred import force
from ibaml.execution.strategy import Strategy


def find_head(model: nn.Module, adapted: Sequence[str]) -> str | None:
    """The name of the one linear layer that has all adapted weights and shares none of them."""
    layers = dict(model.named_modules())
    owners = {name.rpartition(".")[0] for name in adapted}
    if len(owners) != 1:
        return None
    (owner,) = owners
    head = layers[owner]
    # exact type: a subclass, a parametrization or a hook may do anything
    if type(head) is not nn.Linear or head._forward_hooks or head._forward_pre_hooks:
        return None
    own = {id(p) for p in head.parameters()}
    others = (p for name, m in layers.items() if name != owner for p in m.parameters(recurse=False))
    return None if any(id(p) in own for p in others) else owner


class _NotTheHead(Exception):
    """The network is not features followed by this head."""


def run_features(
    model: nn.Module,
    head: str,
    before: Strategy,
    constants: Mapping[str, Tensor | None],
    x: Tensor,
) -> Tensor | None:
    """What the head reads, (T, N, …), for the tasks' inputs x (T, N, …); None if the network is
    not features followed by this head.

    Args:
        before: the strategy for the layers before the head.
    """
    calls_seen: list[tuple[Tensor, Tensor, tuple[int, int]]] = []

    def watch(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        with torch._C.DisableTorchFunction():  # these operations are not the network's
            features = force(inputs[0])
            calls_seen.append((features, output, (features._version, output._version)))

    def read(returned: Tensor) -> Tensor:
        """The head's input in the call of the network that returned this output."""
        calls = calls_seen.copy()
        calls_seen.clear()
        if len(calls) != 1:
            raise _NotTheHead
        features, output, versions = calls[0]
        if output is not returned:
            raise _NotTheHead
        if (features._version, output._version) != versions:  # changed in place afterwards
            raise _NotTheHead
        return features

    handle = model.get_submodule(head).register_forward_hook(watch)
    try:
        return before.features(model, constants, x, read)
    except _NotTheHead:
        return None
    finally:
        handle.remove()


def run_head(
    head: str,
    weights: Mapping[str, Tensor],
    constants: Mapping[str, Tensor | None],
    features: Tensor,
) -> Tensor:
    """Outputs (T, S, N, …) of the head's weight sets (T, S, …) on features (T, N, …)."""
    dot = f"{head}." if head else ""

    def part(name: str) -> Tensor | None:
        value = weights.get(dot + name)
        if value is not None:
            return value
        shared = constants.get(dot + name)
        return None if shared is None else shared[None, None]

    weight, bias = part("weight"), part("bias")
    assert weight is not None
    rows = features.flatten(1, -2)[:, None]  # (T, 1, rows, D)
    outputs = rows @ weight.transpose(-1, -2)
    if bias is not None:
        outputs = outputs + bias[..., None, :]
    return outputs.unflatten(2, features.shape[1:-1])
