"""Which tasks are easy and which are hard, and what does the learner answer in them?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from ibaml.assessment import Protocol
from ibaml.evaluation import ClassScores, RegressionScores, Scores
from ibaml.learner import MetaLearner
from ibaml.pages.blocks import Block, Episode, Figure, Key, Table, Text, Tile
from ibaml.pages.drawing import drawn
from ibaml.pages.pictures import picture
from ibaml.pages.words import metric_name, number, percent, value
from ibaml.posterior import Posteriors
from ibaml.report.charts import fit_chart
from ibaml.tasks import EpisodeTasks, TaskBatch, TaskSource
from ibaml.words import NormStats

HARDEST, SHOWN = 8, 4  # rows of the tables, queries of each class in a picture
_GRID = 200


def hardness(scores: Scores) -> np.ndarray:
    """A number for each task, larger where it is harder, (T,)."""
    if isinstance(scores, ClassScores):
        means = scores.means()
        return np.asarray(-means["accuracy"] + 1e-3 * means["nll"])  # nll decides between equals
    return np.asarray(scores.mse)


def chosen(scores: Scores, hard: int = 2) -> list[tuple[int, str]]:
    """The keys of tasks to show, each with why: the middle one and the hardest."""
    order = np.argsort(hardness(scores), kind="stable")
    middle = int(order[len(order) // 2])
    found = [(scores.keys[middle], "A task of middling difficulty")]
    groups = scores.groups or scores.keys
    seen = {groups[middle]}  # another draw of a group shows little that is new
    for at in order[::-1].tolist():
        if len(found) <= hard and groups[at] not in seen:
            words = "The hardest task" if len(found) == 1 else "Another hard task"
            found.append((scores.keys[at], words))
            seen.add(groups[at])
    return found


def hardest_table(
    all_scores: Sequence[Scores], names: Sequence[str], source: TaskSource | None, split: str,
    target: str | None, named: str,
) -> Table:  # fmt: skip
    """The hardest tasks, on average over learners that were judged on the same ones."""
    first = all_scores[0]
    hard = np.mean([hardness(one) for one in all_scores], axis=0)
    metric = "accuracy" if isinstance(first, ClassScores) else "rmse"
    labels: set[str] = set()
    rows = []
    for at in np.argsort(-hard, kind="stable").tolist():
        label = _label(first, at, source, split)
        if label in labels and first.groups is not None:  # another draw of the same group
            continue
        labels.add(label)
        figures = [value(metric, _figure(one, at)) for one in all_scores]
        rows.append((f"task {first.keys[at]}", *([label] if label else []), *figures))
        if len(rows) == HARDEST:
            break
    what = [] if "" in labels else ["classes" if isinstance(first, ClassScores) else "what it is"]
    heads = names if len(all_scores) > 1 else [metric_name(metric, target)]
    words = frozenset({1} if what else ())
    return Table(
        f"The hardest tasks{named}",
        ("", *what, *heads),
        rows,
        words=words,
        folded=metric == "accuracy",
    )


def _figure(scores: Scores, at: int) -> float:
    if isinstance(scores, ClassScores):
        return float(scores.correct[at].mean())
    return float(scores.mse[at]) ** 0.5


def _label(scores: Scores, at: int, source: TaskSource | None, split: str) -> str:
    if scores.groups is not None:
        return scores.groups[at]
    if isinstance(source, EpisodeTasks):
        return ", ".join(class_names(source, split, scores.keys[at]))
    return ""


def class_names(source: EpisodeTasks, split: str, key: int) -> list[str]:
    """The classes of an episode, in the order of its labels."""
    rows, _ = source.episodes(split).draw(key)
    return [source.data.classes[source.data.labels[row[0]]] for row in rows]


def hardest_classes(
    all_scores: Sequence[Scores], names: Sequence[str], source: EpisodeTasks, split: str, named: str
) -> list[Block]:
    """How often queries of each class are right, over all tasks the class is in."""
    rows, _ = source.episodes(split).draws(all_scores[0].keys)
    index = source.data.labels[rows[..., 0]]  # (T, ways)
    right = []
    for scores in all_scores:
        if not isinstance(scores, ClassScores) or scores.correct.shape[1] % index.shape[1]:
            return []
        right.append(scores.correct.reshape(*index.shape, -1).mean(-1))
    classes = np.unique(index)
    means = np.array([[one[index == c].mean() for one in right] for c in classes])
    cells = [
        (source.data.classes[classes[i]], f"{int((index == classes[i]).sum()):,}",
         *(value("accuracy", mean) for mean in means[i].tolist()))
        for i in np.argsort(means.mean(1), kind="stable")[:HARDEST].tolist()
    ]  # fmt: skip
    heads = names if len(all_scores) > 1 else ["right"]
    return [Table(f"The hardest classes{named}", ("class", "in tasks", *heads), cells)]


@torch.no_grad()
def shown(
    learner: MetaLearner, source: TaskSource, protocol: Protocol, scores: Scores, name: str
) -> list[Block]:
    """A middling and the hardest tasks with the learner's answers: pictures, a table of what was
    taken for what, or a curve."""
    blocks: list[Block] = []
    for place, (key, why) in enumerate(chosen(scores)):
        batch = source.batches(protocol.split, [key])[0]
        norm_stats = cast(NormStats | None, protocol.norm_stats)
        posteriors = learner.adapt_all(batch, norm_stats=norm_stats)
        group = "" if scores.groups is None else f", {scores.groups[scores.keys.index(key)]}"
        title = f"{why} (task {key}{group})"
        if isinstance(scores, RegressionScores):
            units = "" if source.target is None else " Input and target are standardized."
            blocks.append(_fit(posteriors, batch, title, f"{name}-fit-{place}", units))
            continue
        assert isinstance(source, EpisodeTasks)
        answers = posteriors.predict_proba(batch.query_x, protocol.samples)[0].cpu()
        names = class_names(source, protocol.split, key)
        if source.data.is_image:
            blocks.append(_episode(source, protocol.split, key, names, answers, title))
        else:
            blocks.append(_confusion(names, answers, title))
    return blocks


def _episode(
    source: EpisodeTasks, split: str, key: int, names: Sequence[str], answers: Tensor, title: str
) -> Episode:
    episodes = source.episodes(split)
    plain = replace(episodes, normalize=False, device="cpu").batch([key])
    support = plain.support_x[0].unflatten(0, (episodes.ways, -1))
    query = plain.query_x[0].unflatten(0, (episodes.ways, -1))
    by_class = answers.unflatten(0, (episodes.ways, -1))
    best = by_class.argmax(-1)
    right = int((best == torch.arange(episodes.ways)[:, None]).sum())
    classes = []
    for w, name in enumerate(names):
        few = support[w, :SHOWN]
        examples = [Tile(picture(one, f"example of {name}")) for one in few]
        queries = []
        for i in range(min(SHOWN, episodes.queries)):
            said, sure = names[int(best[w, i])], float(by_class[w, i].max())
            is_right = int(best[w, i]) == w
            alt = f"query of {name}, {'rightly' if is_right else 'wrongly'} named {said}"
            text = percent(sure)
            if not is_right:
                text = f"{int(best[w, i]) + 1} {_short(said)} {text}"
            queries.append(Tile(picture(query[w, i], alt), text, is_right))
        classes.append((f"{w + 1} {name}", examples, queries))
    total = best.numel()
    summary = f"{right} of {total} queries right"
    if episodes.queries > SHOWN:
        summary += f"; {SHOWN} of {episodes.queries} of each class are shown"
    return Episode(title, summary + ".", classes)


def _short(name: str) -> str:
    """A name that fits under a picture."""
    return name if len(name) <= 14 else f"{name[:13]}…"


def _confusion(names: Sequence[str], answers: Tensor, title: str) -> Table:
    """How many queries of each class were named which class."""
    ways = len(names)
    best = answers.argmax(-1).unflatten(0, (ways, -1))
    counts = [best[w].bincount(minlength=answers.shape[-1]).tolist() for w in range(ways)]
    rows = [
        (f"{w + 1}: {name}", *(str(n) if n else "·" for n in counts[w][:ways]))
        for w, name in enumerate(names)
    ]
    head = ("queries of …", *(f"named {w + 1}" for w in range(ways)))
    return Table(title, head, rows)


def _fit(posteriors: Posteriors, batch: TaskBatch, title: str, name: str, units: str) -> Block:
    x, y = batch.support_x[0].cpu(), batch.support_y[0].cpu()
    queries, truth = batch.query_x[0].cpu(), batch.query_y[0].cpu()
    if x[0].numel() != 1:
        return _against(posteriors, batch, title)
    ends = torch.cat([x, queries]).flatten()
    grid = torch.linspace(float(ends.min()), float(ends.max()), _GRID, dtype=x.dtype)
    shaped = grid.view(1, _GRID, *x.shape[1:]).to(batch.query_x.device)
    mean, variance = (part[0].flatten().cpu().numpy() for part in posteriors.predict(shaped))
    deviation = np.sqrt(variance)
    at_queries = [part[0].flatten().cpu().numpy() for part in posteriors.predict(batch.query_x)]
    svg = drawn(
        lambda: fit_chart(
            grid.numpy(), mean, deviation, (x.flatten().numpy(), y.flatten().numpy()),
            (queries.flatten().numpy(), truth.flatten().numpy()),
        ),
        name, "Prediction, examples and truth of a task",
    )  # fmt: skip
    order = queries.flatten().argsort()
    picked = order[:: max(1, len(order) // 12)].tolist()
    rows = [
        (number(float(queries.flatten()[i])), number(float(truth.flatten()[i])),
         number(float(at_queries[0][i])), number(float(at_queries[1][i] ** 0.5)))
        for i in picked
    ]  # fmt: skip
    return Figure(
        title, svg,
        "Red: the examples it learned from. Gray: the truth it was not shown. Line and band: its "
        f"prediction with two standard deviations.{units}",
        Table("Some of the queries", ("input", "truth", "prediction", "its deviation"), rows,
              folded=True),
        legend=(Key("red", "dot", "examples"), Key("gray", "dot", "truth, not shown to it"),
                Key("blue", "-", "prediction ± 2 deviations")),
    )  # fmt: skip


def _against(posteriors: Posteriors, batch: TaskBatch, title: str) -> Block:
    """Truth and prediction of some queries, where there are several inputs."""
    mean, variance = (part[0].flatten().cpu() for part in posteriors.predict(batch.query_x))
    truth = batch.query_y[0].flatten().cpu()
    rows: list[tuple[Any, ...]] = [
        (f"query {i + 1}", number(float(truth[i])), number(float(mean[i])),
         number(float(variance[i]) ** 0.5))
        for i in range(min(12, len(truth)))
    ]  # fmt: skip
    return Table(title, ("", "truth", "prediction", "its deviation"), rows)


def nothing_to_show() -> Text:
    return Text("The tasks themselves are not at hand, so that none is shown.", "quiet")
