"""Which weights of a module are adapted to every task, shared by all tasks, or frozen?"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase

from torch import Tensor, nn

Predicate = Callable[[str, Tensor], bool]
Selection = str | Iterable[str] | Predicate


@dataclass(frozen=True)
class Roles:
    """Names of parameters (a tied parameter has one name) by their role.

    ``head`` names the adapted parameters of the last linear layer, whatever was selected.
    """

    adapted: tuple[str, ...]
    shared: tuple[str, ...]
    frozen: tuple[str, ...]
    head: tuple[str, ...]


def head_module(model: nn.Module) -> tuple[str, nn.Linear]:
    """The last linear layer of the module, in the order of registration."""
    layers = [(name, m) for name, m in model.named_modules() if isinstance(m, nn.Linear)]
    if not layers:
        raise ValueError(
            f"{type(model).__name__} has no nn.Linear layer, so it has no head: name the "
            'weights to adapt, e.g. adapt=["classifier.*"]'
        )
    return layers[-1]


def assign_roles(model: nn.Module, adapt: Selection, freeze: Selection | None = None) -> Roles:
    """Sort the parameters of ``model``.

    Args:
        adapt: ``"all"``; ``"head"`` (the last linear layer); a name or pattern such as
            ``"blocks.3.*"``, or several; or a predicate ``(name, parameter) -> bool``. Weights
            that are neither adapted nor frozen are shared.
        freeze: weights that never change, selected in the same way. Parameters that already have
            ``requires_grad=False`` are frozen too.
    """
    aliases: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        aliases.setdefault(id(parameter), []).append(name)
    parameters = dict(model.named_parameters())
    trainable = {n: p for n, p in parameters.items() if p.requires_grad}
    if not trainable:
        raise ValueError(
            f"{type(model).__name__} has no trainable parameters: there is nothing to meta-learn "
            "(is requires_grad switched off on all of them?)"
        )

    def chosen(selection: Selection, field: str) -> set[str]:
        known = callable(selection) or isinstance(selection, Iterable)
        if isinstance(selection, nn.Module) or not known:
            raise TypeError(
                f'{field} must be "all", "head", a name or pattern of weights, several of them, or '
                f"a predicate (name, parameter) -> bool; got {type(selection).__name__}"
            )
        if callable(selection):
            names = {n for n, p in trainable.items() if selection(n, p)}
        elif selection == "all":
            names = set(trainable)
        elif selection == "head":
            own = {id(p) for p in head_module(model)[1].parameters()}
            names = {n for n, p in trainable.items() if id(p) in own}
        else:
            patterns = [selection] if isinstance(selection, str) else list(selection)
            names = set()
            for pattern in patterns:
                hits = {
                    n
                    for n, p in trainable.items()
                    if any(_matches(alias, pattern) for alias in aliases[id(p)])
                }
                if not hits:
                    raise ValueError(_no_match(field, pattern, trainable))
                names |= hits
        return names

    frozen = chosen(freeze, "freeze") if freeze is not None else set()
    adapted = chosen(adapt, "adapt")
    if adapt in ("all", "head"):
        adapted -= frozen
    if both := adapted & frozen:
        raise ValueError(f"both adapt and freeze select {sorted(both)}: choose one for each weight")
    if not adapted:
        raise ValueError(
            "adapt selects no trainable parameter: every method needs at least one weight that "
            f"each task adapts (the model has {', '.join(list(trainable)[:8])})"
        )
    try:
        last = {id(p) for p in head_module(model)[1].parameters()}
    except ValueError:
        last = set()
    return Roles(
        adapted=tuple(n for n in trainable if n in adapted),
        shared=tuple(n for n in trainable if n not in adapted and n not in frozen),
        frozen=tuple(n for n in parameters if n in frozen or n not in trainable),
        head=tuple(n for n, p in trainable.items() if n in adapted and id(p) in last),
    )


def _matches(name: str, pattern: str) -> bool:
    return fnmatchcase(name, pattern) or name.startswith(f"{pattern}.")


def _no_match(field: str, pattern: str, names: Iterable[str]) -> str:
    near = get_close_matches(pattern, list(names), n=3, cutoff=0.3)
    hint = f"; did you mean {' or '.join(near)}?" if near else ""
    return (
        f"{field}: no trainable parameter matches {pattern!r}{hint} "
        '(or use "all", "head", a pattern such as "layer4.*", or a predicate)'
    )
