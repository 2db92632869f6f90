"""Which sections has the page of one run, or of several side by side?"""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from ibaml.evaluation import ClassScores
from ibaml.pages.blocks import Block, Folded, Page, Section, Side, Table, Text
from ibaml.pages.doctor import doctors
from ibaml.pages.learning import learning
from ibaml.pages.opened import Opened, incomparable
from ibaml.pages.prior import prior_blocks
from ibaml.pages.results import confidence, lead, leads, main_scores, results, spread
from ibaml.pages.settings import commands, configuration
from ibaml.pages.tasks import hardest_classes, hardest_table, nothing_to_show, shown
from ibaml.tasks import EpisodeTasks
from ibaml.tasks.errors import DataError
from ibaml.training.build import build_network


def runs_page(opened: Sequence[Opened]) -> Page:
    """The page of these runs."""
    several = len(opened) > 1
    if len({one.run.settings.regression for one in opened}) > 1:
        kinds = ", ".join(
            f"{one.name} {'regression' if one.run.settings.regression else 'classes'}"
            for one in opened
        )
        raise DataError(f"the runs are of two kinds ({kinds}): each kind needs a page of its own")
    words = " ".join(shlex.quote(str(one.run.path)) for one in opened)
    sections = [
        Section("Results", results(opened)),
        Section("Doctor", doctors(opened)),
        Section("Confidence", confidence(opened)),
        Section("Tasks", _tasks(opened)),
        Section("Learning curves", learning(opened)),
        Section("What the prior learned", _priors(opened)),
        Section("Configuration", configuration(opened)),
        Section("Do it again", commands(opened, f"ibaml report {words}")),
    ]
    if several:
        names = [one.name for one in opened]
        title = f"{', '.join(names[:-1])} and {names[-1]}"
        return Page(title, f"{len(opened)} training runs side by side", leads(opened), sections)
    return Page(opened[0].name, "A training run", lead(opened[0]), sections)


def _tasks(opened: Sequence[Opened]) -> list[Block]:
    """How tasks differ, the hardest ones and classes, and answers in some."""
    judged = [(one, one.judged) for one in opened if one.judged is not None]
    if not judged:
        return [nothing_to_show()]
    beside: list[Block] = [] if (histogram := spread(opened)) is None else [histogram]
    tables: list[Table] = []
    same = len(opened) == 1 or incomparable(opened) is None
    for group in [judged] if same else [[pair] for pair in judged]:
        one, stored = group[0]
        scores = [main_scores(s) for _, s in group]
        split, named = stored.protocol.split, "" if same else f" ({one.name})"
        if isinstance(one.source, EpisodeTasks) and isinstance(scores[0], ClassScores):
            beside += hardest_classes(scores, [o.name for o, _ in group], one.source, split, named)
        tables.append(
            hardest_table(
                scores, [o.name for o, _ in group], one.source, split, stored.target, named
            )
        )
    wide = tables[0].folded  # with the names of classes
    blocks: list[Block] = [Side(beside), *tables] if wide else [Side([*beside, *tables])]
    for at, (one, stored) in enumerate(judged):
        if one.learner is None or one.source is None:
            continue
        tasks = shown(one.learner, one.source, stored.protocol, main_scores(stored), f"run-{at}")
        if len(opened) > 1:
            blocks.append(Folded(f"Tasks as {one.name} answers them", tasks))
        else:
            blocks += [Side(tasks)] if tasks[0].kind != "episode" else tasks
    if all(one.source is None for one in opened):
        blocks.append(nothing_to_show())
    return blocks


def _priors(opened: Sequence[Opened]) -> list[Block]:
    blocks: list[Block] = []
    for at, one in enumerate(opened):
        if one.learner is None:
            continue
        settings = one.run.settings
        start = build_network(settings, tuple(int(n) for n in one.run.data["example_shape"]))
        found = prior_blocks(one.learner, start, settings.init_log_var, f"prior-{at}")
        blocks += [Folded(one.name, found)] if len(opened) > 1 else found
    return blocks or [Text("There are no weights to look at.", "quiet")]
