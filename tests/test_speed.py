"""`ibaml bench training`: whole runs, and where their time goes."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from torch import nn

import ibaml
from ibaml.speed.floor import floor_of
from ibaml.speed.generated import photographs
from ibaml.tasks import image_folder
from ibaml.training import spans as spans_
from ibaml.training.spans import OUTSIDE, Spans
from runs import features_file
from runs import ibaml as command


def test_time_in_a_span_within_another_counts_once(monkeypatch):
    now = 0.0
    monkeypatch.setattr(spans_, "_now", lambda: (now, 10 * now))
    spans = Spans()
    now = 1.0
    with spans("step"):
        now = 3.0
        with spans("data"):
            now = 7.0
        now = 8.0
    now = 10.0
    spans.settle()
    assert spans.seconds == {OUTSIDE: 3.0, "step": 3.0, "data": 4.0}
    assert spans.processor == {OUTSIDE: 30.0, "step": 30.0, "data": 40.0}
    assert spans.counts == {"step": 1, "data": 1}


def test_a_row_a_run_and_the_parts_are_the_whole(tmp_path):
    data = features_file(tmp_path / "vectors.npz", classes=60, each=16)
    done = command(
        "bench", "training", "--data", data, "--methods", "head,maml", "--shots", "1",
        "--train-ways", "5", "--tasks", "2", "--skip", "2", "--iterations", "3", "--alone", "3",
        "--evaluate", "5", "--threads", "1", "--device", "cpu", "--out", tmp_path / "speed.json",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "speed.json").read_text())
    rows = found["rows"]
    assert [(r["name"], r["tasks"]) for r in rows] == [("head", 2), ("maml", 2)]
    for row in rows:
        assert row["train_ways"] == 5
        assert row["step"] == pytest.approx(row["host"] + row["wait"])
        parts = sum(row[n] for n in ("step", "data", "validation", "checkpoint", "log"))
        assert 1e3 * row["tasks"] / row["tasks_per_second"] == pytest.approx(parts)
        assert min(row[n] for n in ("host", "data", "validation", "checkpoint", "log")) > 0
        assert row["share"] == pytest.approx(row["tasks_per_second"] / row["alone"])
        assert row["loss"] < 3
        assert row["evaluation"] > 0
    text = (tmp_path / "speed.txt").read_text()
    assert "All of it is processor time" in text
    assert " ".join(text.split()) in " ".join(done.stdout.split())


def test_the_floor_counts_what_convolutions_and_products_do():
    """By hand: 2 · multiplications, of the forward pass and twice of the backward one (once in the
    first layer, whose inputs need no gradient)."""
    net = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 4, 3, padding=1))
    x = torch.randn(1, 5, 3, 6, 6)
    y = torch.zeros(1, 5, dtype=torch.long)
    floor = floor_of(net, ibaml.TaskBatch(x, y, x, y, validate=False, classes=1))
    first, second = 10 * 36 * 9 * 3 * 8, 10 * 36 * 9 * 8 * 4
    assert floor.flops == 2 * (2 * first + 3 * second)
    images, hidden, outputs = 10 * 3 * 36, 10 * 8 * 36, 10 * 4 * 36
    weights = 27 * 8 + 8, 72 * 4 + 4
    forward = images + weights[0] + hidden + hidden + weights[1] + outputs
    assert floor.bytes >= 4 * 2 * forward
    assert floor.tasks_per_second > 0


@pytest.mark.parametrize(
    ("given", "word"),
    [(["--methods", "mammal"], "methods"), (["--skip", "0"], "skip"), (["--shots", "x"], "shots")],
)
def test_what_is_wrong_is_a_sentence(given, word, tmp_path):
    done = command("bench", "training", *given, "--out", tmp_path / "speed.json")
    said = done.stdout + done.stderr
    assert done.returncode != 0
    assert word in said
    assert "Traceback" not in said


def test_generated_photographs_give_tasks_of_five_shots(tmp_path, monkeypatch):
    monkeypatch.setenv("IBAML_CACHE", str(tmp_path / "cache"))
    data = image_folder(photographs(tmp_path / "photographs", 1300))
    assert data.examples.shape == (1300, 3, 84, 84)
    assert min(np.bincount(data.labels)) >= 20
    assert min(len(data.splits[name]) for name in ("train", "val")) >= 5
