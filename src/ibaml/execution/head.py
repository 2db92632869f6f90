"""Only the head is adapted: run the shared layers once a task, then all weight sets of the head.

The features do not depend on the adapted weights, so that K steps, S samples and L products share
one pass. Whether a network is "features, then a linear head" is seen when it runs: its head is
called once, and what it returns is what the network returns. Any other network takes the loop.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from ibaml.execution.call import call
from ibaml.execution.fold import folded_tasks, now, part_tasks, run_mode
from ibaml.execution.single import run_one


def find_head(model: nn.Module, adapted: Sequence[str]) -> str | None:
    """The name of the linear layer that owns all adapted weights, and owns them alone."""
    layers = dict(model.named_modules())
    owners = {name.rpartition(".")[0] for name in adapted}
    if len(owners) != 1:
        return None
    (owner,) = owners
    head = layers[owner]
    # exact type: a subclass, a parametrisation or a hook may do anything
    if type(head) is not nn.Linear or head._forward_hooks or head._forward_pre_hooks:
        return None
    own = {id(p) for p in head.parameters()}
    others = (p for name, m in layers.items() if name != owner for p in m.parameters(recurse=False))
    return None if any(id(p) in own for p in others) else owner


def run_features(
    model: nn.Module,
    head: str,
    constants: Mapping[str, Tensor | None],
    x: Tensor,
    whole: str,
    precision: torch.dtype | None = None,
    tied: bool = True,
) -> Tensor | None:
    """What the head reads, (T, N, …), for the tasks' inputs x (T, N, …); None where the network is
    not features followed by this head.

    Args:
        whole: how the layers before the head run: ``"loop"`` or ``"single"``, one task after
            another; ``"vmap"``, all tasks in one pass, for layers that treat every example by
            itself; ``"fold"``, tasks folded into channels.
        precision: of folds.
    """
    seen: list[tuple[Tensor, Tensor, tuple[int, int]]] = []

    def watch(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        with torch._C.DisableTorchFunction():  # it is not the network that looks
            features = now(inputs[0])
            seen.append((features, output, (features._version, output._version)))

    found = []
    handle = model.get_submodule(head).register_forward_hook(watch)
    try:
        one_by_one = whole in ("loop", "single")
        for part in x if one_by_one else [x]:
            seen.clear()
            if whole == "single":
                output = run_one(model, constants, part, tied)
            elif whole == "fold":
                part = part if precision is None else part.to(precision)
                output = run_mode(folded_tasks(len(x)), model, constants, part, tied)
            else:
                part = part.flatten(0, 1) if whole == "vmap" else part
                output = call(model, constants, part, tied)
            if len(seen) != 1 or seen[0][1] is not output:
                return None
            features, _, versions = seen[0]
            if (features._version, output._version) != versions:  # changed in place afterwards
                return None
            found.append(features)
    finally:
        handle.remove()
    if one_by_one:
        return torch.stack(found)
    if whole == "vmap":
        return found[0].unflatten(0, x.shape[:2])
    return part_tasks(found[0]).to(x.dtype)


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
