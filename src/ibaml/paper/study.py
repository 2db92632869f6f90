"""What is a study? Its settings, its run, and findings that are compared with the paper."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ibaml.fields import chosen, fields_of
from ibaml.parts import Parts

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Progress = Callable[[int, int, str], None]  # arguments: parts done, parts in all, the next part
Row = Mapping[str, Any]


@dataclass(frozen=True)
class Findings:
    """What a study found, ready to be written down.

    Attributes:
        setup: how it was done, as sentences.
        agrees, differs: what agrees with the paper and what does not, as sentences.
        numbers: the figures behind the sentences, by name.
        tables: rows by name; each becomes a CSV file.
        pictures: how each is drawn, by name; each becomes a PNG and a PDF file.
        shown: rows for a table in the text.
        notes: findings that the paper does not mention, as sentences.
        machine: where the figures were computed, None for this machine.
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
        full, quick: its settings, a frozen dataclass, with a field ``seed`` if one matters;
            ``quick`` takes minutes on two cores.
        run: computes it. Long computations go through `Parts`, so that a run that was stopped
            continues there.
    """

    name: str
    title: str
    full: Any
    quick: Any
    run: Callable[[Any, Parts, Progress], Findings]

    def settings(self, quick: bool = False, changes: Mapping[str, Any] | None = None) -> Any:
        """The full or the quick settings with some of them changed. Text is converted to the kind
        of the setting (several values have commas between them)."""
        base = self.quick if quick else self.full
        known = f"{self.name} (it has {', '.join(fields_of(type(base)))})"
        return replace(base, **chosen(type(base), changes or {}, words=True, whose=known))


def rising(values: Sequence[float]) -> str | None:
    """A check of a setting: its values must rise."""
    return None if list(values) == sorted(set(values)) else "must rise"
