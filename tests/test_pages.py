"""`ibaml report`: the page shows the figures that there are, judges no test task of its own accord,
and whatever a file, a class or a message is called, it is text."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from commands import invoke, refused
from ibaml.answers import Classifier
from ibaml.assessment import Protocol, assess, differences, read_assessment
from ibaml.cli import app
from ibaml.evaluation import ClassScores
from ibaml.pages.classifier import answered_by_the_others
from ibaml.pages.log import Log
from ibaml.pages.tasks import chosen, hardest_classes
from ibaml.pages.words import value, with_interval
from ibaml.tasks import EpisodeTasks
from ibaml.training import load, open_run
from reported import (
    HOSTILE,
    NAME,
    classifier_file,
    pictures_run,
    read_page,
    reproduction,
    vectors_run,
    waves_run,
)

FEW = ("--tasks", "4", "--queries", "3")


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("reported")


@pytest.fixture(scope="module")
def vectors(root) -> Path:
    return vectors_run(root)


@pytest.fixture(scope="module")
def judged(root, vectors) -> Path:
    """A run with the evaluation of test tasks."""
    run = root / "judged"
    shutil.copytree(vectors, run)
    invoke("evaluate", run, *FEW)
    return run


def words(page) -> str:
    return re.sub(r"[ \n]+", " ", " ".join(page.text))


# --- what a page is made of ----------------------------------------------------------------------


def test_a_run_that_was_only_trained_is_judged_on_validation_tasks(vectors, monkeypatch):
    looked_at = set()
    drawn = EpisodeTasks.batches

    def batches(self, split, keys):
        looked_at.add(split)
        return drawn(self, split, keys)

    monkeypatch.setattr(EpisodeTasks, "batches", batches)
    said = invoke("report", vectors, "--tasks", "3")
    assert str(vectors / "report.html") in said.replace("\n", "")
    assert looked_at == {"val"}
    page = read_page(vectors / "report.html")
    assert "3 validation tasks" in words(page)
    assert "ibaml evaluate" in words(page)
    assert not (vectors / "evaluation").exists()


def test_whatever_a_thing_is_called_it_is_text(vectors):
    invoke("report", vectors, "--tasks", "3")
    page = read_page(vectors / "report.html")
    flat = " ".join(HOSTILE.split())
    assert words(page).count(flat) > 12  # classes, the verdict, its figures, a note, the command
    assert NAME in page.text
    assert "49" not in [t.strip() for t in page.text]  # no template in a name is filled in


def test_an_evaluated_run_shows_the_figures_of_its_evaluation(judged):
    invoke("report", judged)
    page = words(read_page(judged / "report.html"))
    summary = json.loads((judged / "evaluation" / "summary.json").read_text())["results"][""]
    for metric in ("accuracy", "nll", "ece"):
        assert value(metric, summary[metric]["value"]) in page
    assert "4 test tasks" in page
    assert "--tasks 4 --queries 3" in page  # the command that judges so again
    assert "These are validation tasks" not in page


def test_an_evaluation_of_other_weights_or_a_damaged_one_is_not_shown(judged, tmp_path):
    odd = {
        "iteration": (99, "is of iteration 99"),
        "results": (["", "x"], "lacks scores"),
        "protocol": ({"tasks": 5}, "not of the tasks 0 to 4"),
    }
    for change, (to, said) in odd.items():
        run = tmp_path / change
        shutil.copytree(judged, run)
        file = run / "evaluation" / "summary.json"
        summary = json.loads(file.read_text())
        summary[change] = to
        file.write_text(json.dumps(summary))
        invoke("report", run, "--tasks", "3")
        page = words(read_page(run / "report.html"))
        assert said in page
        assert "3 validation tasks" in page


def test_without_its_data_a_run_still_has_a_page(root, judged, tmp_path):
    run = tmp_path / "moved"
    shutil.copytree(judged, run)
    for name in ("config.json", "config.toml"):
        text = (run / name).read_text()
        (run / name).write_text(text.replace(str(root / "vectors.npz"), str(tmp_path / "no.npz")))
    invoke("report", run)
    page = words(read_page(run / "report.html"))
    assert "No task can be shown" in page
    assert "4 test tasks" in page
    shutil.rmtree(run / "evaluation")
    invoke("report", run)
    assert "on validation tasks could not be found out" in words(read_page(run / "report.html"))


def test_pictures_and_regression_have_pages_with_their_tasks(root):
    invoke("report", run := pictures_run(root), "--tasks", "3")
    page = read_page(run / "report.html")
    assert len(page.all("img")) == 3 * 3 * (1 + 3)  # tasks, ways, an example and its queries
    assert all("query of" in i["alt"] or "example of" in i["alt"] for i in page.all("img"))
    invoke("report", run := waves_run(root), "--tasks", "3")
    page = read_page(run / "report.html")
    labels = [svg.get("aria-label") for svg in page.all("svg")]
    assert labels.count("Prediction, examples and truth of a task") == 3
    assert "in 95 % interval" in words(page)


def test_several_runs_stand_side_by_side_with_paired_differences(root, judged):
    other = root / "other"
    vectors_run(root, "other", method="maml", seed=1)
    invoke("evaluate", other, *FEW)
    invoke("report", judged, other, "--out", root / "both.html")
    page = words(read_page(root / "both.html"))
    scores = {
        path.name: assess(open_run(path), Protocol(tasks=4, queries=3)).main
        for path in (judged, other)
    }
    gap = differences(scores)["other"]
    assert with_interval("nll", gap["nll"], "+") in page
    assert with_interval("accuracy", gap["accuracy"], "+") in page
    invoke("evaluate", other, "--tasks", "3", "--queries", "3")
    invoke("report", judged, other, "--out", root / "both.html")
    page = words(read_page(root / "both.html"))
    assert "There are no paired differences: the runs were judged on different tasks." in page


def test_a_page_without_matplotlib_has_the_tables(judged, monkeypatch):
    monkeypatch.setattr("ibaml.pages.drawing.missing", lambda library: "it is not there")
    invoke("report", judged)
    page = read_page(judged / "report.html")
    assert not page.all("svg")
    assert "Accuracy by the share answered" in words(page)


# --- what a person may name ----------------------------------------------------------------------


def test_what_is_no_subject_is_refused_with_a_sentence(root, judged, tmp_path):
    (tmp_path / "empty").mkdir()
    assert "nothing to report on" in refused("report", tmp_path / "empty")
    assert "does not exist" in refused("report", tmp_path / "gone")
    assert "named twice" in refused("report", judged, judged)
    assert "ends in .html" in refused("report", judged, "--out", tmp_path / "page.pdf")
    assert "is for a classifier" in refused("report", judged, "--pictures", tmp_path)
    assert "two kinds" in refused("report", judged, waves_run(tmp_path), "--tasks", "2")
    (tmp_path / "no.ibaml").write_bytes(b"no classifier")
    assert "no.ibaml" in refused("report", tmp_path / "no.ibaml")
    assert "no.ibaml is no run folder" in refused("report", judged, tmp_path / "no.ibaml")


def test_a_page_goes_where_it_is_sent_and_is_written_whole(judged, tmp_path, monkeypatch):
    invoke("report", judged, "--out", tmp_path)
    read_page(tmp_path / "report.html")
    before = (tmp_path / "report.html").read_bytes()
    invoke("report", judged, "--out", tmp_path)
    assert (tmp_path / "report.html").read_bytes() == before
    monkeypatch.setattr("ibaml.pages.write.write_whole", lambda path, content: 1 / 0)
    done = CliRunner().invoke(app, ["report", str(judged), "--out", str(tmp_path)])
    assert isinstance(done.exception, ZeroDivisionError)
    assert [p.name for p in tmp_path.iterdir()] == ["report.html"]


# --- a classifier, a reproduction ----------------------------------------------------------------


def test_a_classifier_shows_which_examples_to_look_at(tmp_path):
    file, folder = classifier_file(tmp_path)
    said = invoke("report", file, "--pictures", folder)
    assert str(tmp_path / "shop-report.html") in said.replace("\n", "")
    page = read_page(tmp_path / "shop-report.html")
    assert len(page.all("img")) == 13
    told = words(page)
    assert "12 of 13 rightly" in told
    assert "2/wrong.jpg" in told
    (tmp_path / "empty").mkdir()
    assert "--pictures" in refused("report", file, "--pictures", tmp_path / "empty")


def test_an_example_is_answered_as_if_it_had_never_been_added(tmp_path):
    shop = Classifier.load(classifier_file(tmp_path)[0])
    checks = answered_by_the_others(shop)
    assert [check.row for check in checks] == list(range(13))
    for check in checks[::4]:
        others = Classifier()
        rest = [i for i in range(13) if i != check.row]
        others.add(shop.x[rest], [shop.labels[i] for i in rest])
        answer = others.answer(shop.x[check.row : check.row + 1])
        assert answer.best == [check.said]
        assert answer.probabilities.max() == pytest.approx(check.probability, abs=1e-5)


def test_a_reproduction_shows_its_pictures_and_findings_and_reads_nothing_else(tmp_path):
    (tmp_path / "secret.png").write_bytes(b"secret")
    folder = reproduction(tmp_path / "x" / "paper")
    invoke("report", folder)
    page = read_page(folder / "report.html")
    assert len(page.all("img")) == 1
    told = words(page)
    assert "2 findings agree with the paper, 1 do not" in told
    assert "gone.png cannot be shown" in told
    assert "secret" not in told
    invoke("report", folder / "b")
    assert "it does" in words(read_page(folder / "b" / "report.html"))


# --- figures -------------------------------------------------------------------------------------


def test_kept_scores_are_those_that_were_written(judged, root):
    kept = read_assessment(judged / "evaluation")
    assert kept is not None
    fresh = assess(open_run(judged), Protocol(tasks=4, queries=3))
    for name, scores in fresh.scores.items():
        again = kept.scores[name]
        assert isinstance(again, ClassScores)
        assert again.keys == scores.keys
        np.testing.assert_array_equal(again.correct, scores.correct)
        for part in ("nll", "confidence", "brier"):
            np.testing.assert_allclose(getattr(again, part), getattr(scores, part), rtol=2e-7)
    assert read_assessment(root) is None


def test_the_hardest_classes_are_counted_query_by_query(judged):
    protocol = Protocol(tasks=6, queries=3, split="val")
    found = assess(open_run(judged), protocol)
    source, learner = found.source, found.learner
    right: dict[str, list[bool]] = {}
    for key in range(6):
        rows, _ = source.episodes("val").draw(key)
        batch = source.batches("val", [key])[0]
        best = learner.adapt_all(batch).predict_proba(batch.query_x)[0].argmax(-1)
        for w, row in enumerate(rows):
            name = source.data.classes[source.data.labels[row[0]]]
            right.setdefault(name, []).extend((best == w)[batch.query_y[0] == w].tolist())
    (table,) = hardest_classes([found.main], ["a"], source, "val", "")
    for name, tasks, share in table.rows:
        assert share == value("accuracy", float(np.mean(right[name])))
        assert int(tasks) == len(right[name]) / 3
    shares = [float(row[2].split()[0]) for row in table.rows]
    assert shares == sorted(shares)


def test_tasks_to_show_are_the_middle_one_and_the_hardest():
    p = np.full((5, 2, 2), 0.5)
    p[..., 0] += np.array([0.1, -0.2, 0.3, -0.4, 0.2])[:, None]
    p[..., 1] = 1 - p[..., 0]
    scores = ClassScores.of([7, 3, 1, 9, 5], p, np.zeros((5, 2), int))
    assert [key for key, _ in chosen(scores)] == [7, 9, 3]


def test_the_prior_of_a_page_is_that_of_the_learner(vectors):
    invoke("report", vectors, "--tasks", "2")
    page = words(read_page(vectors / "report.html"))
    learner = load(vectors)
    parameters = dict(learner.named_parameters())
    widths = next(p for n, p in parameters.items() if n.startswith("log_var") and "bias" not in n)
    middle = float(widths.detach().double().median())
    assert f"{middle:.3g}".replace("-", "−") in page


def test_a_log_adds_up_the_times_of_its_processes_and_passes_over_what_is_no_number():
    lines = [
        {"step": 1, "loss": 2.0, "tasks": 4, "left_out": 1, "seconds": 3.0},
        {"step": 2, "loss": None, "tasks": 4, "left_out": 0, "seconds": 5.0},
        {"step": 2, "val_nll": 1.0, "val_accuracy": True, "seconds": 6.0},
        {"step": 3, "loss": 1.0, "tasks": 10**400, "left_out": "x", "seconds": 2.0},
        {"step": 4, "val_nll": 0.5, "val_accuracy": 0.9, "seconds": 4.0},
        {"step": "x", "val_nll": 0.1},
        {"note": ["odd"]},
    ]
    log = Log.of(lines)
    assert log.seconds == 6.0 + 4.0
    assert log.training.at == (1.0, 3.0)
    assert log.left_out == (1, 8)
    assert log.best == 4
    assert log.validation["accuracy"].values == (0.9,)
    assert log.notes == ["['odd']"]
    assert Log.of([]).best is None
    curve = Log.of([{"step": i, "loss": float(i)} for i in range(1001)]).training.thinned(100)
    assert len(curve.at) <= 100
    assert torch.tensor(curve.values).diff().min() > 0
