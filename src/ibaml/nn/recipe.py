"""How was a backbone built? A few plain values, so that a saved learner can build it again."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import Any, TypeVar

from torch import nn

from ibaml.words import BACKBONES

Net = TypeVar("Net", bound=nn.Module)


def remember(net: Net, name: str, **arguments: Any) -> Net:
    """The network, which knows its recipe from now on."""
    net.recipe = {"name": name, **arguments}  # type: ignore[assignment]
    return net


def recipe_of(net: nn.Module) -> dict[str, Any] | None:
    """The recipe of a network that is still as it was built; None for a module of one's own."""
    recipe = getattr(net, "recipe", None)
    if not isinstance(recipe, dict):
        return None
    return recipe if _shapes(build(recipe)) == _shapes(net) else None


def backbone(name: str) -> ModuleType:
    """The file of a backbone; its function of the same name builds it."""
    return import_module(f"ibaml.nn.{name}")


def build(recipe: dict[str, Any]) -> nn.Module:
    """The network of a recipe, with weights of its own."""
    arguments = dict(recipe)
    name = arguments.pop("name", None)
    if name not in BACKBONES:
        raise ValueError(f"there is no backbone {name!r}: there are {', '.join(BACKBONES)}")
    net: nn.Module = getattr(backbone(name), name)(**arguments)
    return net


def _shapes(net: nn.Module) -> tuple[str, list[tuple[str, tuple[int, ...]]]]:
    return str(net), [(name, tuple(t.shape)) for name, t in net.state_dict().items()]
