"""What is the multilayer perceptron?"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import prod
from typing import Literal

import torch
from torch import Tensor, nn

from ibaml.arguments import check_count, check_counts, check_flag, check_word
from ibaml.nn.recipe import remember

_ACTIVATIONS: dict[str, type[nn.Module]] = {
    "relu": nn.ReLU,
    "tanh": nn.Tanh,
    "gelu": nn.GELU,
    "silu": nn.SiLU,
    "softplus": nn.Softplus,
}


class Beside(nn.Module):
    """Hidden features, and beside them the inputs (…, D) that they are computed from."""

    def __init__(self, hidden: nn.Module) -> None:
        super().__init__()
        self.hidden = hidden

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.hidden(x), x], -1)


def mlp(
    inputs: int,
    outputs: int,
    hidden: Sequence[int] = (40, 40),
    activation: Literal["relu", "tanh", "gelu", "silu", "softplus"] = "relu",
    skip: bool = False,
) -> nn.Sequential:
    """Linear layers with an activation between them; inputs of more dimensions are flattened. With
    ``skip`` the last layer reads the inputs too, beside the hidden features, so that a task that is
    linear in them is learned as such.

    >>> mlp(1, 1, hidden=(40, 40))[-1]
    Linear(in_features=40, out_features=1, bias=True)
    """
    check_count("inputs", inputs, 1)
    check_count("outputs", outputs, 1)
    check_counts("hidden", hidden)
    check_word("activation", activation, tuple(_ACTIVATIONS))
    check_flag("skip", skip)
    if skip and not hidden:
        raise ValueError("skip is for a network with hidden layers: without them it is linear")
    widths = [inputs, *hidden]
    layers: list[nn.Module] = []
    for before, after in pairwise(widths):
        layers += [nn.Linear(before, after), _ACTIVATIONS[activation]()]
    if skip:
        layers, widths[-1] = [Beside(nn.Sequential(*layers))], widths[-1] + inputs
    recipe = {"skip": True} if skip else {}  # files of older versions hold none
    return remember(
        nn.Sequential(nn.Flatten(), *layers, nn.Linear(widths[-1], outputs)),
        "mlp", inputs=inputs, outputs=outputs, hidden=list(hidden), activation=activation, **recipe,
    )  # fmt: skip


def for_inputs(
    shape: tuple[int, ...], outputs: int, *, regression: bool, hidden: str, skip: bool = False
) -> nn.Sequential:
    """The network for inputs of this shape, as settings ask for it; ``hidden`` is a text such as
    ``"40,40"``."""
    widths = [int(part) for part in hidden.split(",")] if hidden.strip() else []
    activation: Literal["tanh", "relu"] = "tanh" if regression else "relu"
    return mlp(prod(shape), outputs, widths, activation, skip and bool(widths))
