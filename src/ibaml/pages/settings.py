"""How were the runs made, and how are they made again?"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from ibaml.assessment import Protocol
from ibaml.fields import fields_of, flag
from ibaml.pages.blocks import Block, Commands, Folded, Table
from ibaml.pages.opened import Opened
from ibaml.pages.words import plain
from ibaml.training.settings import FIELDS

_TELLING = (
    "data", "ways", "shots", "model", "method", "adapt", "posterior", "solver", "steps", "beta",
    "lam", "init_log_var", "temperature", "iterations", "tasks", "meta_lr", "seed",
)  # fmt: skip


def configuration(opened: Sequence[Opened]) -> list[Block]:
    """Settings: the telling ones (several runs: those that differ), then all of them."""
    settings = [asdict(one.run.settings) for one in opened]
    names = [one.name for one in opened]
    if len(opened) > 1:
        differ = [n for n in FIELDS if len({plain(s.get(n)) for s in settings}) > 1]
        telling = differ or list(_TELLING)
        caption = "Settings that differ" if differ else "Settings, the same in all runs"
    else:
        telling = [n for n in _TELLING if settings[0].get(n) is not None]
        caption = "The most telling settings"
    heads = names if len(opened) > 1 else ["value"]
    words = frozenset(range(1, len(heads) + 1))
    blocks: list[Block] = [
        Table(caption, ("setting", *heads),
              [(n, *(plain(s.get(n)) for s in settings)) for n in telling], words=words)
    ]  # fmt: skip
    panels: dict[str, list[str]] = {}
    for name, field in FIELDS.items():
        panels.setdefault(field.panel, []).append(name)
    tables = [
        Table(panel, ("setting", *heads, "meaning"),
              [(n, *(plain(s.get(n)) for s in settings), FIELDS[n].help) for n in members],
              words=frozenset(range(1, len(heads) + 2)))
        for panel, members in panels.items()
    ]  # fmt: skip
    blocks.append(Folded(f"All {len(FIELDS)} settings", tables))
    rows = [(name, *(cells[name] for cells in map(_origin, opened))) for name in _origin(opened[0])]
    blocks.append(Table("Data and origin", ("", *heads), rows, words=words))
    return blocks


def _origin(one: Opened) -> dict[str, str]:
    data, versions = one.run.data, one.origin.get("versions")
    versions = versions if isinstance(versions, dict) else {}
    shape = " × ".join(map(str, data["example_shape"]))
    return {
        "data": str(data["name"]),
        "one input": shape,
        "digest of the data": str(data["digest"])[:16],
        "ibaml": plain(one.origin.get("ibaml")),
        "git revision": plain(one.origin.get("git"))[:16],
        "Python, torch": f"{plain(versions.get('python'))}, {plain(versions.get('torch'))}",
        "system": plain(versions.get("platform")),
        "run folder": str(one.run.path),
    }


def commands(opened: Sequence[Opened], page: str) -> list[Block]:
    """What to type to have all of this again."""
    lines: list[tuple[str, str]] = []
    for one in opened:
        path = str(one.run.path)
        quoted, toml = shlex.quote(path), shlex.quote(f"{path}/config.toml")
        of = f" ({one.name})" if len(opened) > 1 else ""
        if isinstance(command := one.origin.get("command"), str):
            lines.append((f"what was typed to train{of}", _typed(command)))
        again = shlex.quote(f"{path.rstrip('/')}-again")
        lines.append((f"the same training anew{of}", f"ibaml train --config {toml} --out {again}"))
        lines.append((f"judge on test tasks{of}", f"ibaml evaluate {_judged(one, quoted)}"))
    lines.append(("this page", page))
    return [Commands(lines)]


def _typed(command: str) -> str:
    """A recorded command without the place where ibaml was installed."""
    first, space, rest = command.partition(" ")
    name = Path(first).name
    words = {"ibaml": "ibaml", "__main__.py": "python -m ibaml"}
    return f"{words[name]}{space}{rest}" if name in words else command


def _judged(one: Opened, quoted: str) -> str:
    """The arguments of `ibaml evaluate` that differ from its defaults."""
    words = [quoted]
    if one.judged is not None and one.judged.protocol.split == "test":
        for name, field in fields_of(Protocol).items():
            given = getattr(one.judged.protocol, name)
            if name == "device" or given is None or given == field.default:
                continue
            if isinstance(given, bool):
                words.append(flag(name) if given else f"--no-{flag(name)[2:]}")
            else:
                words += [flag(name), shlex.quote(str(given))]
    return " ".join(words)
