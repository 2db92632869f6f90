"""How a table of settings becomes options of a command, so that none is written twice."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Mapping
from dataclasses import Field
from typing import Annotated, Any

import typer

from ibaml.training.settings import kind_of, option


def with_options(function: Callable[..., None], table: type) -> Callable[..., None]:
    """The function with its ``**given`` spread into one option for every field of ``table``, None
    where it is not given."""
    hints = typing.get_type_hints(function, include_extras=True)
    own = [
        p.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=hints[p.name])
        for p in inspect.signature(function).parameters.values()
        if p.kind is not inspect.Parameter.VAR_KEYWORD
    ]
    fields: Mapping[str, Field[Any]] = table.__dataclass_fields__  # type: ignore[attr-defined]
    parameters = [*own, *(_parameter(table, f) for f in fields.values())]

    def command(**values: Any) -> None:
        function(**values)

    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in parameters}
    command.__doc__ = function.__doc__
    command.__name__ = function.__name__
    return command


def _parameter(table: type, field: Field[Any]) -> inspect.Parameter:
    kind, meta = kind_of(table, field.name), field.metadata
    kind = str if typing.get_origin(kind) is tuple else kind  # several: a text with commas
    default = field.default if meta["shown"] is None else meta["shown"]
    if isinstance(default, bool):
        default = "yes" if default else "no"
    flag = option(field.name)
    described = typer.Option(
        f"{flag}/--no-{flag[2:]}" if kind is bool else flag,
        help=meta["help"],
        rich_help_panel=meta["panel"],
        show_default=False if default is None else str(default),
    )
    return inspect.Parameter(
        field.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[kind | None, described],
    )
