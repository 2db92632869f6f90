"""How good are the runs, and can their confidence be trusted?"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence

import numpy as np

from ibaml.assessment import Stored, differences
from ibaml.evaluation import ClassScores, Interval, RegressionScores, Scores, reliability
from ibaml.pages.blocks import Block, Card, Cards, Commands, Figure, Key, Side, Table, Text
from ibaml.pages.drawing import drawn
from ibaml.pages.opened import Opened, incomparable
from ibaml.pages.words import (
    METHODS,
    METRICS,
    count,
    metric_name,
    percent,
    span,
    value,
    with_interval,
)
from ibaml.report.charts import (
    coverage_chart,
    intervals_chart,
    reliability_chart,
    spread_chart,
)
from ibaml.report.figure import line_names

_SHARES = (1.0, 0.95, 0.9, 0.8, 0.5)  # of the queries that are answered, in a table


def tasks_of(judged: Stored) -> str:
    """Which tasks: "1,000 test tasks"."""
    main = main_scores(judged)
    words = {"val": "validation"}.get(judged.protocol.split, judged.protocol.split)
    text = count(main.distinct, f"{words} task")
    return text if main.groups is None else f"{text} ({len(main.keys):,} draws)"


def main_scores(judged: Stored) -> Scores:
    return next(iter(judged.scores.values()))


def lead(one: Opened) -> str:
    """The result of a run in a sentence."""
    settings, judged = one.run.settings, one.judged
    method = METHODS.get(settings.method, settings.method)
    if judged is None:
        return f"{method} on {one.run.data['name']}; it was not judged."
    summary, shots = main_scores(judged).summary(), judged.protocol.shots or settings.shots or 0
    if "accuracy" in summary:
        ways = judged.protocol.ways or settings.ways or 0
        accuracy = summary["accuracy"]
        return (
            f"From {count(shots, 'example')} of each of {ways} classes that it never saw, {method} "
            f"names {value('accuracy', accuracy.value)} of new examples rightly "
            f"({tasks_of(judged)}; 95 % interval {span('accuracy', accuracy)})."
        )
    rmse, inside = summary["rmse"], summary["coverage"]
    of = "" if judged.target is None else f" of {judged.target}"
    return (
        f"From {count(shots, 'example')} of a task that it never saw, {method} is off by "
        f"{value('rmse', rmse.value)} (RMSE{of}; {tasks_of(judged)}; 95 % interval "
        f"{span('rmse', rmse)}), and {value('coverage', inside.value)} of the targets lie in its "
        "95 % intervals."
    )


def leads(opened: Sequence[Opened]) -> str:
    """Which of several runs is ahead, in a sentence."""
    if incomparable(opened) is not None:
        return ""
    scores = {one.name: main_scores(one.judged) for one in opened if one.judged is not None}
    summaries = {name: one.summary() for name, one in scores.items()}
    metric = "accuracy" if "accuracy" in next(iter(summaries.values())) else "rmse"
    better = -1 if metric == "accuracy" else 1
    best, second, *_ = sorted(summaries, key=lambda name: better * summaries[name][metric].value)
    gap = differences({second: scores[second], best: scores[best]})[best][metric]
    assert opened[0].judged is not None
    said = metric_name(metric, opened[0].judged.target)
    ahead = f"{best} is ahead with {value(metric, summaries[best][metric].value)} ({said})"
    if gap.low <= 0 <= gap.high:
        return f"{ahead}, but not so far that the choice of tasks could not explain it."
    return f"{ahead}; its difference from {second} is {with_interval(metric, gap, '+')}."


def results(opened: Sequence[Opened]) -> list[Block]:
    """Cards for a single run, the table of figures, paired differences."""
    blocks: list[Block] = [Text(p, "warn") for one in opened for p in _named(one, opened)]
    judged = [(one, one.judged) for one in opened if one.judged is not None]
    if not judged:
        return [*blocks, Text("There are no figures to show.", "note")]
    first = judged[0][1]
    if len(opened) == 1:
        blocks.append(_cards(first))
    if first.protocol.split == "val":
        text = (
            "These are validation tasks. The kept weights were chosen on such tasks, so that new "
            "ones may do a little worse. To judge on test tasks, and then write this page again:"
        )
        paths = [shlex.quote(str(one.run.path)) for one, _ in judged]
        blocks.append(Text(text, "note"))
        blocks.append(Commands([("", f"ibaml evaluate {path}") for path in paths]))
    for one, stored in judged:
        if stored.data not in ("", one.run.data["name"]):
            blocks.append(Text(f"{one.name} was judged on {stored.data}.", "note"))
    rows = []
    metrics = list(main_scores(first).summary())
    for one, stored in judged:
        for protocol, scores in stored.scores.items():
            words = [one.name] if len(opened) > 1 else []
            label = ", ".join([*words, *([protocol] if protocol else [])]) or tasks_of(stored)
            summary = scores.summary()
            cells = (with_interval(m, summary[m]) if m in summary else "–" for m in metrics)
            rows.append((label, *cells))
    heads = [metric_name(m, first.target) for m in metrics]
    blocks.append(Table(f"Figures with 95 % intervals over {tasks_of(first)}", ("", *heads), rows))
    meanings = ". ".join(f"{metric_name(m, first.target)}: {METRICS[m].meaning}" for m in metrics)
    blocks.append(Text(f"{meanings}.", "quiet"))
    for one, stored in judged:
        lost = max(stored.diverged.values(), default=0)
        if lost:
            which = "" if len(opened) == 1 else f" of {one.name}"
            text = f"Adaptation{which} diverged in {count(lost, 'task')}: there the prior predicts."
            blocks.append(Text(text, "warn"))
    if len(opened) > 1:
        blocks += _differences(opened)
    return blocks


def _named(one: Opened, opened: Sequence[Opened]) -> list[str]:
    return [p if len(opened) == 1 else f"{one.name}: {p}" for p in one.problems]


def _cards(judged: Stored) -> Cards:
    summary = main_scores(judged).summary()
    metrics = [m for m in ("accuracy", "rmse", "nll", "ece", "coverage") if m in summary]
    return Cards(
        [
            Card(
                metric_name(m, judged.target), value(m, summary[m].value),
                f"95 % interval {span(m, summary[m])}",
            )
            for m in metrics
        ]
    )  # fmt: skip


def _differences(opened: Sequence[Opened]) -> list[Block]:
    """Each run minus the first, task by task."""
    if (why := incomparable(opened)) is not None:
        return [Text(f"There are no paired differences: {why}.", "note")]
    scores = {one.name: main_scores(one.judged) for one in opened if one.judged is not None}
    found = differences(scores)
    first, metrics = opened[0], list(next(iter(found.values())))
    target = None if first.judged is None else first.judged.target
    rows = [(name, *(_starred(m, d[m]) for m in metrics)) for name, d in found.items()]
    heads = [metric_name(m, target) for m in metrics]
    table = Table(f"Minus {first.name}, task by task", ("", *heads), rows)
    main = "accuracy" if "accuracy" in metrics else "rmse"
    picked = [d[main] for d in found.values()]
    figure = Figure(
        f"Difference in {metric_name(main, target)} from {first.name}",
        drawn(
            lambda: intervals_chart(picked, METRICS[main].name, main == "accuracy"),
            "differences", f"Difference in {METRICS[main].name} from the first run",
        ),
        "A line that does not cross 0 is a difference that the choice of tasks does not explain.",
        Table(f"Difference in {metric_name(main, target)}", ("", "difference"),
              [(n, with_interval(main, d[main], "+")) for n, d in found.items()], folded=True),
        legend=keys(["", *(f"{i}: {n}" for i, n in enumerate(found, start=2))], dashes=False)[1:],
    )  # fmt: skip
    text = "A star marks a difference whose interval excludes 0. The tasks are the same for all."
    return [table, Text(text, "quiet"), figure]


def _starred(metric: str, interval: Interval) -> str:
    star = " *" if interval.low > 0 or interval.high < 0 else ""
    return with_interval(metric, interval, "+") + star


def keys(names: Sequence[str], dashes: bool = True) -> tuple[Key, ...]:
    """A legend in the colors of `line_styles`."""
    return tuple(
        Key(color, dash if dashes else "-", name)
        for name, (color, dash) in zip(names, line_names(), strict=False)
    )


def classes_of(opened: Sequence[Opened]) -> dict[str, ClassScores]:
    """The main scores of classification by the name of the run."""
    found = {o.name: main_scores(o.judged) for o in opened if o.judged is not None}
    return {n: s for n, s in found.items() if isinstance(s, ClassScores)}


def confidence(opened: Sequence[Opened]) -> list[Block]:
    """Reliability of each run, and accuracy against coverage of all."""
    found = classes_of(opened)
    if not found:
        return _intervals_hold(opened)
    blocks: list[Block] = []
    if len(found) == 1:
        blocks.append(Text(_how_sure(next(iter(found.values())))))
    figures: list[Block] = [
        _reliability(scores, name if len(found) > 1 else "", f"reliability-{at}")
        for at, (name, scores) in enumerate(found.items())
    ]
    return [*blocks, Side([*figures, _coverage(found)])]


def _how_sure(scores: ClassScores) -> str:
    said, right = float(scores.confidence.mean()), float(scores.correct.mean())
    gap = said - right
    if abs(gap) < 0.01:
        verdict = "it is as sure as it should be, on average"
    else:
        verdict = f"it is too {'sure' if gap > 0 else 'unsure'} by {100 * abs(gap):.1f} points"
    coverage, accuracy = scores.selective(100)
    eighty = float(accuracy[np.searchsorted(coverage, 0.8 - 1e-9)])
    return (
        f"Its answers have a confidence of {value('accuracy', said)} on average, and "
        f"{value('accuracy', right)} are right: {verdict}. Of the surest four fifths of its "
        f"answers {value('accuracy', eighty)} are right."
    )


def _reliability(scores: ClassScores, name: str, at: str) -> Figure:
    diagram = reliability(scores.bins().sum(0))
    bins = len(diagram.count) - 1
    rows = []
    for i, count_ in enumerate(diagram.count.tolist()):
        if count_:
            ends = f"{100 * i / bins:.0f} to {percent((i + 1) / bins)}" if i < bins else percent(1)
            rows.append(
                (ends, f"{int(count_):,}", value("accuracy", float(diagram.confidence[i])),
                 value("accuracy", float(diagram.accuracy[i])))
            )  # fmt: skip
    title = f"Reliability{f' of {name}' if name else ''}"
    return Figure(
        title,
        drawn(
            lambda: reliability_chart(scores), at, "Accuracy against confidence in bins"
        ),
        "The bars are how often answers of a confidence were right. Where they end below the "
        "dashed line, it was too sure (red); above it, it was surer to be right than it said "
        "(blue). Below: how often each confidence occurs.",
        Table(title, ("confidence", "answers", "mean confidence", "right"), rows, folded=True),
        legend=(Key("blue", "bar", "right"), Key("red", "bar", "too sure by"),
                Key("blue", "full", "too unsure by")),
    )  # fmt: skip


def _coverage(found: Mapping[str, ClassScores]) -> Figure:
    rows = []
    for share in _SHARES:
        cells = []
        for scores in found.values():
            coverage, accuracy = scores.selective(100)
            place = int(np.searchsorted(coverage, share - 1e-9))
            cells.append(value("accuracy", float(accuracy[place])))
        rows.append((percent(share), *cells))
    heads = list(found) if len(found) > 1 else ["right"]
    return Figure(
        "Accuracy when the least sure are left out",
        drawn(
            lambda: coverage_chart(list(found.values())), "coverage",
            "Accuracy of the answers against the share of queries that are answered",
        ),
        "To the left fewer queries are answered, the surest ones. A line that falls to the right "
        "says that confidence tells good answers from bad.",
        Table("Accuracy by the share answered", ("answered", *heads), rows, folded=True),
        legend=keys(list(found)) if len(found) > 1 else (),
    )  # fmt: skip


def _intervals_hold(opened: Sequence[Opened]) -> list[Block]:
    """Regression: do 95 % intervals hold 95 %?"""
    rows, lines = [], []
    for one in opened:
        if one.judged is None or not isinstance(
            scores := main_scores(one.judged), RegressionScores
        ):
            continue
        inside = scores.summary()["coverage"]
        rows.append((one.name, with_interval("coverage", inside)))
        verdict = "as many as there should be"
        if inside.high < 0.95:
            verdict = "too few: its intervals are too narrow"
        elif inside.low > 0.95:
            verdict = "too many: its intervals are too wide"
        lines.append(f"{value('coverage', inside.value)} of the targets lie in its 95 % intervals, "
                     f"{verdict}.")  # fmt: skip
    if len(rows) > 1:
        return [Table("Targets inside the 95 % predictive interval", ("", "inside"), rows)]
    return [Text(line) for line in lines]


def spread(opened: Sequence[Opened]) -> Figure | None:
    """How the main figure varies over tasks."""
    found = {o.name: main_scores(o.judged) for o in opened if o.judged is not None}
    if not found:
        return None
    metric = "accuracy" if isinstance(next(iter(found.values())), ClassScores) else "rmse"
    target = next(o.judged.target for o in opened if o.judged is not None)
    values = [_by_task(scores) for scores in found.values()]
    rows = [
        (name, *(value(metric, float(np.quantile(one, q))) for q in (0.0, 0.1, 0.5, 0.9, 1.0)))
        for name, one in zip(found, values, strict=True)
    ]
    name = metric_name(metric, target)
    return Figure(
        f"{name[0].upper()}{name[1:]} over tasks",
        drawn(
            lambda: spread_chart(values, f"{METRICS[metric].name} of a task", metric == "accuracy"),
            "spread", f"Histogram of {METRICS[metric].name} over tasks",
        ),
        "Tasks differ: one new task will be like one of these; the interval is of the mean alone.",
        Table(f"{name} of a task", ("", "lowest", "10 % below", "middle", "90 % below", "highest"),
              rows, folded=True),
        legend=keys(list(found)) if len(found) > 1 else (),
    )  # fmt: skip


def _by_task(scores: Scores) -> np.ndarray:
    if isinstance(scores, ClassScores):
        return np.asarray(scores.correct.mean(1))
    return np.asarray(np.sqrt(scores.mse))
