"""Is an argument valid for its option? A number, word or object that is not raises an error that
names the option and says what to write instead."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from torch import nn


def check_count(name: str, value: Any, least: int) -> None:
    """Refuse anything but a whole number of ``least`` or more."""
    if type(value) is not int or value < least:
        kind = f"a whole number, {least} or more"
        raise ValueError(_refusal(name, kind, value, _converted(int, value, lambda v: v >= least)))


def check_counts(name: str, values: Any) -> None:
    """Refuse anything but a sequence of whole numbers of 1 or more, such as widths of layers."""
    if isinstance(values, str) or not isinstance(values, Sequence):
        raise ValueError(f"{name} must be whole numbers such as (40, 40); got {_shown(values)}")
    for i, value in enumerate(values):
        check_count(f"{name}[{i}]", value, 1)


def check_number(
    name: str,
    value: Any,
    *,
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
    below: float | None = None,
) -> None:
    """Refuse anything but a finite number in range."""

    def fits(v: float) -> bool:
        return (
            math.isfinite(v)
            and (least is None or v >= least)
            and (above is None or v > above)
            and (most is None or v <= most)
            and (below is None or v < below)
        )

    if isinstance(value, bool) or not isinstance(value, int | float) or not fits(value):
        limits = [
            text.format(f"{limit:g}")
            for limit, text in (
                (least, "{} or more"),
                (above, "above {}"),
                (most, "{} or less"),
                (below, "below {}"),
            )
            if limit is not None
        ]
        kind = f"a finite number, {' and '.join(limits)}" if limits else "a finite number"
        raise ValueError(_refusal(name, kind, value, _converted(float, value, fits)))


def check_flag(name: str, value: Any, *, or_none: bool = False) -> None:
    """Refuse anything but True and False."""
    if not (isinstance(value, bool) or (or_none and value is None)):
        words = "True, False or None" if or_none else "True or False"
        raise ValueError(f"{name} must be {words}; got {_shown(value)}")


def check_word(name: str, value: Any, words: Sequence[str]) -> None:
    """Refuse anything but one of the words."""
    if not isinstance(value, str) or value not in words:
        near = get_close_matches(value, words, n=1) if isinstance(value, str) else []
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ValueError(f"{name} must be one of {', '.join(words)}; got {_shown(value)}{hint}")


def check_part(slot: str, value: Any) -> None:
    """Refuse anything but an object that fits the slot: a class, a string, a part of another slot.

    Args:
        slot: ``"belief"``, ``"solver"``, ``"gradient"``, ``"objective"``, ``"likelihood"``,
            ``"curvature"`` or ``"linear_solver"``.
    """
    part = _PARTS[slot]
    if isinstance(value, type):
        raise TypeError(
            f"{slot} must be an object, not a class: write {slot}={value.__name__}(), with its "
            "choices in the parentheses"
        )
    part, other = _PARTS[slot], _part_of(value)
    if other == slot or (other is None and part.fits(value)):
        return
    if other is not None:
        its = _PARTS[other]
        got = f"{type(value).__name__}(…), which is {its.what}: it goes into {its.place}"
    else:
        got = _shown(value) + (part.of_text.format(value) if isinstance(value, str) else "")
    raise TypeError(f"{slot} must be an object such as {part.example}; got {got}")


def check_module(model: Any) -> None:
    """Refuse anything but a `torch.nn.Module`."""
    if isinstance(model, type):
        raise TypeError(f"model must be an object, not a class: write {model.__name__}(…)")
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")


@dataclass(frozen=True)
class _Part:
    what: str
    example: str
    place: str
    fits: Callable[[Any], bool]
    of_text: str = ""  # the remedy if a string was given


def _has(*names: str) -> Callable[[Any], bool]:
    return lambda value: all(hasattr(value, name) for name in names)


def _takes(arguments: int) -> Callable[[Any], bool]:
    """A test whether an object can be called with this many arguments."""

    def fits(value: Any) -> bool:
        if not callable(value):
            return False
        try:
            signature = inspect.signature(value.forward if isinstance(value, nn.Module) else value)
            signature.bind(*[None] * arguments)
        except ValueError:  # a builtin without a signature
            return True
        except TypeError:
            return False
        return True

    return fits


# a part is recognized by what it can do, not by its class: users write their own
_PARTS = {
    "belief": _Part(
        "a belief", "DiagonalGaussian()", "belief=", _has("blocks", "start", "sample", "penalty")
    ),
    "solver": _Part(
        "a solver",
        "NewtonCG()",
        "solver=",
        _has("steps", "solve"),
        " (ibaml.methods take words)",
    ),
    "curvature": _Part(
        "a curvature",
        'Curvature("ggn")',
        "gradient=Implicit(curvature=…)",
        _has("at", "damping"),
        ': write Curvature("{}")',
    ),
    "objective": _Part(
        "an objective",
        "QueryNll()",
        "objective=",
        lambda value: _has("samples", "noise")(value) and _takes(3)(value),
    ),
    "gradient": _Part("a gradient rule", "Implicit()", "gradient=", _takes(4)),
    "linear_solver": _Part(
        "a linear solver",
        "ConjugateGradient()",
        "gradient=Implicit(linear_solver=…)",
        _takes(3),
    ),
    "likelihood": _Part(
        "a likelihood",
        "Categorical() or Gaussian(), or any callable (outputs, y) -> nll per example",
        "likelihood=",
        _takes(2),
    ),
}


def _part_of(value: Any) -> str | None:
    """The slot that an object fits; None if no slot is recognized."""
    if isinstance(value, str | nn.Module):
        return "likelihood" if _has("takes_labels")(value) else None
    for slot in ("belief", "solver", "curvature", "objective"):
        if _PARTS[slot].fits(value):
            return slot
    try:
        names = list(inspect.signature(value).parameters)
    except (TypeError, ValueError):
        return None
    if names[:1] == ["matvec"]:
        return "linear_solver"
    return "gradient" if names[:4] == ["energy", "start", "solver", "record"] else None


def _refusal(name: str, kind: str, value: Any, suggestion: int | float | None) -> str:
    if suggestion is not None and suggestion == int(suggestion):
        suggestion = int(suggestion)
    hint = "" if suggestion is None else f": write {suggestion}"
    return f"{name} must be {kind}; got {_shown(value)}{hint}"


def _converted(
    kind: type[int] | type[float], value: Any, fits: Callable[[Any], bool]
) -> int | float | None:
    """The number that a value stands for, such as 2 for 2.0 or "2"; None if there is none."""
    if isinstance(value, bool):
        return None
    try:
        number = float(value)
        converted = kind(number)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return None
    return converted if converted == number and fits(converted) else None


def _shown(value: Any) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= 80 else f"{text[:79]}…"
