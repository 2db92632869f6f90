"""Does `ibaml bench quality` train, choose and test every method once, even if it is stopped?"""

from __future__ import annotations

import json

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from ibaml.cli import app
from ibaml.evaluation import ClassScores, paired
from ibaml.fields import SettingsError
from ibaml.quality import QualityOptions, compare, write, written
from ibaml.quality import jobs as jobs_module
from ibaml.quality.arms import ARMS, USUAL
from ibaml.quality.jobs import _Jobs, merged
from ibaml.quality.options import QUICK
from ibaml.training.pretraining import Pretraining

SIDE = 16
SMALL = {
    "shots": "1", "ways": 3, "model": "conv4", "channels": 4, "image_size": SIDE, "queries": 2,
    "train_tasks": 2, "tasks": 1, "validations": 1, "val_tasks": 3, "test_tasks": 6,
    "test_queries": 3, "threads": 1, "device": "cpu",
}  # fmt: skip


def options(**given):
    return QualityOptions.of({"arms": "ours,protonet", "seeds": 1, "tune": False, **SMALL, **given})


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Pictures of a stripe whose place and color is that of the class, in three splits."""
    root, rng = tmp_path_factory.mktemp("stripes"), np.random.default_rng(0)
    for c in range(12):
        for i in range(8):
            x = rng.integers(0, 120, (SIDE, SIDE, 3), dtype=np.uint8)
            x[(c // 3) * 4 : (c // 3) * 4 + 4, :, c % 3] += 130
            path = root / ("train", "train", "val", "test")[c % 4] / f"c{c}" / f"{i}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(x).save(path)
    return str(root)


def test_a_stopped_comparison_goes_on_and_says_the_same(folder, tmp_path, monkeypatch):
    given = options(seeds=2, pretrain=1)
    batches = []
    advance = Pretraining.advance
    monkeypatch.setattr(Pretraining, "advance", lambda p: batches.append(p.step) or advance(p))
    began = []
    train = jobs_module.train
    monkeypatch.setattr(
        jobs_module, "train", lambda s, *a, **k: began.append(s) or train(s, *a, **k)
    )
    whole = compare(folder, given, tmp_path / "whole", lambda *_: None)
    assert len(began) == 3
    assert batches == [0, 0]  # one batch an epoch; once a seed, not once a method
    assert [row.arm for row in whole.rows] == ["ours", "protonet"]
    assert [sorted(row.scores) for row in whole.rows] == [[0, 1], [0]]

    def stops(done: int, total: int, what: str) -> None:
        if what.startswith("ProtoNet"):
            raise KeyboardInterrupt

    began.clear()
    with pytest.raises(KeyboardInterrupt):
        compare(folder, given, tmp_path / "parts", stops)
    parts = compare(folder, given, tmp_path / "parts", lambda *_: None)
    assert [s.posterior for s in began] == ["full", "full", "prototypes"]
    for ours, theirs in zip(whole.rows, parts.rows, strict=True):
        for seed, scores in ours.scores.items():
            np.testing.assert_array_equal(scores.nll, theirs.scores[seed].nll)

    files = write(whole, tmp_path / "whole")
    content = json.loads((tmp_path / "whole/result.json").read_text())
    expected = paired(whole.rows[0].scores[0], whole.rows[1].scores[0])["nll"]
    assert content["rows"][1]["minus first"]["nll"]["value"] == pytest.approx(expected.value)
    text = files[0].read_text()
    assert "iBaML (2 seeds)" in text
    assert "running (inductive)" in text
    assert "validation nll after" in text


def test_settings_are_chosen_by_the_nll_of_validation_tasks(folder, tmp_path):
    given = options(arms="ours", tune=True)
    found = compare(folder, given, tmp_path, lambda *_: None)
    row = found.rows[0]
    assert [one["settings"] for one in row.tried] == list(ARMS["ours"].candidates)
    best = min(row.tried, key=lambda one: one["nll"])
    assert row.settings == best["settings"]
    assert "(chosen)" in "\n".join(written(found))
    assert len(list((tmp_path / "runs").iterdir())) == 1  # the others are deleted
    again = compare(folder, given, tmp_path, lambda *_: None)  # from the parts
    assert again.rows[0].tried == row.tried


def test_the_minutes_stop_it_inside_a_run_and_the_same_command_goes_on(
    folder, tmp_path, monkeypatch
):
    now = [0.0]
    monkeypatch.setattr(jobs_module.time, "monotonic", lambda: now[0])
    seen = []

    def watch(done: int, total: int, what: str) -> None:
        seen.append(what)
        now[0] += 100.0 * what.endswith("iteration 1 of 6")

    found = compare(folder, options(minutes=1, train_tasks=6), tmp_path, watch)
    assert (found.rows, found.missing) == ([], 2)
    before = sum("iteration" in what for what in seen)
    assert 1 <= before < 6
    assert "2 rows are missing: the same command continues" in list(written(found))[-1]
    seen.clear()
    found = compare(folder, options(train_tasks=6), tmp_path, watch)
    ours = [what for what in seen if what.startswith("iBaML") and "iteration" in what]
    assert len(ours) == 6 - before  # the first run went on where it was
    assert found.missing == 0


def test_every_method_has_valid_settings(folder, tmp_path):
    jobs = _Jobs(folder, options(tune=True, arms=",".join(ARMS)), tmp_path, lambda *_: None)
    for arm in ARMS:
        for candidate in jobs.candidates(arm):
            settings = jobs.settings(arm, candidate, 1, 0)
            assert settings.iterations * settings.tasks == 2
    assert jobs.settings("anil", {}, 1, 0).adapt == "head"
    assert set(USUAL) <= set(ARMS)


def test_seeds_are_joined_by_task():
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 3, (4, 5))
    seeds = [ClassScores.of(range(4), rng.dirichlet([1.0] * 3, (4, 5)), labels) for _ in range(2)]
    both = merged(seeds)
    mean = (seeds[0].nll.mean(1) + seeds[1].nll.mean(1)) / 2
    np.testing.assert_allclose(both.nll.mean(1), mean)


def test_the_command_writes_its_table(folder, tmp_path):
    words = ["bench", "quality", folder, "--out", str(tmp_path), "--arms", "protonet", "--no-tune"]
    for name, value in SMALL.items():
        words += [f"--{name.replace('_', '-')}", str(value)]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    assert "ProtoNet" in (tmp_path / "result.txt").read_text()


def test_what_is_wrong_is_said_first(folder, tmp_path):
    with pytest.raises(SettingsError, match="is regression"):
        compare("sinusoids", options(), tmp_path, lambda *_: None)
    with pytest.raises(SettingsError, match="arms must name each once"):
        options(arms="ours,ours")
    assert set(QUICK) <= set(QualityOptions.__dataclass_fields__)
    assert QualityOptions.of({"quick": True, "channels": 4}).channels == 4
