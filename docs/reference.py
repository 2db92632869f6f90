"""Which pages does the reference have? One for each section of docs/api.md, made from docstrings.

docs/api.md says what is public and why; `tests/test_api.py` holds it to every module's `__all__`.
Here each of its names gets the line of that page as a heading's text and its docstring below.
"""

from __future__ import annotations

import inspect
import re
from importlib import import_module
from pathlib import Path
from typing import Any

SECTION = re.compile(r"^## `(ibaml[\w.]*)`$", re.MULTILINE)
ITEM = re.compile(r"^- ((?:`\w+`(?:, )?)+)(?:: (.+))?$", re.MULTILINE)
ELSEWHERE = re.compile(r"^Also of `ibaml`: (.+?)\.?$", re.MULTILINE)


def write(api: Path, folder: Path) -> None:
    """A page for each module of ``api`` in ``folder``, and ``reference.rst``, which lists them."""
    folder.mkdir(exist_ok=True)
    _, *parts = SECTION.split(api.read_text(encoding="utf-8"))
    modules = dict(zip(parts[::2], parts[1::2], strict=True))
    for module, text in modules.items():
        page = [title(module), *(entry(module, name, line) for name, line in items(text))]
        for names in ELSEWHERE.findall(text):
            shared = (f":py:obj:`ibaml.{name}`" for name in re.findall(r"`(\w+)`", names))
            page.append(f"Also here: {', '.join(shared)}.\n")
        save(folder / f"{module}.rst", "\n".join(page))
    toctree = "\n".join(f"   {module}" for module in modules)
    lead = "Everything public, from the docstrings. :doc:`../api` has it on one page, a line each."
    save(
        folder / "reference.rst",
        f"{title('Reference')}\n{lead}\n\n.. toctree::\n   :maxdepth: 1\n\n{toctree}\n",
    )


def items(text: str) -> list[tuple[str, str]]:
    return [
        (name, line or "")
        for names, line in ITEM.findall(text)
        for name in re.findall(r"`(\w+)`", names)
    ]


def title(text: str) -> str:
    return f"{text}\n{'=' * len(text)}\n"


def entry(module: str, name: str, line: str) -> str:
    """One public name. Modules have pages of their own; types and constants have no docstring."""
    thing: Any = getattr(import_module(module), name)
    if inspect.ismodule(thing):
        return f"- :doc:`{thing.__name__}`\n"
    if inspect.isclass(thing):
        options = "   :members:\n"
        return f".. autoclass:: {module}.{name}\n{options}"
    if inspect.isroutine(thing):
        return f".. autofunction:: {module}.{name}\n"
    text = line.replace("`", "``")  # Markdown's code is reStructuredText's with two
    return f".. py:data:: {module}.{name}\n\n   {text[:1].upper()}{text[1:]}.\n"


def save(path: Path, text: str) -> None:
    """Write what has changed only, so that a second build reads little anew."""
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        path.write_text(text, encoding="utf-8")
