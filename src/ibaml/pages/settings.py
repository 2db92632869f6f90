"""How were the runs made, what did training show, and how are they made again?"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from ibaml.extras import missing
from ibaml.pages.blocks import Block, Commands, Figure, Folded, Key, Points, Side, Table, Text
from ibaml.pages.log import Curve
from ibaml.pages.opened import DOCTOR, Opened
from ibaml.pages.results import keys
from ibaml.pages.words import METRICS, count, duration, number, plain, value
from ibaml.report.charts import curves
from ibaml.report.inline import inline_svg
from ibaml.training.settings import FIELDS

_TELLING = (
    "data", "ways", "shots", "model", "method", "adapt", "posterior", "solver", "steps", "beta",
    "lam", "init_log_var", "temperature", "iterations", "tasks", "meta_lr", "seed",
)  # fmt: skip
_NOTES = 12  # of a log


# --- how training went ---------------------------------------------------------------------------


def learning(opened: Sequence[Opened]) -> list[Block]:
    """Training loss and validation, with their tables."""
    trained = [one for one in opened if one.log.training.at or one.log.validation]
    if not trained:
        return [
            Text(
                "Nothing was logged: a run of 0 iterations takes its network in closed form, or "
                f"{'their' if len(opened) > 1 else 'its'} log is missing."
            )
        ]
    blocks: list[Block] = [Text(_course(one, len(opened) > 1)) for one in trained]
    figures: list[Block] = [_curve(trained, "nll")]
    for metric in ("accuracy", "rmse"):
        if any(metric in one.log.validation for one in trained):
            figures.append(_curve(trained, metric))
    blocks.append(Side(figures))
    for one in trained:
        if one.log.notes:
            title = f"What {one.name} noted" if len(opened) > 1 else "What the run noted"
            blocks.append(Folded(title, [Points("", one.log.notes[-_NOTES:])]))
    return blocks


def _course(one: Opened, named: bool) -> str:
    log = one.log
    parts = []
    if log.training.at:
        begin, end = log.training.values[0], log.training.values[-1]
        parts.append(
            f"{count(int(log.training.at[-1]), 'meta-iteration')} in {duration(log.seconds)}; the "
            f"training loss went from {number(begin)} to {number(end)}"
        )
    if log.best is not None and "nll" in log.validation:
        nll = min(log.validation["nll"].values)
        parts.append(
            f"the best validation nll, {number(nll)}, is of iteration {log.best:,} (ringed)"
        )
    out, total = log.left_out
    if total:
        parts.append(
            "no logged task was left out" if not out else
            f"{out:,} of {total:,} logged tasks were left out, because adaptation diverged"
        )  # fmt: skip
    if (unsolved := log.last.get("unsolved")) is not None and isinstance(unsolved, int | float):
        parts.append(f"at the end {100 * unsolved:.0f} % of linear systems were unsolved")
    text = "; ".join(parts) + "."
    return f"{one.name}: {text}" if named else f"{text[:1].upper()}{text[1:]}"


def _curve(trained: Sequence[Opened], metric: str) -> Figure:
    losses = [o.log.training.thinned() if metric == "nll" else Curve((), ()) for o in trained]
    checks = [o.log.validation.get(metric, Curve((), ())).thinned() for o in trained]
    name = METRICS[metric].name
    svg = None
    if missing("matplotlib") is None:
        drawn = curves(
            f"loss, validation {name}" if metric == "nll" else f"validation {name}",
            [(c.at, c.values) for c in checks],
            [(c.at, c.values) for c in losses],
            [o.log.best for o in trained],
            share=METRICS[metric].percent,
        )
        svg = inline_svg(drawn, f"curve-{metric}", f"Curves of {name} over training")
    rows = [
        (label, f"{int(step):,}", value(metric, v))
        for o, curve in zip(trained, checks, strict=True)
        for label in [o.name]
        for step, v in _some(curve)
    ]
    one = len(trained) == 1
    legend = keys([o.name for o in trained])
    if one and metric == "nll":
        legend = (Key("blue", "-", "validation"), Key("blue", ":", "training loss, its running median"))
    return Figure(
        "Loss" if metric == "nll" else f"Validation {name}",
        svg,
        "Dots are validations; the ring is where the kept weights are from."
        + (" Dotted: the training loss, pale where it is not smoothed." if metric == "nll" else ""),
        Table(
            f"Validation {name}", ("run", "iteration", name), rows, words=frozenset(), folded=True
        ),
        legend=() if one and metric != "nll" else legend,
    )


def _some(curve: Curve, most: int = 12) -> list[tuple[float, float]]:
    """A few points of a curve, the first and the last among them."""
    points = list(zip(curve.at, curve.values, strict=True))
    step = max(1, -(-len(points) // most))
    return points if len(points) <= most else [*points[:-1:step], points[-1]]


# --- the doctor ----------------------------------------------------------------------------------


def doctors(opened: Sequence[Opened]) -> list[Block]:
    """The verdict of `ibaml doctor`, or the command that makes it."""
    blocks: list[Block] = []
    for one in opened:
        prefix = f"{one.name}: " if len(opened) > 1 else ""
        if one.doctor is None:
            command = f"ibaml doctor {shlex.quote(str(one.run.path))}"
            blocks.append(Text(f"{prefix}not examined yet. This examines it, and writes {DOCTOR}:"))
            blocks.append(Commands([("measures gradients, solutions and calibration", command)]))
            continue
        verdict = str(one.doctor.get("verdict") or "There is no verdict.")
        healthy = one.doctor.get("setting") in (None, "", [])
        blocks.append(Text(f"{prefix}{verdict}", "good" if healthy else "warn"))
        if not healthy:
            blocks.append(Text(f"The setting to change: {_said(one.doctor['setting'])}"))
        rows = _flat({k: v for k, v in one.doctor.items() if k not in ("verdict", "setting")})
        if rows:
            title = f"What the doctor measured{f' of {one.name}' if prefix else ''}"
            blocks.append(Table(title, ("", "value"), rows, words=frozenset({1}), folded=True))
    return blocks


def _flat(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    rows: list[tuple[str, str]] = []
    for name, found in values.items():
        label = f"{prefix}{name}"
        if isinstance(found, Mapping):
            rows += _flat(found, f"{label} · ")
        else:
            rows.append((label, _said(found)))
    return rows


def _said(found: Any) -> str:
    if isinstance(found, list | tuple):
        return ", ".join(_said(one) for one in found) or "–"
    if isinstance(found, Mapping):
        return ", ".join(f"{name} {_said(one)}" for name, one in found.items())
    return number(found, 4) if isinstance(found, float) else plain(found)


# --- configuration -------------------------------------------------------------------------------


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
            lines.append((f"what was typed to train{of}", command))
        again = shlex.quote(f"{path.rstrip('/')}-again")
        lines.append((f"the same training anew{of}", f"ibaml train --config {toml} --out {again}"))
        lines.append((f"judge on test tasks{of}", f"ibaml evaluate {_judged(one, quoted)}"))
    lines.append(("this page", page))
    return [Commands(lines)]


def _judged(one: Opened, quoted: str) -> str:
    """The arguments of `ibaml evaluate` that differ from its defaults."""
    words = [quoted]
    if one.judged is not None and one.judged.protocol.split == "test":
        from ibaml.assessment import Protocol
        from ibaml.fields import flag, fields_of

        for name, field in fields_of(Protocol).items():
            given = getattr(one.judged.protocol, name)
            if name == "device" or given is None or given == field.default:
                continue
            if isinstance(given, bool):
                words.append(flag(name) if given else f"--no-{flag(name)[2:]}")
            else:
                words += [flag(name), shlex.quote(str(given))]
    return " ".join(words)
