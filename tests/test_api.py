"""Public is what docs/api.md names: the page and the code say the same, and no other page needs
more."""

from __future__ import annotations

import re
from functools import reduce
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

import ibaml

ROOT = Path(__file__).parent.parent
SECTIONS = re.split(r"^## `(.+)`$", (ROOT / "docs/api.md").read_text(), flags=re.M)[1:]
PAGE = dict(zip(SECTIONS[::2], SECTIONS[1::2], strict=True))
# an item of the page: names in backticks, and (but for modules) a line on them
ITEM = re.compile(r"^(?:- |Also of `ibaml`: )((?:`\w+`(?:, )?)+)(: .+|\.?)$", re.M)
# what is run, not imported: python -m
RUN = {"ibaml.complexity"}


def named(section: str) -> list[str]:
    return [name for item in ITEM.finditer(section) for name in re.findall(r"`(\w+)`", item[1])]


@pytest.mark.parametrize("module", PAGE)
def test_the_page_names_all_of_a_module_and_nothing_else(module):
    names = named(PAGE[module])
    assert len(names) == len(set(names))
    assert sorted(names) == sorted(import_module(module).__all__)
    assert all(hasattr(import_module(module), name) for name in names)


def test_a_public_module_has_a_section_and_no_other_has():
    modules = {f"ibaml.{n}" for n in ibaml.__all__ if isinstance(getattr(ibaml, n), ModuleType)}
    assert modules | {"ibaml"} == set(PAGE)


def test_what_a_module_shares_with_ibaml_is_the_same_thing():
    for module, section in PAGE.items():
        for line in re.findall(r"^Also of `ibaml`: .*$", section, re.M):
            for name in named(line):
                assert getattr(import_module(module), name) is getattr(ibaml, name)


def test_every_line_of_the_page_is_read():
    lines = [line for part in PAGE.values() for line in part.splitlines() if line.startswith("- ")]
    assert all(ITEM.fullmatch(line) for line in lines)


def test_everything_public_explains_itself():
    public = [
        (f"{module}.{name}", getattr(import_module(module), name))
        for module, section in PAGE.items()
        for name in named(section)
    ]
    silent = [
        name
        for name, thing in public
        if getattr(thing, "__module__", "").startswith("ibaml") and not thing.__doc__
    ]
    assert not silent


def test_pages_name_only_what_is_public():
    """``ibaml.a.b`` of README and docs, and ``from ibaml.a import b``."""
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        text = page.read_text()
        dotted = set(re.findall(r"(?<![\w/.])ibaml(?:\.[A-Za-z_]\w*)+(?!\w)", text)) - RUN
        dotted = {name for name in dotted if not re.fullmatch(r"ibaml\.(md|toml|py)", name)}
        for module, names in re.findall(r"from (ibaml[\w.]*) import ([\w, ]+)", text):
            dotted |= {f"{module}.{name.strip()}" for name in names.split(",")}
        for name in sorted(dotted):
            assert is_public(name), f"{page.name} names {name}, which is not public (docs/api.md)"


def is_public(dotted: str) -> bool:
    module, rest = "ibaml", dotted.split(".")[1:]
    if rest and f"ibaml.{rest[0]}" in PAGE:
        module, rest = f"ibaml.{rest[0]}", rest[1:]
    if not rest:
        return True
    if rest[0] not in named(PAGE[module]):
        return False
    reduce(getattr, rest, import_module(module))  # its attributes are there
    return True
