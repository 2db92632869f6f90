"""What is a page made of? Sections of blocks; the template escapes every text in them.

A figure cannot be made without its description and the table of its numbers, for readers who do
not see it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

Tone = Literal["plain", "quiet", "note", "warn", "good"]


@dataclass(frozen=True)
class Text:
    """A paragraph; a note and a warning have a frame."""

    text: str
    tone: Tone = "plain"
    kind: ClassVar[str] = "text"


@dataclass(frozen=True)
class Points:
    """A list of sentences, each marked by what it says of the one above it."""

    title: str
    items: Sequence[str]
    tone: Tone = "plain"
    kind: ClassVar[str] = "points"


@dataclass(frozen=True)
class Card:
    """One figure in large letters."""

    label: str
    value: str
    detail: str = ""


@dataclass(frozen=True)
class Cards:
    cards: Sequence[Card]
    kind: ClassVar[str] = "cards"


@dataclass(frozen=True)
class Table:
    """A table; the first cell of a row names it.

    Attributes:
        words: the columns that hold words, besides the first; the others are numbers.
        folded: whether it is shown only when a person opens it.
    """

    caption: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    words: frozenset[int] = frozenset()
    folded: bool = False
    kind: ClassVar[str] = "table"

    def __post_init__(self) -> None:
        if wrong := [row for row in self.rows if len(row) != len(self.head)]:
            raise ValueError(f"{self.caption}: {wrong[0]} does not fit {list(self.head)}")


@dataclass(frozen=True)
class Key:
    """One line of a legend: the color (its name in the style sheet), the dash and the text."""

    color: str
    dash: str
    text: str


@dataclass(frozen=True)
class Figure:
    """A drawing (made by `ibaml.report.inline`, which alone may skip the escape), or without
    matplotlib its table alone."""

    title: str
    svg: str | None
    alt: str
    table: Table
    legend: Sequence[Key] = ()
    note: str = ""
    kind: ClassVar[str] = "figure"


@dataclass(frozen=True)
class Picture:
    """A picture as a data address."""

    source: str
    alt: str
    width: int
    height: int
    kind: ClassVar[str] = "picture"


@dataclass(frozen=True)
class Tile:
    """One example of an episode: its picture and, for a query, the answer."""

    picture: Picture
    answer: str = ""
    right: bool | None = None


@dataclass(frozen=True)
class Episode:
    """One task: for each class its name, its examples, its queries."""

    title: str
    summary: str
    classes: Sequence[tuple[str, Sequence[Tile], Sequence[Tile]]]
    kind: ClassVar[str] = "episode"


@dataclass(frozen=True)
class Commands:
    """Commands to type, each with what it does."""

    lines: Sequence[tuple[str, str]]
    kind: ClassVar[str] = "commands"


@dataclass(frozen=True)
class Side:
    """Blocks side by side, where there is room."""

    blocks: Sequence[Block]
    kind: ClassVar[str] = "side"


@dataclass(frozen=True)
class Folded:
    """Blocks that are shown when a person opens them."""

    title: str
    blocks: Sequence[Block]
    kind: ClassVar[str] = "folded"


Block = Text | Points | Cards | Table | Figure | Picture | Episode | Commands | Side | Folded


@dataclass(frozen=True)
class Section:
    title: str
    blocks: Sequence[Block]


@dataclass(frozen=True)
class Page:
    """A whole page.

    Attributes:
        kicker: what kind of page it is, above the title.
        lead: the result in a sentence, below it.
    """

    title: str
    kicker: str
    lead: str
    sections: Sequence[Section]
