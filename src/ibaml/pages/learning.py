"""What did training show? Its curves, where the kept weights are from, what the run noted."""

from __future__ import annotations

from collections.abc import Sequence

from ibaml.pages.blocks import Block, Figure, Folded, Key, Points, Side, Table, Text
from ibaml.pages.drawing import drawn
from ibaml.pages.log import Curve
from ibaml.pages.opened import Opened
from ibaml.pages.results import keys
from ibaml.pages.words import METRICS, count, duration, number, percent, value
from ibaml.report.charts import curves

_NOTES = 12  # of a log


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
    if any(one.log.training.at for one in trained):  # else a network in closed form, and one point
        metrics = [m for m in ("accuracy", "rmse") if any(m in o.log.validation for o in trained)]
        blocks.append(Side([_curve(trained, metric) for metric in ("nll", *metrics)]))
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
    else:
        parts.append("nothing was trained step by step: the network is in closed form")
    if log.best is not None and "nll" in log.validation:
        nll = min(log.validation["nll"].values)
        ringed = " (ringed)" if log.training.at else ""
        parts.append(
            f"the best validation nll, {number(nll)}, is of iteration {log.best:,}{ringed}"
        )
    out, total = log.left_out
    if total:
        parts.append(
            "no logged task was left out" if not out else
            f"{out:,} of {total:,} logged tasks were left out, because adaptation diverged"
        )  # fmt: skip
    if (unsolved := log.last.get("unsolved")) is not None and isinstance(unsolved, int | float):
        parts.append(f"at the end {percent(unsolved)} of linear systems were unsolved")
    text = "; ".join(parts) + "."
    return f"{one.name}: {text}" if named else f"{text[:1].upper()}{text[1:]}"


def _curve(trained: Sequence[Opened], metric: str) -> Figure:
    losses = [o.log.training.thinned() if metric == "nll" else Curve((), ()) for o in trained]
    checks = [o.log.validation.get(metric, Curve((), ())).thinned() for o in trained]
    name = METRICS[metric].name
    svg = drawn(
        lambda: curves(
            f"loss, validation {name}" if metric == "nll" else f"validation {name}",
            [(c.at, c.values) for c in checks],
            [(c.at, c.values) for c in losses],
            [o.log.best for o in trained],
            share=METRICS[metric].percent,
        ),
        f"curve-{metric}",
        f"Curves of {name} over training",
    )
    rows = [
        (label, f"{int(step):,}", value(metric, v))
        for o, curve in zip(trained, checks, strict=True)
        for label in [o.name]
        for step, v in _some(curve)
    ]
    one = len(trained) == 1
    legend = keys([o.name for o in trained])
    if one and metric == "nll":
        legend = (
            Key("blue", "-", "validation"),
            Key("blue", ":", "training loss, its running median"),
        )
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
