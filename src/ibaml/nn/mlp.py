"""A multilayer perceptron."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import prod
from typing import Literal

from torch import nn

from ibaml.arguments import check_count, check_counts, check_word
from ibaml.nn.recipe import remember

_ACTIVATIONS: dict[str, type[nn.Module]] = {
    "relu": nn.ReLU,
    "tanh": nn.Tanh,
    "gelu": nn.GELU,
    "silu": nn.SiLU,
    "softplus": nn.Softplus,
}


def mlp(
    inputs: int,
    outputs: int,
    hidden: Sequence[int] = (40, 40),
    activation: Literal["relu", "tanh", "gelu", "silu", "softplus"] = "relu",
) -> nn.Sequential:
    """Linear layers with an activation between them; inputs of more dimensions are flattened.

    >>> mlp(1, 1, hidden=(40, 40))[-1]
    Linear(in_features=40, out_features=1, bias=True)
    """
    check_count("inputs", inputs, 1)
    check_count("outputs", outputs, 1)
    check_counts("hidden", hidden)
    check_word("activation", activation, tuple(_ACTIVATIONS))
    widths = [inputs, *hidden]
    layers: list[nn.Module] = [nn.Flatten()]
    for before, after in pairwise(widths):
        layers += [nn.Linear(before, after), _ACTIVATIONS[activation]()]
    return remember(
        nn.Sequential(*layers, nn.Linear(widths[-1], outputs)),
        "mlp", inputs=inputs, outputs=outputs, hidden=list(hidden), activation=activation,
    )  # fmt: skip


def for_inputs(
    shape: tuple[int, ...], outputs: int, *, regression: bool, hidden: str
) -> nn.Sequential:
    """The network for inputs of this shape, as settings ask for it; ``hidden`` is a text such as
    ``"40,40"``."""
    widths = [int(part) for part in hidden.split(",")] if hidden.strip() else []
    return mlp(prod(shape), outputs, widths, "tanh" if regression else "relu")
