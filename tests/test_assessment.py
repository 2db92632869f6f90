"""`ibaml evaluate` and `ibaml compare`: the same figures however they are computed, files that say
which protocol they are of, and clear words for what cannot be judged."""

from __future__ import annotations

import csv
import json
import shutil
from dataclasses import fields, replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from commands import invoke, refused
from ibaml.assessment import Protocol, assess, assess_learner, differences, open_test
from ibaml.evaluation.at_once import fitting, tasks_at_once
from ibaml.evaluation.predict import score_tasks
from ibaml.training import load, open_run, resolve, train
from live_bytes import peak_bytes
from runs import features_file, waves

PNG = b"\x89PNG"
FEW = ("--tasks", "5", "--queries", "3")


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """A folder of tiny runs, trained for two iterations."""
    root = tmp_path_factory.mktemp("runs")
    file = features_file(root / "features.npz")
    common = {
        "iterations": 2, "tasks": 2, "queries": 3, "val_every": 0, "tensorboard": False,
        "threads": 1,
    }  # fmt: skip
    classes = {**common, "data": file, "ways": 3, "hidden": "8", "solver": "descent"}
    for name, settings in {
        "ours": resolve(classes),
        "maml": resolve({**classes, "method": "maml"}),
        "tied": resolve({**classes, "tie_head": True}),
        "shots": resolve({**classes, "shots": 2}),
        "ways": resolve({**classes, "ways": 4}),
        "norm": resolve({**common, "data": "glyphs", "channels": 4, "ways": 3}),
        "waves": waves(method="abml", iterations=2, val_every=0),
    }.items():
        train(settings, root / name)
    return root


def contents(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir()}


def strict(path: Path):
    """JSON as the standard has it: NaN and Infinity are refused."""

    def never(word: str):
        raise AssertionError(f"{path.name} holds {word}, which is no JSON")

    return json.loads(path.read_text(), parse_constant=never)


# --- figures -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["ours", "maml", "norm", "waves"])
def test_scores_do_not_depend_on_the_tasks_at_once(runs, name):
    run = open_run(runs / name)
    actual = [assess(run, Protocol(tasks=7, queries=3, batch=batch)).scores for batch in (1, 3, 7)]
    for first, second in pairwise(actual):
        assert first.keys() == second.keys()
        for protocol, scores in first.items():
            assert scores.keys == second[protocol].keys == tuple(range(7))
            for name in {field.name for field in fields(scores)} - {"groups"}:
                one, other = (getattr(s, name) for s in (scores, second[protocol]))
                np.testing.assert_allclose(other, one, rtol=1e-6, atol=1e-6, err_msg=name)


def test_as_many_tasks_are_judged_at_once_as_fit(runs):
    assert fitting(1e9, None, 128) == 128
    assert fitting(1e9, int(300e9), 128) == 128
    assert fitting(1e9, int(100e9), 128) == 32
    assert fitting(1e9, int(1e9), 128) == 1
    asked = []
    assert tasks_at_once(load(runs / "ours"), asked.append) == 16
    assert asked == [], "on a CPU nothing is measured"


def test_memory_does_not_grow_with_the_number_of_tasks(runs):
    learner = load(runs / "ours")
    source = open_test(open_run(runs / "ours"), Protocol(queries=3))

    def peak(tasks: int, batch: int) -> int:
        return peak_bytes(lambda: score_tasks(learner, source, "test", range(tasks), batch=batch))

    assert peak(32, 4) <= 1.6 * peak(4, 4)  # a few megabytes: what awaits collection shows
    assert peak(32, 32) > 4 * peak(4, 4), "the measure sees what tasks at once cost"


def test_samples_and_split_are_those_asked_for(runs):
    run = open_run(runs / "ours")
    one, many, other = (
        assess(run, Protocol(tasks=4, queries=3, **given)).main
        for given in ({"samples": 1}, {"samples": 10}, {"split": "train"})
    )
    assert np.array_equal(one.nll, many.nll)  # a linear head's posterior is not drawn from
    assert not np.allclose(many.nll, other.nll, atol=1e-3)
    waves = open_run(runs / "waves")  # everything adapted
    drawn = [assess(waves, Protocol(tasks=4, samples=samples)).main.nll for samples in (1, 10)]
    assert not np.allclose(*drawn, atol=1e-6)


def test_adaptation_may_take_other_steps_than_in_training(runs, tmp_path):
    run = open_run(runs / "ours")
    learner = load(runs / "ours")
    own = learner.solver.steps
    none, same, unsaid = (
        assess(run, Protocol(tasks=4, queries=3, steps=steps)) for steps in (0, own, None)
    )
    assert np.array_equal(same.main.nll, unsaid.main.nll)
    assert not np.allclose(none.main.nll, unsaid.main.nll, atol=1e-3)
    assert none.learner.solver == replace(learner.solver, steps=0)
    shown = invoke("evaluate", runs / "ours", *FEW, "--steps", "2", "--out", tmp_path)
    assert "2 steps of adaptation" in " ".join(shown.split())


def test_a_learner_that_is_judged_by_other_steps_keeps_its_own(runs):
    run, learner = open_run(runs / "ours"), load(runs / "ours")
    protocol = Protocol(tasks=4, queries=3, steps=0)
    before = learner.solver
    assessment = assess_learner(learner, open_test(run, protocol), protocol)
    assert np.array_equal(assessment.main.nll, assess(run, protocol).main.nll)
    assert learner.solver == before
    assert assessment.learner.solver.steps == 0


# --- evaluate ------------------------------------------------------------------------------------


def test_evaluating_twice_gives_the_same_files(runs, tmp_path):
    for folder in ("a", "b"):
        shown = invoke("evaluate", runs / "ours", *FEW, "--out", tmp_path / folder)
        for file in contents(tmp_path / folder):
            assert str(tmp_path / folder / file) in shown
    first, second = contents(tmp_path / "a"), contents(tmp_path / "b")
    names = {
        "reliability.png", "scores.npz", "selective.png", "summary.json", "tasks.csv", "tasks.json"
    }  # fmt: skip
    assert first == second
    assert first.keys() == names
    assert all(first[n].startswith(PNG) for n in names if n.endswith(".png"))


def test_a_run_keeps_its_evaluation_unless_told_otherwise(runs, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(runs / "ours", run)
    invoke("evaluate", run, *FEW)
    summary = strict(run / "evaluation" / "summary.json")
    assert summary["run"] == str(run)
    assert summary["data"] == "features"
    assert summary["iteration"] == 2
    assert summary["protocol"]["tasks"] == 5
    assert summary["protocol"]["split"] == "test"
    figures = summary["results"][""]
    assert figures.keys() == {"accuracy", "nll", "brier", "ece", "mce"}
    for interval in figures.values():
        assert interval["low"] <= interval["value"] <= interval["high"]


@pytest.mark.parametrize(
    ("extra", "protocols"),
    [
        ((), ["running (inductive)", "batch (transductive)"]),
        (("--norm-stats", "batch"), ["batch (transductive)"]),
        (("--norm-stats", "support"), ["support (inductive)"]),
    ],
)
def test_with_batch_norm_every_protocol_is_named(runs, tmp_path, extra, protocols):
    shown = invoke("evaluate", runs / "norm", *FEW, "--out", tmp_path, *extra)
    summary = strict(tmp_path / "summary.json")
    assert list(summary["results"]) == protocols
    assert all(name in shown for name in protocols)
    rows = strict(tmp_path / "tasks.json")
    with (tmp_path / "tasks.csv").open() as file:
        lines = list(csv.DictReader(file))
    expected = [(name, key) for name in protocols for key in range(5)]
    assert [(row["protocol"], row["key"]) for row in rows] == expected
    assert [(line["protocol"], int(line["key"])) for line in lines] == expected
    for row, line in zip(rows, lines, strict=True):
        assert row.keys() == line.keys()
        assert all(float(line[n]) == row[n] for n in row if n != "protocol")
    for name in protocols:
        mean = np.mean([row["accuracy"] for row in rows if row["protocol"] == name])
        assert summary["results"][name]["accuracy"]["value"] == pytest.approx(mean)
    assert (tmp_path / "episode.png").read_bytes().startswith(PNG)


def test_the_first_protocol_is_what_adapt_gives(runs):
    """What stands first is what a person gets; the literature's figure stands beside it."""
    run = open_run(runs / "norm")
    first, beside = assess(run, Protocol(tasks=3, queries=3)).scores.values()
    source = open_test(run, Protocol(queries=3))
    batch = source.batches("test", [1])[0]
    said = load(run.path).adapt_all(batch).predict_proba(batch.query_x, 10)[0].max(-1).values
    np.testing.assert_allclose(first.confidence[1], said.numpy(), atol=1e-6)
    assert not np.allclose(beside.confidence[1], said.numpy(), atol=1e-3)


def test_a_regression_run_gives_nll_rmse_coverage_and_fits(runs, tmp_path):
    invoke("evaluate", runs / "waves", "--tasks", "5", "--out", tmp_path)
    assert contents(tmp_path).keys() == {
        "fits.png", "scores.npz", "summary.json", "tasks.csv", "tasks.json"
    }  # fmt: skip
    assert (tmp_path / "fits.png").read_bytes().startswith(PNG)
    figures = strict(tmp_path / "summary.json")["results"][""]
    assert figures.keys() == {"nll", "rmse", "coverage"}
    rows = strict(tmp_path / "tasks.json")
    assert len(rows) == 5
    root = np.mean([row["mse"] for row in rows]) ** 0.5
    assert figures["rmse"]["value"] == pytest.approx(root)


@pytest.mark.parametrize("name", ["ours", "waves"])
def test_one_task_has_no_interval_and_its_files_are_json(runs, tmp_path, name):
    invoke("evaluate", runs / name, "--tasks", "1", "--queries", "1", "--out", tmp_path)
    figures = strict(tmp_path / "summary.json")["results"][""]
    assert figures["nll"]["value"] is not None
    assert figures["nll"]["low"] is None
    assert figures["nll"]["high"] is None
    assert len(strict(tmp_path / "tasks.json")) == 1


def test_other_ways_need_a_tied_head(runs, tmp_path):
    said = refused("evaluate", runs / "ours", *FEW, "--ways", "4")
    assert "trained 3-way" in said
    assert "--tie-head" in said
    for ways in ("2", "5"):
        folder = tmp_path / ways
        invoke("evaluate", runs / "tied", *FEW, "--ways", ways, "--out", folder)
        assert strict(folder / "summary.json")["protocol"]["ways"] == int(ways)
    by_chance = [
        strict(tmp_path / ways / "summary.json")["results"][""]["nll"]["value"]
        for ways in ("2", "5")
    ]
    assert by_chance[0] < by_chance[1], "two classes are easier than five"


def test_other_shots_and_other_data_of_the_same_shape(runs, tmp_path):
    other = features_file(tmp_path / "other.npz", classes=40)
    invoke("evaluate", runs / "ours", *FEW, "--shots", "5", "--out", tmp_path / "shots")
    invoke("evaluate", runs / "ours", *FEW, "--data", other, "--out", tmp_path / "data")
    assert strict(tmp_path / "shots" / "summary.json")["protocol"]["shots"] == 5
    assert strict(tmp_path / "data" / "summary.json")["data"] == "other"


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        (("--split", "tests"), ["no split 'tests'", "train, val, test"]),
        (("--which", "middle"), ["which must be one of best, last", "'middle'"]),
        (("--tasks", "0"), ["tasks must be 1 or more"]),
        (("--samples", "0"), ["samples must be 1 or more"]),
        (("--norm-stats", "none"), ["norm_stats must be one of batch, support, running"]),
        (("--queries", "12"), ["1 + 12 examples", "lower ways, shots or queries"]),
        (("--data", "nowhere"), ["'nowhere' is neither a path nor"]),
        (("--data", "glyphs"), ["1, 28, 28)"]),
        (("--device", "cuda:99"), ["device 'cuda:99'"]),
    ],
)
def test_what_cannot_be_judged_is_a_sentence(runs, extra, words):
    said = refused("evaluate", runs / "ours", *FEW, *extra)
    for word in words:
        assert word in said


def test_folders_that_are_no_runs_are_sentences(runs, tmp_path):
    assert "does not exist" in refused("evaluate", tmp_path / "nothing")
    assert "is not a run folder" in refused("evaluate", tmp_path)
    assert "is not a run folder" in refused("evaluate", runs / "features.npz")
    run = tmp_path / "run"
    shutil.copytree(runs / "ours", run)
    (newest,) = (run / "checkpoints").glob("step-*")
    newest.write_bytes(newest.read_bytes()[:-9])
    said = refused("evaluate", run, *FEW)
    assert "has no checkpoint yet" in said
    assert "step-00000002.safetensors is ignored" in said
    newest.unlink()
    assert "has no checkpoint yet" in refused("evaluate", run, *FEW)
    (run / "config.json").write_text("{}")
    assert "config.json cannot be read" in refused("evaluate", run, *FEW)


# --- compare -------------------------------------------------------------------------------------


def test_differences_are_those_of_the_summaries(runs, tmp_path):
    shown = invoke("compare", runs / "ours", runs / "maml", *FEW, "--out", tmp_path)
    comparison = strict(tmp_path / "comparison.json")
    ours, maml = comparison["results"]["ours"], comparison["results"]["maml"]
    (name,) = comparison["differences"]
    assert name == "maml"
    assert "minus ours" in shown
    for metric, difference in comparison["differences"]["maml"].items():
        expected = maml[metric]["value"] - ours[metric]["value"]
        assert difference["value"] == pytest.approx(expected, abs=1e-12), metric
        assert difference["low"] <= difference["value"] <= difference["high"]
    assert any(difference["value"] for difference in comparison["differences"]["maml"].values())
    for file in ("comparison.png", "reliability.png"):
        assert (tmp_path / file).read_bytes().startswith(PNG)


def test_compare_and_evaluate_agree(runs, tmp_path):
    invoke("compare", runs / "ours", runs / "maml", *FEW, "--out", tmp_path / "both")
    invoke("evaluate", runs / "maml", *FEW, "--out", tmp_path / "one")
    both = strict(tmp_path / "both" / "comparison.json")["results"]["maml"]
    assert both == strict(tmp_path / "one" / "summary.json")["results"][""]


@pytest.mark.parametrize("name", ["ours", "waves", "norm"])
def test_a_run_and_its_copy_differ_by_exactly_nothing(runs, tmp_path, name):
    shutil.copytree(runs / name, tmp_path / "copy")
    invoke("compare", runs / name, tmp_path / "copy", *FEW, "--out", tmp_path / "out")
    comparison = strict(tmp_path / "out" / "comparison.json")
    assert comparison["results"][name] == comparison["results"]["copy"]
    for difference in comparison["differences"]["copy"].values():
        assert difference == {"value": 0.0, "low": 0.0, "high": 0.0}


def test_three_runs_are_each_compared_with_the_first(runs):
    protocol = Protocol(tasks=4, queries=3)
    scores = {n: assess(open_run(runs / n), protocol).main for n in ("ours", "maml", "tied")}
    pairs = differences(scores)
    assert list(pairs) == ["maml", "tied"]
    for name, figures in pairs.items():
        each = scores[name].means()["nll"] - scores["ours"].means()["nll"]
        assert figures["nll"].value == pytest.approx(each.mean())


@pytest.mark.parametrize(
    ("other", "extra", "words"),
    [
        ("shots", (), ["shots differs: 1 in", "2 in", "--shots"]),
        ("ways", (), ["ways differs: 3 in", "4 in", "--ways"]),
        ("norm", (), ["the data differ: features in", "glyphs in", "--data"]),
        ("ways", ("--ways", "4"), ["trained 3-way", "--tie-head"]),
    ],
)
def test_runs_of_other_tasks_are_refused_by_the_field(runs, other, extra, words):
    said = refused("compare", runs / "ours", runs / other, *FEW, *extra)
    for word in words:
        assert word in said


def test_what_the_protocol_says_may_differ_in_the_runs(runs, tmp_path):
    invoke("compare", runs / "ours", runs / "shots", *FEW, "--shots", "4", "--out", tmp_path)
    assert strict(tmp_path / "comparison.json")["protocol"]["shots"] == 4


def test_one_run_or_the_same_twice_is_no_comparison(runs, tmp_path):
    assert "two run folders or more" in refused("compare", runs / "ours")
    assert "named twice" in refused("compare", runs / "ours", runs / "ours")
    assert "does not exist" in refused("compare", runs / "ours", tmp_path / "nothing")


# --- what a hostile user found -------------------------------------------------------------------


def test_the_picture_is_of_the_split_that_was_asked_for(runs, tmp_path):
    """Here only the training split has classes enough."""
    from ibaml.assessment import assess, write_assessment

    assessment = assess(open_run(runs / "norm"), Protocol(tasks=2, queries=3, split="train"))
    drawn = []
    source = assessment.source
    real = type(source).episodes
    type(source).episodes = lambda self, split: drawn.append(split) or real(self, split)
    try:
        write_assessment(assessment, tmp_path, {}, "train")
    finally:
        type(source).episodes = real
    assert set(drawn) == {"train"}


def test_regression_and_classes_do_not_mix(runs):
    features = runs / "features.npz"
    for words_, command in (
        ("is regression, and", ("evaluate", runs / "waves", "--data", features)),
        ("ways is for classification", ("evaluate", runs / "waves", "--ways", "3")),
        ("does not fit", ("evaluate", runs / "ours", *FEW, "--data", "sinusoids")),
        ("is classes and", ("compare", runs / "ours", runs / "waves", *FEW)),
    ):
        assert words_ in refused(*command)


def test_other_data_do_not_take_what_belongs_to_the_runs_own(runs, monkeypatch):
    """A run on a list of images of side 20, judged by other images, and by what are none."""
    own = resolve(
        {"data": "l.csv", "root": "here", "splits": "s.json", "image_size": 20, "augment": True}
    )
    run = replace(open_run(runs / "ours"), settings=own, data={"example_shape": [3, 28, 28]})
    seen = []
    monkeypatch.setattr("ibaml.assessment.tasks.open_tasks", lambda given, *_: seen.append(given))
    for given in (
        {"data": "omniglot"}, {"data": "omniglot", "root": "there"}, {"data": "photos"},
        {"data": "f.npz"},
    ):  # fmt: skip
        with pytest.raises(AttributeError):  # no tasks come back
            open_test(run, Protocol(**given))
    assert [(s.root, s.splits, s.image_size, s.augment) for s in seen] == [
        (None, None, None, True), ("there", None, None, True), (None, None, 28, True),
        (None, None, None, False),
    ]  # fmt: skip


def test_what_the_data_do_not_read_is_refused_in_a_test_too(runs, tmp_path):
    (tmp_path / "t.csv").write_text(
        "who,x,y\n" + "".join(f"t{t},{i},{i * t}\n" for t in range(40) for i in range(8))
    )
    columns = {"task": "who", "features": "x", "target": "y", "hidden": "4", "method": "maml"}
    brief = {"iterations": 1, "tasks": 2, "val_every": 0, "tensorboard": False, "threads": 1}
    train(resolve({"data": str(tmp_path / "t.csv"), **columns, **brief}), tmp_path / "run")
    invoke("evaluate", tmp_path / "run", "--tasks", "3")
    for words_, command in (
        ("queries is not read", ("evaluate", tmp_path / "run", "--queries", "3")),
        ("root is not read", ("evaluate", runs / "ours", *FEW, "--root", tmp_path)),
        ("root is not read", ("evaluate", runs / "ours", "--data", "glyphs", "--root", tmp_path)),
    ):
        assert words_ in refused(*command)


def test_a_run_under_two_names_is_the_same_run(runs, tmp_path):
    (tmp_path / "link").symlink_to(runs / "ours")
    assert "named twice" in refused("compare", runs / "ours", tmp_path / "link", *FEW)


def test_a_name_may_look_like_mathematics(tmp_path):
    name = "x$\\frac{$"
    file = features_file(tmp_path / f"{name}.npz")
    settings = resolve(
        {"data": file, "ways": 3, "queries": 3, "hidden": "4", "method": "fomaml", "threads": 1,
         "iterations": 1, "val_every": 0, "tensorboard": False}
    )  # fmt: skip
    train(settings, tmp_path / name)
    invoke("evaluate", tmp_path / name, *FEW)


@pytest.mark.parametrize("where", ["file", "file/below"])
def test_a_place_that_cannot_be_written_is_said_before_the_work(runs, tmp_path, where, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr("ibaml.assessment.assess", None)  # it is not called
    refused("evaluate", runs / "ours", *FEW, "--out", tmp_path / where)
    refused("compare", runs / "ours", runs / "maml", *FEW, "--out", tmp_path / where)


def test_tasks_whose_adaptation_diverged_are_counted(tmp_path):
    """There the prior answers: figures of a learner that never adapts are told as such."""
    run, _ = train(waves(method="maml", inner_lr=1e6, iterations=1, val_every=0), tmp_path / "run")
    with pytest.warns(RuntimeWarning, match="diverged"):
        shown = invoke("evaluate", run.path, "--tasks", "4")
    assert "adaptation diverged in 4 of 4 tasks" in shown
    assert strict(run.path / "evaluation" / "summary.json")["diverged"] == {"": 4}


def test_a_run_is_judged_from_another_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    features_file(tmp_path / "features.npz")
    settings = {"data": "features.npz", "ways": 3, "queries": 3, "method": "fomaml", "threads": 1}
    train(resolve({**settings, "iterations": 1, "val_every": 0, "tensorboard": False}), "run")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    invoke("evaluate", "../run", *FEW)
