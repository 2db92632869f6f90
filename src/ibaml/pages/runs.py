"""Which sections has the page of one run, or of several side by side?"""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from ibaml.evaluation import ClassScores
from ibaml.pages.blocks import Block, Folded, Page, Section, Side, Text
from ibaml.pages.opened import Opened, incomparable
from ibaml.pages.prior import prior_blocks
from ibaml.pages.results import confidence, lead, main_scores, results, spread
from ibaml.pages.settings import commands, configuration, doctors, learning
from ibaml.pages.tasks import hardest_classes, hardest_table, nothing_to_show, shown
from ibaml.tasks import EpisodeTasks
from ibaml.training.build import build_network


def runs_page(opened: Sequence[Opened]) -> Page:
    """The page of these runs."""
    several = len(opened) > 1
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
        return Page(title, f"{len(opened)} training runs side by side", "", sections)
    return Page(opened[0].name, "A training run", lead(opened[0]), sections)


def _tasks(opened: Sequence[Opened]) -> list[Block]:
    judged = [(one, one.judged) for one in opened if one.judged is not None]
    if not judged:
        return [nothing_to_show()]
    blocks: list[Block] = []
    spread_figure = spread(opened)
    if spread_figure is not None:
        blocks.append(spread_figure)
    same = incomparable(opened) is None if len(opened) > 1 else True
    groups = [judged] if same else [[pair] for pair in judged]
    for group in groups:
        one, stored = group[0]
        scores = [main_scores(s) for _, s in group]
        names = [o.name for o, _ in group]
        split = stored.protocol.split
        if not same:
            blocks.append(Text(f"{one.name}:"))
        if isinstance(one.source, EpisodeTasks) and isinstance(scores[0], ClassScores):
            worst = hardest_classes(scores[0], one.source, split)
            if worst is not None and len(group) == 1:
                blocks.append(worst)
        blocks.append(hardest_table(scores, names, one.source, split, stored.target))
    for at, (one, stored) in enumerate(judged):
        if one.learner is None or one.source is None:
            continue
        tasks = shown(one.learner, one.source, stored.protocol, main_scores(stored), f"run-{at}")
        if len(opened) > 1:
            blocks.append(Folded(f"Tasks as {one.name} answers them", tasks))
        elif all(block.kind == "figure" for block in tasks):
            blocks.append(Side(tasks))
        else:
            blocks += tasks
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
