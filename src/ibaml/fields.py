"""How is an option declared once, and how is the value given for it read, checked and refused?

A table of options is a frozen dataclass whose fields are declared by `setting`; `fields_of` reads
the table. The command line, TOML files and Python all go through `chosen`. Nothing here needs
torch, so that --help is fast.
"""

from __future__ import annotations

import dataclasses
import math
import re
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from ibaml import untrusted
from ibaml.extras import need

Check = Callable[[Any], str | None]  # says what a value must be ("must rise"); None if it is

_KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}
_SEVERAL = {int: "whole numbers", float: "numbers", str: "words"}
_TRUTH = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


class SettingsError(ValueError):
    """A setting is unknown, of the wrong kind, or contradicts another; the message names it."""


def setting(
    default: Any,
    help: str = "",
    panel: str = "",
    *,
    choices: tuple[str, ...] = (),
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
    below: float | None = None,
    only: tuple[str, ...] = (),
    shown: str | None = None,
    check: Check | None = None,
) -> Any:
    """Declare a field of a table of options; its annotation is its kind.

    Args:
        panel: the heading under which ``--help`` shows the option.
        choices: the words it accepts.
        least, above, most, below: bounds of a number, or of each of several.
        only: the methods that read it; empty means all.
        shown: the default as ``--help`` shows it, where it depends on other settings.
        check: a further condition.
    """
    declared = {
        "help": help, "panel": panel, "choices": choices, "least": least, "above": above,
        "most": most, "below": below, "only": only, "shown": shown, "check": check,
    }  # fmt: skip
    return dataclasses.field(default=default, metadata=declared)


@dataclass(frozen=True)
class Setting:
    """One field of a table: what `setting` declared, with its name and kind."""

    name: str
    kind: type  # int, float, bool or str; of each, where there are several
    several: bool
    default: Any
    help: str = ""
    panel: str = ""
    choices: tuple[str, ...] = ()
    least: float | None = None
    above: float | None = None
    most: float | None = None
    below: float | None = None
    only: tuple[str, ...] = ()
    shown: str | None = None
    check: Check | None = None

    @property
    def flag(self) -> str:
        """How it is written on the command line."""
        return flag(self.name)

    def checked(self, value: Any) -> Any:
        """The value, if it has the right kind and range. Several may be one text with commas."""
        value = self._several(value) if self.several else self._one(value)
        if self.check is not None and (problem := self.check(value)):
            raise SettingsError(f"{self.name} {problem}, got {value!r}")
        return value

    def read(self, text: str) -> Any:
        """The value that a text of the command line stands for."""
        if self.several or self.kind is str:
            return self.checked(text)
        try:
            value = _TRUTH[text.lower()] if self.kind is bool else self.kind(text)
        except (ValueError, KeyError):
            raise self._not_of_its_kind(text) from None
        return self.checked(value)

    def _one(self, value: Any) -> Any:
        if self.kind is float and isinstance(value, int) and not isinstance(value, bool):
            try:
                value = float(value)
            except OverflowError:
                raise SettingsError(f"{self.name} must be finite, got a larger number") from None
        if not isinstance(value, self.kind) or (self.kind is not bool and isinstance(value, bool)):
            raise self._not_of_its_kind(value)
        if isinstance(value, str) and (problem := _unwritable(value)):
            raise SettingsError(f"{self.name} {problem}, got {value!r}: rename it")
        if self.choices and value not in self.choices:
            raise SettingsError(
                f"{self.name} must be one of {', '.join(self.choices)}; got {value!r}"
                f"{near(str(value), self.choices)}"
            )
        if (
            isinstance(value, int | float)
            and self.kind is not bool
            and (bound := self._out_of_range(value))
        ):
            raise SettingsError(f"{self.name} must be {bound}, got {value}")
        return value

    def _several(self, value: Any) -> tuple[Any, ...]:
        if isinstance(value, str):
            parts: list[Any] = [p for p in re.split(r"[,\s]+", value) if p]
        else:
            parts = list(value) if isinstance(value, Iterable) else []
        for part in parts:
            if self.choices and part not in self.choices:
                raise SettingsError(
                    f"each of {self.name} must be one of {', '.join(self.choices)}; "
                    f"got {part!r}{near(str(part), self.choices)}"
                )
        try:
            values = tuple(
                self.kind(part) if isinstance(part, str) else self._one(part) for part in parts
            )
        except (TypeError, ValueError):
            values = ()
        if self.kind is str and (problem := next(filter(None, map(_unwritable, values)), None)):
            raise SettingsError(f"{self.name} {problem}, got {value!r}: rename it")
        numbers: tuple[Any, ...] = values if self.kind in (int, float) else ()
        if not values or any(self._out_of_range(number) for number in numbers):
            example = "a,b" if self.kind is str else "1,5,10"
            raise SettingsError(
                f"{self.name} must be {_SEVERAL[self.kind]}{self._range()}, with commas between "
                f"them ({example}), got {value!r}"
            )
        return values

    def _out_of_range(self, number: float) -> str | None:
        """What the number must be, or None if it is."""
        try:
            if not math.isfinite(number):
                return "finite"
        except OverflowError:  # a whole number of hundreds of digits
            return "finite"
        if self.least is not None and number < self.least:
            return f"{self.least:g} or more"
        if self.above is not None and number <= self.above:
            return f"above {self.above:g}"
        if self.most is not None and number > self.most:
            return f"{self.most:.10g} or less"
        if self.below is not None and number >= self.below:
            return f"below {self.below:g}"
        return None

    def _range(self) -> str:
        bounds = (
            ("of {:g} or more", self.least), ("above {:g}", self.above),
            ("of {:.10g} or less", self.most), ("below {:g}", self.below),
        )  # fmt: skip
        phrases = [words.format(bound) for words, bound in bounds if bound is not None]
        return f" {' and '.join(phrases)}" if phrases else ""

    def _not_of_its_kind(self, value: Any) -> SettingsError:
        return SettingsError(f"{self.name} must be {_KINDS[self.kind]}, got {value!r}")


def _unwritable(text: str) -> str | None:
    """Why a text cannot stand in a settings file."""
    try:
        text.encode()
    except UnicodeEncodeError:  # the name of a file may be any bytes
        return "must be UTF-8"
    return "must not hold a zero byte" if "\0" in text else None


def fields_of(table: type) -> Mapping[str, Setting]:
    """The fields of a table of options by name, in order. A field that `setting` did not declare
    has only its kind and default."""
    hints = typing.get_type_hints(table)
    by_name = {}
    for f in dataclasses.fields(table):
        kind, several, choices = _kind(hints[f.name])
        declared = {"choices": choices, **f.metadata}
        by_name[f.name] = Setting(f.name, kind, several, f.default, **declared)
    return types.MappingProxyType(by_name)


def _kind(hint: Any) -> tuple[type, bool, tuple[str, ...]]:
    """An annotation's kind, whether it has several values, and the words it allows."""
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        hint = next(t for t in typing.get_args(hint) if t is not type(None))
    if typing.get_origin(hint) is tuple:
        kind, _, choices = _kind(typing.get_args(hint)[0])
        return kind, True, choices
    if typing.get_origin(hint) is typing.Literal:
        return str, False, typing.get_args(hint)
    return hint, False, ()


def chosen(
    table: type, given: Mapping[str, Any], *, words: bool = False, whose: str = ""
) -> dict[str, Any]:
    """The values given for a table, checked; None counts as left out.

    Args:
        words: texts come from the command line and are converted to the kind of the field.
        whose: begins the message about an unknown name: a file, a study.
    """
    fields = fields_of(table)
    for name in given:
        if name not in fields:
            raise SettingsError(unknown(name, fields, whose))
    values = {}
    for name, value in given.items():
        if value is not None:
            read = words and isinstance(value, str)
            values[name] = fields[name].read(value) if read else fields[name].checked(value)
    return values


def require(options: Any) -> None:
    """Check every field of a table; its ``__post_init__`` calls this."""
    for name, field in fields_of(type(options)).items():
        value = getattr(options, name)
        if value is not None and not (value == field.default and field.shown is not None):
            field.checked(value)


def refuse_unread(table: type, given: Iterable[str], reader: str, what: str = "the method") -> None:
    """Refuse a setting that this reader does not read, for it would be ignored."""
    fields = fields_of(table)
    for name in given:
        if (only := fields[name].only) and reader not in only:
            raise SettingsError(
                f"{name} is read by {', '.join(only)} and {what} is {reader}: leave it out"
            )


def differs(ours: Any, given: Any) -> str | None:
    """The first field that is given and differs from ours."""
    for name in fields_of(type(ours)):
        value = getattr(given, name)
        if value is not None and value != getattr(ours, name):
            return name
    return None


def flag(name: str) -> str:
    """How a field is written on the command line."""
    return f"--{name.replace('_', '-')}"


def unknown(name: str, known: Iterable[str], whose: str = "") -> str:
    """The message that refuses an unknown name."""
    return f"{whose}{': ' if whose else ''}there is no setting {name!r}{near(name, known)}"


def near(name: str, known: Iterable[str]) -> str:
    """“; did you mean X?”, or nothing."""
    close = get_close_matches(name, list(known), n=1, cutoff=0.4)
    return f"; did you mean {close[0]}?" if close else ""


def read_toml(path: Path, table: type) -> dict[str, Any]:
    """The settings in a TOML file, named as on the command line, with dashes or underscores.
    `chosen` checks the values."""
    try:
        content = untrusted.parsed_toml(untrusted.content(path, untrusted.SETTINGS))
    except OSError as error:
        raise SettingsError(f"{path}: {error.strerror or error}") from error
    except untrusted.Refused as error:
        raise SettingsError(f"{path} {error}") from error
    settings = {}
    for name, value in content.items():
        if isinstance(value, Mapping):
            raise SettingsError(f"{path}: [{name}] is a table; settings are flat, e.g. ways = 5")
        plain = name.replace("-", "_")
        if plain in settings:
            raise SettingsError(
                f"{path}: {plain} is given twice, with dashes and underscores: keep one"
            )
        settings[plain] = value
    for name in settings:
        if name not in fields_of(table):
            raise SettingsError(unknown(name, fields_of(table), str(path)))
    return settings


def write_toml(options: Any) -> str:
    """A table as the text of a TOML file, for `read_toml`; fields that are None are left out."""
    need("tomli_w")  # a machine for `ibaml.complexity` may lack it
    import tomli_w

    values = {name: getattr(options, name) for name in fields_of(type(options))}
    return tomli_w.dumps({name: value for name, value in values.items() if value is not None})
