"""Does the house stand as CONTRIBUTING.md draws it? Rooms, arrows, private names, long files.

The table of rooms in CONTRIBUTING.md is the source of truth: a file belongs to the row that names
its module or folder, and imports point down the rows only. Files are read, never imported.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src"
LINES = 450  # no file is longer
ENTRANCES = {"ibaml", "ibaml.__main__", "ibaml._version"}  # the package itself: no room

# What stands against the rules today, each with its reason. These lists only get shorter.
LONG: set[str] = set()
UPWARD = {  # (module, module it imports): why
    (
        "ibaml.learner.meta_learner",
        "ibaml.artifact",
    ): "learner.save(path)",
    ("ibaml.posterior", "ibaml.artifact"): "posterior.save(path) likewise",
    ("ibaml.posterior", "ibaml.deploy"): "posterior.module() likewise",
    ("ibaml.posterior", "ibaml.learner"): "a type alone: a posterior holds its learner",
}
LOADED_UPWARD: set[tuple[str, str]] = set()  # and not inside a function
PRIVATE: dict[tuple[str, str], str] = {}  # (module, name it imports): why


@dataclass(frozen=True)
class Import:
    """One name that a file imports: ``module`` is the file that holds it."""

    importer: str
    line: int
    module: str
    name: str
    when: str  # "loaded", "called" (inside a function) or "checked" (by a type checker alone)

    def __str__(self) -> str:
        path = FILES[self.importer].relative_to(ROOT)
        return f"{path}:{self.line} imports {self.name} of {self.module} ({self.when})"


def module_of(path: Path, source: Path = SOURCE) -> str:
    return ".".join(path.relative_to(source).with_suffix("").parts).removesuffix(".__init__")


FILES = {module_of(path): path for path in sorted(SOURCE.rglob("*.py"))}


def rooms() -> list[list[str]]:
    """The rows of CONTRIBUTING.md's table, top row first: the modules and folders of each."""
    table = re.search(r"^\| room \| question \|\n\|.*\n((?:\|.*\n)+)", PAGE, re.MULTILINE)
    assert table, "CONTRIBUTING.md has no table of rooms"
    rows = [row.split("|")[1] for row in table[1].splitlines()]
    return [[f"ibaml.{name}" for name in re.findall(r"`([\w.]+)`", row)] for row in rows]


PAGE = (ROOT / "CONTRIBUTING.md").read_text()
ROOMS = rooms()


def within(module: str, room: str) -> bool:
    return module == room or module.startswith(f"{room}.")


def row_of(module: str) -> int | None:
    """How far down the table; None for the package's entrances."""
    rows = [at for at, row in enumerate(ROOMS) if any(within(module, room) for room in row)]
    return rows[0] if rows else None


def room_of(module: str) -> str:
    return next((room for row in ROOMS for room in row if within(module, room)), module)


def holder(package: str, name: str) -> str:
    """The file that ``from package import name`` needs: a submodule, or for ``ibaml`` itself, whose
    names are imported when they are asked for, where the name comes from."""
    if f"{package}.{name}" in FILES:
        return f"{package}.{name}"
    if package == "ibaml":
        for node in ast.walk(ast.parse(FILES["ibaml"].read_text())):
            if isinstance(node, ast.ImportFrom) and node.module not in (None, "ibaml"):
                names = {alias.asname or alias.name for alias in node.names}
                package = node.module if name in names and node.module else package
    return package


def imports(module: str, text: str) -> Iterator[Import]:
    """All imports of the package's own names in a file's text."""

    def visit(node: ast.AST, when: str) -> Iterator[Import]:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            when = "called"
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for child in node.body:
                yield from visit(child, "checked")
            for child in node.orelse:
                yield from visit(child, when)
            return
        if isinstance(node, ast.ImportFrom):
            assert not node.level, f"{module}:{node.lineno}: a relative import"
            if node.module and within(node.module, "ibaml"):
                for alias in node.names:
                    where = holder(node.module, alias.name)
                    yield Import(module, node.lineno, where, alias.name, when)
        if isinstance(node, ast.Import):
            for alias in node.names:
                if within(alias.name, "ibaml"):
                    yield Import(module, node.lineno, alias.name, alias.name, when)
        for child in ast.iter_child_nodes(node):
            yield from visit(child, when)

    yield from visit(ast.parse(text), "loaded")


IMPORTS = [one for module, path in FILES.items() for one in imports(module, path.read_text())]


def listed(problems: list[str]) -> str:
    return "".join(f"\n  {problem}" for problem in problems)


def test_every_file_belongs_to_one_room_of_the_table():
    names = [room for row in ROOMS for room in row]
    assert len(names) == len(set(names)), "a room stands in the table twice"
    empty = [room for room in names if not any(within(module, room) for module in FILES)]
    homeless = [m for m in FILES if m not in ENTRANCES and row_of(m) is None]
    assert not empty + homeless, (
        f"rooms without a file: {listed(empty)}\nfiles without a room: {listed(homeless)}"
    )


def upward(one: Import) -> bool:
    """Whether an import points up the table. Nothing imports the package's entrance by itself."""
    here, there = row_of(one.importer), row_of(one.module)
    if one.importer in ENTRANCES or one.module == "ibaml._version":
        return False
    return there is None or here is None or there < here


def test_imports_point_down_the_table():
    wrong = [i for i in IMPORTS if upward(i) and (i.importer, i.module) not in UPWARD]
    assert not wrong, listed([str(i) for i in wrong])


def test_what_points_up_is_not_loaded_with_its_file():
    loaded = {(i.importer, i.module) for i in IMPORTS if upward(i) and i.when == "loaded"}
    assert loaded <= LOADED_UPWARD, listed([str(pair) for pair in loaded - LOADED_UPWARD])


def test_no_room_imports_private_names_of_another():
    def private(one: Import) -> bool:
        words = [*one.module.split("."), *one.name.split(".")]
        return any(word.startswith("_") and not word.startswith("__") for word in words)

    wrong = [
        one
        for one in IMPORTS
        if private(one)
        and room_of(one.importer) != room_of(one.module)
        and one.module != "ibaml._version"
        and (one.importer, one.name) not in PRIVATE
    ]
    assert not wrong, listed([str(i) for i in wrong])


def test_no_file_needs_itself_to_be_loaded():
    graph: dict[str, set[str]] = {module: set() for module in FILES}
    for one in IMPORTS:
        if one.when == "loaded" and one.module in FILES:
            graph[one.importer].add(one.module)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"a cycle of imports: {' <- '.join(error.args[1])}")


def test_no_file_is_longer_than_a_person_reads_at_once():
    lengths = {
        path.relative_to(ROOT).as_posix(): len(path.read_text().splitlines())
        for path in FILES.values()
    }
    long = {f"{path}: {length} lines" for path, length in lengths.items() if length > LINES}
    assert {text.split(":")[0] for text in long} <= LONG, listed(sorted(long))


def test_the_exceptions_are_needed():
    """An exception that nothing needs any more is removed from its list."""
    up = {(i.importer, i.module) for i in IMPORTS if upward(i)}
    assert set(UPWARD) >= LOADED_UPWARD
    assert set(UPWARD) <= up, listed([str(pair) for pair in set(UPWARD) - up])
    known = {(i.importer, i.name) for i in IMPORTS}
    assert set(PRIVATE) <= known, listed([str(pair) for pair in set(PRIVATE) - known])
    for path in LONG:
        assert (ROOT / path).exists(), f"{path} is gone"
        assert len((ROOT / path).read_text().splitlines()) > LINES, f"{path} is short now"


def test_an_import_is_seen_wherever_it_stands():
    text = (
        "from typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n    from ibaml.learner import MetaLearner\n"
        "import ibaml.cli.screen\n"
        "class A:\n    def f(self):\n        from ibaml import linalg\n"
        "        from ibaml.solve import base as b\n"
    )
    seen = [(i.module, i.name, i.when) for i in imports("ibaml.nn.mlp", text)]
    assert seen == [
        ("ibaml.learner", "MetaLearner", "checked"),
        ("ibaml.cli.screen", "ibaml.cli.screen", "loaded"),
        ("ibaml.linalg", "linalg", "called"),
        ("ibaml.solve.base", "base", "called"),
    ]
    assert all(upward(i) for i in imports("ibaml.nn.mlp", text))
    assert not any(upward(i) for i in imports("ibaml.cli.train", text))
