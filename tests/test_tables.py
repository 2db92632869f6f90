"""Tasks from a table: drawn again and again from few, judged over these, in the target's units."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from ibaml.assessment import Protocol, assess, comparable, open_test
from ibaml.cli import app
from ibaml.evaluation import mean_interval
from ibaml.evaluation.predict import score_tasks
from ibaml.tasks import DataError, Dataset, EpisodeTasks, SinusoidTasks, Table, TableTasks
from ibaml.training import open_run, resolve, resume, train
from real_data import DATA, real
from runs import final_state, make, same

COLUMNS = {"task": "who", "features": ["x"], "target": "y"}
TRAINED = {
    "task": "who", "features": "x", "target": "y", "shots": 3, "hidden": "8", "tasks": 4,
    "threads": 1, "tensorboard": False, "dtype": "float64",
}  # fmt: skip


def table_file(path: Path, unit: float = 1.0, target: str = "y", tasks: int = 40) -> Path:
    """Lines of a slope and an offset of each task's own; the target in units of ``unit``."""
    rng = np.random.default_rng(0)
    rows = [f"who\tx\t{target}"]
    for task in range(tasks):
        slope, offset = rng.normal(size=2)
        for x in rng.uniform(-1, 1, 6 + task % 3):
            rows.append(f"task {task}\t{x}\t{unit * (offset + slope * x)}")
    path.write_text("\n".join(rows) + "\n")
    return path


def trained(file: Path, folder: Path, **given) -> Path:
    settings = {**TRAINED, "data": str(file), "iterations": 2, "val_every": 0, **given}
    train(resolve(settings), folder)
    return folder


def invoke(*arguments: str | Path) -> str:
    done = CliRunner().invoke(app, [str(a) for a in arguments])
    assert done.exit_code == 0, (done.output, done.exception)
    return " ".join(done.output.split())


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("table")
    return trained(table_file(root / "lines.tsv"), root / "run")


# --- which task ----------------------------------------------------------------------------------


def test_a_source_names_the_task_that_each_key_draws(tmp_path):
    source = TableTasks(Table.read(table_file(tmp_path / "t.tsv"), **COLUMNS), shots=3, seed=5)
    table = source.table
    for split in ("train", "test"):
        groups = source.groups(split, range(50))
        assert set(groups) <= {table.tasks[t] for t in table.splits[split]}
        for batch in source.batches(split, range(50)):
            y = torch.cat([batch.support_y, batch.query_y], 1).numpy()
            for key, values in zip(batch.task_keys, y, strict=True):
                rows = table.y[table.labels == table.tasks.index(groups[key])]
                np.testing.assert_allclose(np.sort(values), np.sort(rows), rtol=1e-5)


def test_episodes_and_sinusoids_are_tasks_of_their_own():
    data = Dataset("d", np.zeros((4, 2)), np.arange(4) // 2, ("a", "b"), {"test": (0, 1)})
    for source in (EpisodeTasks(data), SinusoidTasks()):
        assert source.groups("test", range(3)) is None
        assert source.target is None


# --- first rows ----------------------------------------------------------------------------------


def test_first_rows_are_the_support_and_all_later_rows_the_queries(tmp_path):
    table = Table.read(table_file(tmp_path / "t.tsv"), **COLUMNS)
    source = TableTasks(table, shots=3, first_rows=True, seed=4, dtype=torch.float64)
    random = TableTasks(table, shots=3, seed=4, dtype=torch.float64)
    for split in ("train", "val", "test"):
        names = source.groups(split, range(30))
        assert names == random.groups(split, range(30)), "the order draws no other tasks"
        for batch in source.batches(split, range(30)):
            assert batch.support_x.shape[1] == 3
            x = torch.cat([batch.support_x, batch.query_x], 1)[..., 0].numpy()
            y = torch.cat([batch.support_y, batch.query_y], 1).numpy()
            for key, inputs, targets in zip(batch.task_keys, x, y, strict=True):
                mine = table.labels == table.tasks.index(names[key])
                order = np.argsort(table.x[mine, 0])
                np.testing.assert_array_equal(inputs, table.x[mine, 0][order])
                np.testing.assert_array_equal(targets, table.y[mine][order])


def test_first_rows_with_equal_values_keep_the_order_of_the_file(tmp_path):
    rows = ["who,x,z,y"]
    for i, x in enumerate([2, 1, 2, 1, 1, 0, 2, 1]):  # the second feature falls: it does not order
        rows += [f"{who},{x},{-i},{i}" for who in "abc"]
    path = tmp_path / "t.csv"
    path.write_text("\n".join(rows) + "\n")
    (tmp_path / "s.json").write_text(json.dumps({"train": ["a", "c"], "test": ["b"]}))
    table = Table.read(
        path, task="who", features=["x", "z"], target="y", splits=tmp_path / "s.json"
    )
    (batch,) = table.batches("test", [0, 7], 2, first_rows=True, dtype=torch.float64)
    unscaled = torch.cat([batch.support_y, batch.query_y], 1) * table.spread[-1] + table.center[-1]
    expected = [5, 1, 3, 4, 7, 0, 2, 6]
    np.testing.assert_allclose(unscaled, [expected, expected])
    (few,) = table.batches("test", [0], 2, query=3, first_rows=True, dtype=torch.float64)
    assert torch.equal(few.query_y, batch.query_y[:1, :3])


def test_training_shots_are_first_rows_too(tmp_path):
    settings = {**TRAINED, "data": str(table_file(tmp_path / "t.tsv")), "first_rows": True}
    tasks = make(resolve({**settings, "train_shots": 4})).tasks
    for split, count in (("train", 4), ("val", 3), ("test", 3)):
        for batch in tasks.batches(split, range(9)):
            assert batch.support_x.shape[1] == count
            assert (batch.support_x.amax(1) <= batch.query_x.amin(1)).all()


def test_a_run_on_first_rows_is_judged_and_resumed_on_first_rows(tmp_path):
    file = table_file(tmp_path / "t.tsv")
    constant = {"iterations": 4, "schedule": "constant"}
    whole = trained(file, tmp_path / "whole", first_rows=True, **constant)
    part = trained(file, tmp_path / "part", first_rows=True, schedule="constant")
    random = trained(file, tmp_path / "random", **constant)
    resume(part, iterations=4)
    assert open_run(part).settings.first_rows
    assert same(final_state(part), final_state(whole))
    assert not same(final_state(random), final_state(whole))
    for run, first in ((part, True), (random, False)):
        (batch, *_) = open_source(run).batches("test", range(9))
        ordered = (batch.support_x.amax(1) <= batch.query_x.amin(1)).all()
        assert bool(ordered) is first


def test_a_run_of_before_first_rows_draws_random_rows(tmp_path):
    folder = trained(table_file(tmp_path / "t.tsv"), tmp_path / "run")
    content = json.loads((folder / "config.json").read_text())
    assert content["settings"].pop("first_rows") is False
    (folder / "config.json").write_text(json.dumps(content))
    assert open_run(folder).settings == resolve(content["settings"])
    assert not open_source(folder).first_rows


def test_runs_on_first_and_on_random_rows_are_compared_on_rows_that_are_named(run, tmp_path):
    file = run.parent / "lines.tsv"
    first = trained(file, tmp_path / "first", first_rows=True)
    opened = [open_run(run), open_run(first)]
    with pytest.raises(ValueError, match=r"first_rows differs: False in .*; give --first-rows"):
        comparable(opened, Protocol())
    for chosen in (True, False):
        protocol = Protocol(tasks=20, first_rows=chosen)
        comparable(opened, protocol)
        for one in opened:
            source = open_test(one, protocol)
            assert isinstance(source, TableTasks)
            assert source.first_rows is chosen
    assert open_test(opened[1], Protocol(data="sinusoids")).name == "sinusoids"
    waves = Protocol(data="sinusoids", first_rows=True)
    with pytest.raises(ValueError, match="first_rows is not read for sinusoids"):
        open_test(opened[0], waves)


# --- how sure ------------------------------------------------------------------------------------


def test_more_draws_of_the_same_tasks_do_not_make_a_figure_sure(run):
    few, many = (assess(open_run(run), Protocol(tasks=n, batch=100)).main for n in (80, 500))
    assert few.groups is not None
    assert few.distinct == many.distinct < 15
    for name, interval in many.summary().items():
        alone = mean_interval(getattr(many, {"coverage": "inside", "rmse": "mse"}.get(name, name)))
        before = few.summary()[name]
        if name == "coverage" and before.value == 1:
            continue  # every target is inside, and nothing varies
        # draws of one task differ too, so it may narrow, but not to the 0.4 of independent tasks
        assert interval.high - interval.low > 0.55 * (before.high - before.low)
        if name != "rmse":
            assert interval.high - interval.low > 2 * (alone.high - alone.low)


def test_scores_of_a_table_do_not_depend_on_the_tasks_at_once(run):
    one, other = (assess(open_run(run), Protocol(tasks=9, batch=b)).main for b in (2, 9))
    assert one.groups == other.groups == open_source(run).groups("test", range(9))


def open_source(run: Path):
    return open_test(open_run(run), Protocol())


@real
def test_the_interval_on_gapminder_is_about_that_over_countries():
    trainer = make(
        resolve(
            {**TRAINED, "data": str(DATA / "gapminder" / "gapminder.tsv"), "task": "country",
             "features": "year", "target": "lifeExp", "iterations": 30}
        )
    )  # fmt: skip
    for _ in range(30):
        trainer.advance()
    scores = score_tasks(trainer.learner, trainer.tasks, "test", range(1000), batch=200)
    assert scores.distinct == 26
    countries = np.array(scores.groups)
    summary = scores.summary()
    for name, values in scores.means().items():
        over_countries = mean_interval([values[countries == c].mean() for c in set(countries)])
        width = summary[name].high - summary[name].low
        assert width == pytest.approx(over_countries.high - over_countries.low, rel=0.2)
        over_draws = mean_interval(values)
        assert width > 2.5 * (over_draws.high - over_draws.low)


# --- what it is called, and in which units -------------------------------------------------------


@pytest.mark.parametrize("unit", [1e-15, 1e6])
def test_the_error_is_in_the_targets_own_units_and_the_nll_is_not(run, tmp_path, unit):
    other = trained(table_file(tmp_path / "t.tsv", unit), tmp_path / "run")
    first, second = (assess(open_run(r), Protocol(tasks=20)).main.summary() for r in (run, other))
    for end in ("value", "low", "high"):
        assert getattr(second["rmse"], end) == pytest.approx(
            unit * getattr(first["rmse"], end), rel=1e-4
        )
    assert second["nll"].value == pytest.approx(first["nll"].value, rel=1e-4)


def test_validation_is_in_the_targets_own_units(tmp_path):
    actual = []
    for unit in (1.0, 1000.0):
        file = table_file(tmp_path / f"{unit}.tsv", unit)
        trainer = make(resolve({**TRAINED, "data": str(file), "val_tasks": 20}))
        actual.append(trainer.validate())
    assert actual[1]["rmse"] == pytest.approx(1000 * actual[0]["rmse"], rel=1e-6)
    assert actual[1]["nll"] == pytest.approx(actual[0]["nll"], rel=1e-6)


def test_evaluate_says_how_many_tasks_there_were_and_what_was_predicted(run, tmp_path):
    shown = invoke("evaluate", run, "--tasks", "200", "--out", tmp_path)
    summary = json.loads((tmp_path / "summary.json").read_text())
    count = summary["distinct_tasks"]
    assert count == len(open_source(run).table.splits["test"])
    assert f"{count} test tasks, 200 draws" in shown
    assert "RMSE of y" in shown
    assert "nll (standardized)" in shown
    assert summary["target"] == "y"
    rows = json.loads((tmp_path / "tasks.json").read_text())
    with (tmp_path / "tasks.csv").open() as file:
        lines = list(csv.DictReader(file))
    names = open_source(run).groups("test", range(200))
    assert [row["task"] for row in rows] == [line["task"] for line in lines] == list(names)


def test_figures_of_any_size_and_names_of_any_kind_are_shown(tmp_path):
    name = "[red]$y"
    file = table_file(tmp_path / "t.tsv", 1e-15, name)
    folder = trained(file, tmp_path / "run", target=name)
    shown = invoke("evaluate", folder, "--tasks", "20")
    assert f"RMSE of {name}" in shown
    rmse = json.loads((folder / "evaluation" / "summary.json").read_text())["results"][""]["rmse"]
    assert f"{rmse['value']:.17f}"[:-1] in shown.replace("\n", "")
    assert rmse["value"] > 0


def test_runs_on_a_table_are_compared_over_its_tasks(run, tmp_path):
    root = Path(run).parent
    other = trained(root / "lines.tsv", tmp_path / "maml", method="maml")
    shown = invoke(
        "compare", run, other, "--tasks", "300", "--batch", "100", "--out", tmp_path / "out"
    )
    content = json.loads((tmp_path / "out" / "comparison.json").read_text())
    assert f"{content['distinct_tasks']} test tasks, 300 draws" in shown
    assert shown.count("RMSE of y") == 2
    assert content["target"] == "y"
    first, second = (assess(open_run(r), Protocol(tasks=300, batch=100)).main for r in (run, other))
    alone = mean_interval(second.nll - first.nll)
    nll = content["differences"]["maml"]["nll"]
    assert nll["value"] == pytest.approx(alone.value)
    assert nll["high"] - nll["low"] > 2 * (alone.high - alone.low)


# --- which tasks belong to which split -----------------------------------------------------------


def test_tasks_of_each_split_may_be_named_in_a_file(tmp_path):
    file = table_file(tmp_path / "t.tsv")
    splits = tmp_path / "splits.json"
    splits.write_text(json.dumps({"train": ["task 3", "task 1"], "test": ["task 2"]}))
    table = Table.read(file, **COLUMNS, splits=splits)
    named = {s: {table.tasks[t] for t in members} for s, members in table.splits.items()}
    assert named == {"train": {"task 1", "task 3"}, "test": {"task 2"}}
    known = np.isin(table.labels, table.splits["train"])
    np.testing.assert_allclose([table.x[known].mean(), table.y[known].mean()], 0, atol=1e-12)
    np.testing.assert_allclose([table.x[known].std(), table.y[known].std()], 1)
    assert set(TableTasks(table, shots=3).groups("test", range(5))) == {"task 2"}
    splits.write_text(json.dumps({"train": ["task 1"], "test": ["task 1"]}))
    with pytest.raises(DataError, match=r"splits.json: 'task 1' is in two splits"):
        Table.read(file, **COLUMNS, splits=str(splits))


# --- what is standardized ------------------------------------------------------------------------


def read(path: Path, x: np.ndarray) -> Table:
    rows = ["who,x,y", *(f"{i % 4},{float(value)!r},{i}" for i, value in enumerate(x))]
    path.write_text("\n".join(rows) + "\n")
    return Table.read(path, **COLUMNS)


def test_a_column_in_tiny_units_is_standardized_and_a_constant_is_not(tmp_path):
    rng = np.random.default_rng(0)
    x = rng.normal(3, 2, 400)
    expected = read(tmp_path / "t.csv", x)
    np.testing.assert_allclose(read(tmp_path / "t.csv", 1e-15 * x).x, expected.x, atol=1e-9)
    for value in (0.1, 1e6, 1e-15):
        noisy = value * (1 + np.finfo(float).eps * rng.integers(-1, 2, 400) / 2)
        for constant in (np.full(400, value), noisy):
            table = read(tmp_path / "t.csv", constant)
            assert table.spread[0] == 1
            np.testing.assert_allclose(table.x, 0, atol=1e-12 * value)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_feature_in_tiny_units_is_standardized_and_a_constant_is_not(dtype):
    rng = np.random.default_rng(0)
    x = rng.normal(3, 2, 500)
    noise = np.finfo(dtype).eps * rng.integers(-1, 2, 500) / 2
    columns = [x, 1e-15 * x, np.full(500, 0.1), np.full(500, 1e6), 1e6 * (1 + noise)]
    examples = np.stack(columns, 1).astype(dtype)
    data = Dataset("d", examples, np.arange(500) // 100, tuple("abcde"), {"train": (0, 1, 2, 3, 4)})
    std = data.moments[1].numpy()
    assert std[:2] == pytest.approx([x.std(), 1e-15 * x.std()], rel=1e-5)
    assert std[2:].tolist() == [1, 1, 1]
    assert math.isclose(data.moments[0][3], 1e6)
