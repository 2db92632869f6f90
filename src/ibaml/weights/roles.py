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


def last_block(model: nn.Module) -> list[str]:
    """Names of the weights of the last block before the head, and of the head.

    It is found from the end: of a sequence, and of a module that holds all layers, the last member
    is taken, of any other module all of it. A norm alone is no block: what comes before it is taken
    too.

    >>> last_block(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 4), nn.Linear(4, 2)))
    ['2.weight', '2.bias', '3.weight', '3.bias']
    """
    head = head_module(model)[1]
    own = {id(p) for p in head.parameters()}
    aliases = dict(model.named_parameters(remove_duplicate=False))
    names = list(aliases)
    first = min(i for i, n in enumerate(names) if id(aliases[n]) in own)
    if first == 0:
        raise ValueError(
            'adapt="last" takes the last block of layers and the head, and '
            f'{type(model).__name__} has no weights before its head: use adapt="head"'
        )
    return [*_last(model, "", names[:first]), *(n for n in names if id(aliases[n]) in own)]


def _last(module: nn.Module, prefix: str, names: list[str]) -> list[str]:
    """The last block among the weights of these names, which all begin with the prefix."""
    children, found = dict(module.named_children()), list[str]()
    for child in reversed(list(dict.fromkeys(n[len(prefix) :].split(".")[0] for n in names))):
        path = prefix + child
        inside = [n for n in names if n == path or n.startswith(f"{path}.")]
        part = children.get(child)
        if part is None or all(p.dim() < 2 for p in part.parameters()):
            found = [*inside, *found]  # a weight of the container itself, or a norm
            continue
        holds_all = inside[0] == names[0] and any(True for _ in part.children())
        if isinstance(part, nn.Sequential | nn.ModuleList) or holds_all:
            inside = _last(part, f"{path}.", inside)
        return [*inside, *found]
    return found


def assign_roles(model: nn.Module, adapt: Selection, freeze: Selection | None = None) -> Roles:
    """Sort the parameters of ``model``.

    Args:
        adapt: ``"all"``; ``"head"`` (the last linear layer); ``"last"`` (that and the last block of
            layers before it, see `last_block`); a name or pattern such as ``"blocks.3.*"``, or
            several; or a predicate ``(name, parameter) -> bool``. Weights that are neither adapted
            nor frozen are shared.
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
                f'{field} must be "all", "head", "last", a name or pattern of weights, several of '
                f"them, or a predicate (name, parameter) -> bool; got {type(selection).__name__}"
            )
        if callable(selection):
            names = {n for n, p in trainable.items() if selection(n, p)}
        elif selection == "all":
            names = set(trainable)
        elif selection == "head":
            own = {id(p) for p in head_module(model)[1].parameters()}
            names = {n for n, p in trainable.items() if id(p) in own}
        elif selection == "last":
            names = set(last_block(model)) & set(trainable)
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
    if adapt in ("all", "head", "last"):
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
        '(or use "all", "head", "last", a pattern such as "layer4.*", or a predicate)'
    )
