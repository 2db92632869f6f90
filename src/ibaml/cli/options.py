"""How does a table of settings become the options of a command?"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable
from typing import Annotated, Any

import typer

from ibaml.fields import Setting, fields_of


def with_options(function: Callable[..., None], table: type) -> Callable[..., None]:
    """The function with its ``**given`` replaced by one option for every field of ``table``. An
    option that a person leaves out is None."""
    hints = typing.get_type_hints(function, include_extras=True)
    own = [
        p.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=hints[p.name])
        for p in inspect.signature(function).parameters.values()
        if p.kind is not inspect.Parameter.VAR_KEYWORD
    ]
    parameters = [*own, *(_parameter(f) for f in fields_of(table).values())]

    def command(**values: Any) -> None:
        function(**values)

    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in parameters}
    command.__doc__ = function.__doc__
    command.__name__ = function.__name__
    return command


def _parameter(field: Setting) -> inspect.Parameter:
    kind: Any = str if field.several else field.kind  # several values: one text with commas
    default = field.default if field.shown is None else field.shown
    if isinstance(default, bool):
        default = "yes" if default else "no"
    described = typer.Option(
        f"{field.flag}/--no-{field.flag[2:]}" if kind is bool else field.flag,
        help=field.help,
        rich_help_panel=field.panel,
        show_default=False if default is None else str(default),
    )
    return inspect.Parameter(
        field.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[kind | None, described],
    )
