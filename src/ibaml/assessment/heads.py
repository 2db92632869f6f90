"""How do simple heads, and trained learners beside them, do on the same new tasks?

Hyper-parameters and one temperature a head are chosen on validation tasks, by nll. Each head is
scored twice: as it is, with the hyper-parameters that are best so; and as softmax(t·log p), with
the hyper-parameters and the t that are best together. Test tasks choose nothing.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ibaml.assessment.files import plain
from ibaml.assessment.heads_options import HEADS, HeadsOptions
from ibaml.assessment.simple_heads import (
    UNBOUNDED,
    UNKNOWNS,
    Arm,
    Tables,
    Values,
    simple_heads,
)
from ibaml.energy import Gaussian
from ibaml.evaluation import ClassScores, Interval, paired
from ibaml.evaluation.temperature import LIMIT, fit_log_temperature
from ibaml.fields import SettingsError
from ibaml.files import write_whole
from ibaml.kinds import FEATURES, kind_of_data
from ibaml.machine import machine, pick_device
from ibaml.tasks import DataError, Dataset, EpisodeTasks, Inputs, TaskBatch
from ibaml.tasks.catalog import open_data
from ibaml.training.run import open_run
from ibaml.training.start import load, load_run

Count = Callable[[int, int, str], None]  # done, of how many, what comes next

_AT_ONCE = 16  # tasks


@dataclass(frozen=True)
class Row:
    """One head on the test tasks, with or without a temperature.

    Attributes:
        values: its hyper-parameters.
        log_t: of its temperature; None without.
        val_nll: its nll on the validation tasks; None where it could not answer them.
        seconds: to learn and answer one test task.
    """

    name: str
    values: Values
    log_t: float | None
    val_nll: float | None
    seconds: float
    scores: ClassScores

    @property
    def label(self) -> str:
        return self.name if self.log_t is None else f"{self.name}, tempered"

    @cached_property
    def summary(self) -> dict[str, Interval]:
        return self.scores.summary()

    @property
    def chosen(self) -> dict[str, float]:
        """What was chosen for it on the validation tasks."""
        return {**self.values, **({} if self.log_t is None else {"t": math.exp(self.log_t)})}


@dataclass(frozen=True)
class Compared:
    """All heads at one number of shots. Differences are from the row ``reference``: the first
    trained learner as it is, or else the head that was best on the validation tasks."""

    shots: int
    val_ways: int
    rows: list[Row]
    reference: Row
    notes: list[str]

    @cached_property
    def differences(self) -> dict[str, dict[str, Interval]]:
        """Figures of every other row minus those of the reference, task by task."""
        others = [row for row in self.rows if row is not self.reference]
        return {row.label: paired(self.reference.scores, row.scores) for row in others}

    def described(self) -> dict[str, Any]:
        """Everything, for JSON."""
        return {
            "validation ways": self.val_ways,
            "reference": self.reference.label,
            "notes": self.notes,
            "results": {
                row.label: {
                    "chosen": row.chosen,
                    "validation nll": row.val_nll,
                    "seconds per task": row.seconds,
                    **{name: plain(i) for name, i in row.summary.items()},
                    "minus reference": {
                        name: plain(i) for name, i in self.differences.get(row.label, {}).items()
                    },
                }
                for row in self.rows
            },
        }


def compare_heads(
    data: str | Path,
    options: HeadsOptions,
    runs: Mapping[str, Path] | None = None,
    count: Count = lambda done, total, what: None,
) -> list[Compared]:
    """Compare simple heads on an .npz of feature vectors, and trained learners with them.

    Args:
        runs: run folders, or files that `MetaLearner.save` wrote, by the names to show.
        count: is called with the progress.
    """
    for name in runs or {}:
        if name in HEADS.values():
            raise SettingsError(
                f"a run is named {name!r}, as a simple head is: give it another name"
            )
    dataset = _open(str(data), options.splits)
    drawn = {shots: _draw_both(dataset, options, shots) for shots in dict.fromkeys(options.shots)}
    device = pick_device(options.device)
    rows, position = _rows_of(dataset, ("val", "test"))
    examples = dataset.tensor[rows]
    learners = [
        _learner_arm(name, path, dataset, examples, options, device)
        for name, path in (runs or {}).items()
    ]
    for arm in learners:
        _probe(arm, drawn, position, options.ways)
    base, _ = _rows_of(dataset, ("train",))
    labels = torch.from_numpy(dataset.labels)[base]
    tables = Tables(*(t.to(device) for t in (examples, dataset.tensor[base], labels)))
    plan = {shots: [*simple_heads(tables, _bearable(options, shots)), *learners] for shots in drawn}
    total, done, result = sum(len(a.grid) + 2 for arms in plan.values() for a in arms), 0, []
    for shots, arms in plan.items():
        found: list[Row] = []
        test, validation = (one.moved(position) for one in drawn[shots])
        for arm in arms:
            count(done, total, f"{arm.name}, {shots} shot{'s' * (shots > 1)}")
            found += _judge(arm, test, validation)
            done += len(arm.grid) + 2
        result.append(_compared(shots, found, arms, test, validation, options, learners))
    count(total, total, "")
    return result


def write_heads(compared: Sequence[Compared], path: Path, facts: Mapping[str, Any]) -> Path:
    """Write all figures as JSON."""
    content = {
        **facts,
        "machine": machine(),
        "shots": {str(one.shots): one.described() for one in compared},
    }
    write_whole(path, json.dumps(content, indent=2) + "\n")
    return path


# --- data and tasks ------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Drawn:
    """Tasks as rows of a table of features: support (T, N) and query (T, Q)."""

    keys: tuple[int, ...]
    ways: int
    support: Tensor
    query: Tensor

    @property
    def labels(self) -> Tensor:
        """Of the queries, (T, Q)."""
        return self._labels(self.query)

    def moved(self, position: Tensor) -> _Drawn:
        """The same tasks in another table: row r is row ``position[r]`` there."""
        return _Drawn(self.keys, self.ways, position[self.support], position[self.query])

    def batches(self, table: Tensor) -> Iterator[TaskBatch]:
        for begin in range(0, len(self.keys), _AT_ONCE):
            part = slice(begin, begin + _AT_ONCE)
            support, query = self.support[part], self.query[part]
            yield TaskBatch(
                table[support], self._labels(support).to(table.device),
                table[query], self._labels(query).to(table.device),
                self.keys[part], validate=False, classes=self.ways,
            )  # fmt: skip

    def _labels(self, rows: Tensor) -> Tensor:
        each = rows.shape[1] // self.ways
        return torch.arange(self.ways).repeat_interleave(each).expand(len(rows), -1)


def _open(data: str, splits: str | None) -> Dataset:
    if kind_of_data(data) is not FEATURES:
        raise SettingsError(
            f"{data!r} is no .npz: simple heads read feature vectors, x (N, D) and y (N,). "
            "ibaml embed makes them of pictures"
        )
    dataset = open_data(data, splits=splits)
    base = dataset.splits.get("train", ())
    if len(base) < 2 or sum(dataset.count(c) for c in base) <= len(base):
        raise DataError(
            f"{data}: {len(base)} training classes; LDA and PLDA need two or more with several "
            "examples each: give --splits"
        )
    return dataset


def _draw_both(data: Dataset, options: HeadsOptions, shots: int) -> tuple[_Drawn, _Drawn]:
    """Test and validation tasks. Validation tasks have fewer classes where there are not enough."""
    need = shots + options.queries
    enough = sum(data.count(c) >= need for c in data.splits.get("val", ()))
    test = _draw(data, "test", options.ways, shots, options.queries, options.tasks)
    if enough < 2:
        raise DataError(
            f"{data.name}, split 'val': hyper-parameters and temperatures are chosen on "
            f"validation classes, and {enough} have the {need} examples of a class of a "
            f"{shots}-shot task: give --splits, or lower shots or queries"
        )
    ways = min(options.ways, enough)
    return test, _draw(data, "val", ways, shots, options.queries, options.val_tasks)


def _draw(data: Dataset, split: str, ways: int, shots: int, queries: int, tasks: int) -> _Drawn:
    """The tasks that `ibaml evaluate` draws."""
    episodes = EpisodeTasks(data, ways, shots, queries).episodes(split)
    rows = torch.from_numpy(np.stack([episodes.draw(key)[0] for key in range(tasks)]))
    support, query = rows[:, :, :shots].flatten(1), rows[:, :, shots:].flatten(1)
    return _Drawn(tuple(range(tasks)), ways, support, query)


def _rows_of(data: Dataset, splits: Sequence[str]) -> tuple[Tensor, Tensor]:
    """The rows of all examples of some splits, and where each row of the data is among them."""
    classes = sorted(c for split in splits for c in data.members(split))
    rows = torch.cat([torch.arange(*data.starts[c : c + 2].tolist()) for c in classes])
    position = torch.full((len(data.labels),), -1)
    position[rows] = torch.arange(len(rows))
    return rows, position


def _bearable(options: HeadsOptions, shots: int) -> Sequence[str]:
    """The simple heads that are taken at so many shots."""
    if options.heads or options.ways**2 * shots <= UNKNOWNS:
        return options.heads or tuple(HEADS)
    return [word for word in HEADS if word != "one-vs-each"]


# --- trained learners ----------------------------------------------------------------------------


def _learner_arm(
    name: str,
    path: Path,
    data: Dataset,
    examples: Tensor,
    options: HeadsOptions,
    device: torch.device,
) -> Arm:
    """A trained learner, adapted to every support set."""
    if path.is_file():
        learner = load(path, device=device)
    else:
        run = open_run(path)
        if run.data["digest"] != EpisodeTasks(data).digest:
            raise SettingsError(
                f"{path} was trained on {run.data['name']} with other examples or splits, so that "
                "test classes may not be new to it: give the DATA and --splits of its training"
            )
        learner, _ = load_run(run, device=device)
    if isinstance(learner.likelihood, Gaussian):
        raise SettingsError(f"{path} is regression, and simple heads classify")
    inputs = learner.inputs or Inputs.of(data)
    assert inputs is not None
    try:
        table = inputs(examples).to(device, next(learner.parameters()).dtype)
    except DataError as error:
        raise SettingsError(f"{path} does not fit {data.name}: {error}") from error

    def answer(batch: TaskBatch, values: Values) -> Tensor:
        p = learner.adapt_all(batch).predict_proba(batch.query_x, options.samples)
        return p.clamp_min(torch.finfo(p.dtype).tiny).log()

    ways = None if learner.layout.rows else options.ways
    return Arm(name, [{}], lambda values: table, answer, ways)


def _probe(
    arm: Arm, drawn: Mapping[int, tuple[_Drawn, _Drawn]], position: Tensor, ways: int
) -> None:
    """Refuse a learner of other ways before any work."""
    test = next(iter(drawn.values()))[0].moved(position)
    batch = next(test.batches(arm.table({}))).select([0])
    try:
        with torch.no_grad():
            outputs = arm.answer(batch, {}).shape[-1]
    except ValueError as error:
        raise SettingsError(f"{arm.name}: {error}") from error
    if outputs != ways:
        raise SettingsError(
            f"{arm.name} was trained {outputs}-way and its head has a prior for each class: give "
            f"--ways {outputs}, or a run trained with --tie-head"
        )


# --- judging -------------------------------------------------------------------------------------


def _judge(arm: Arm, test: _Drawn, validation: _Drawn) -> list[Row]:
    """Its row as it is, and its row with a temperature."""
    if arm.ways not in (None, validation.ways):  # it cannot answer the validation tasks
        return [_row(arm, arm.grid[0], None, None, *_answers(arm, arm.grid[0], test), test)]
    choices: list[tuple[float, Values, float | None]] = []
    for values in arm.grid:
        log_p, _ = _answers(arm, values, validation)
        if not bool(log_p.isfinite().all()):
            continue
        log_t = _fit(log_p, validation)
        choices += [
            (float(_scores(log_p, one, validation).nll.mean()), values, one)
            for one in (None, log_t)
        ]
    if not choices:
        raise FloatingPointError(
            f"{arm.name} has no finite answer on the validation tasks: are the features of very "
            "different sizes?"
        )
    rows: list[Row] = []
    known: dict[tuple[float, ...], tuple[Tensor, float]] = {}
    for tempered in (False, True):
        own = [choice for choice in choices if (choice[2] is not None) is tempered]
        nll, values, fit = min(own, key=lambda choice: choice[0])
        chosen = tuple(values.values())
        known[chosen] = known.get(chosen) or _answers(arm, values, test)
        rows.append(_row(arm, values, fit, nll, *known[chosen], test))
    return rows


def _fit(log_p: Tensor, validation: _Drawn) -> float:
    """log t, wherever it is: one search reaches `LIMIT`, the next goes on from there."""
    log_t = 0.0
    for _ in range(4):
        step = fit_log_temperature([math.exp(log_t) * log_p[:, None]], [validation.labels])
        log_t += step
        if abs(step) < LIMIT - 1e-6:
            break
    return log_t


def _answers(arm: Arm, values: Values, drawn: _Drawn) -> tuple[Tensor, float]:
    """log p (T, Q, C) of all tasks, and seconds a task."""
    table = arm.table(values)
    began = time.perf_counter()
    with torch.no_grad():
        parts = [arm.answer(batch, values).double().cpu() for batch in drawn.batches(table)]
    seconds = (time.perf_counter() - began) / len(drawn.keys)
    return torch.cat(parts).log_softmax(-1), seconds


def _scores(log_p: Tensor, log_t: float | None, drawn: _Drawn) -> ClassScores:
    p = (log_p * math.exp(log_t or 0.0)).softmax(-1)
    return ClassScores.of(drawn.keys, p, drawn.labels)


def _row(
    arm: Arm,
    values: Values,
    log_t: float | None,
    val_nll: float | None,
    log_p: Tensor,
    seconds: float,
    test: _Drawn,
) -> Row:
    ill = ~log_p.flatten(1).isfinite().all(1)
    if bool(ill.any()):
        key = test.keys[int(ill.nonzero()[0, 0])]
        raise FloatingPointError(f"the answers of {arm.name} to test task {key} are not finite")
    return Row(arm.name, values, log_t, val_nll, seconds, _scores(log_p, log_t, test))


def _compared(
    shots: int,
    rows: list[Row],
    arms: Sequence[Arm],
    test: _Drawn,
    validation: _Drawn,
    options: HeadsOptions,
    learners: Sequence[Arm],
) -> Compared:
    if learners:
        reference = next(row for row in rows if row.name == learners[0].name)
    else:
        reference = min(rows, key=lambda row: row.val_nll or 0.0)
    notes = []
    if validation.ways < test.ways:
        notes.append(
            f"hyper-parameters and temperatures are chosen on {validation.ways}-way validation "
            f"tasks: no more validation classes have {shots + options.queries} examples"
        )
    if not options.heads and len(_bearable(options, shots)) < len(HEADS):
        notes.append(
            f"{HEADS['one-vs-each']} is left out, as it takes seconds a task here; --heads "
            "one-vs-each takes it"
        )
    grids = {arm.name: arm.grid for arm in arms}
    ends = [row.label for row in rows if _at_end(row, grids[row.name])]
    if ends:
        notes.append(f"chosen at the end of the grid: {'; '.join(ends)}")
    return Compared(shots, validation.ways, rows, reference, notes)


def _at_end(row: Row, grid: Sequence[Values]) -> bool:
    """Whether a chosen value without natural bounds is the first or last that was tried.

    A temperature goes on where a scale ends.
    """
    asked = [
        n for n in row.values if n in UNBOUNDED and not (n == "scale" and row.log_t is not None)
    ]
    tried = {name: {values[name] for values in grid} for name in asked}
    return any(row.values[name] in (min(tried[name]), max(tried[name])) for name in tried)
