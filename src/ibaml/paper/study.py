"""What is a study: its settings, its run, and what it found beside what the paper says."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from ibaml.paper.folder import Parts

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Progress = Callable[[int, int, str], None]  # parts done, of how many, which is next
Row = Mapping[str, Any]


@dataclass(frozen=True)
class Findings:
    """What a study found, ready to be written down.

    Attributes:
        setup: how it was done, a sentence each.
        agrees, differs: what does and does not agree with the paper, a sentence each.
        numbers: the figures the sentences rest on, by name.
        tables: rows by name; each becomes a CSV file.
        pictures: how each is drawn, by name; each becomes a PNG and a PDF file.
        shown: rows for a table in the text.
        notes: what the paper says nothing of, a sentence each.
        machine: where the figures are from, None for this machine.
    """

    setup: Sequence[str]
    agrees: Sequence[str]
    differs: Sequence[str]
    numbers: Mapping[str, Any]
    tables: Mapping[str, Sequence[Row]]
    pictures: Mapping[str, Callable[[], Figure]]
    shown: Sequence[Row] = ()
    notes: Sequence[str] = ()
    machine: str | None = None


@dataclass(frozen=True)
class Study:
    """One figure, table or theorem of the paper.

    Attributes:
        full, quick: its settings, a frozen dataclass, with a field ``seed`` where one matters;
            ``quick`` takes minutes on two cores.
        run: computes it. What takes long goes through `Parts`, so that a run that was stopped
            goes on where it was.
    """

    name: str
    title: str
    full: Any
    quick: Any
    run: Callable[[Any, Parts, Progress], Findings]

    def settings(self, quick: bool = False, changes: Mapping[str, Any] | None = None) -> Any:
        """The full or the quick settings with some of them changed; text becomes what the setting
        is (a tuple: values with commas between)."""
        base = self.quick if quick else self.full
        known = [field.name for field in fields(base)]
        found = {}
        for name, value in (changes or {}).items():
            if name not in known:
                raise ValueError(f"{self.name} has no setting {name!r}: it has {', '.join(known)}")
            was = getattr(base, name)
            found[name] = _read(name, value, was) if isinstance(value, str) else value
        return replace(base, **found)


_TRUTH = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


def _read(name: str, text: str, like: Any) -> Any:
    """The text as a value of the kind that stands there."""
    if isinstance(like, tuple):
        return tuple(_read(name, part.strip(), like[0]) for part in text.split(",") if part.strip())
    if isinstance(like, bool):
        if text.lower() not in _TRUTH:
            raise ValueError(f"{name} must be true or false, got {text!r}")
        return _TRUTH[text.lower()]
    try:
        return type(like)(text)
    except ValueError as error:
        kind = {int: "a whole number", float: "a number"}[type(like)]
        raise ValueError(f"{name} must be {kind}, got {text!r}") from error
