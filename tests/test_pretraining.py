"""Does pre-training learn features, and does a stopped run go on bit for bit?"""

from __future__ import annotations

import os
import signal
from dataclasses import replace

import numpy as np
import pytest
import torch

import ibaml
from ibaml.tasks import Dataset, Episodes, EpisodeTasks
from ibaml.tasks.augment import Augment
from ibaml.tasks.errors import DataError
from ibaml.tasks.passes import Passes
from ibaml.training import RunError, SettingsError, open_run, pretrain, resolve, resume, train
from ibaml.training.pretraining import FILE, Pretraining, usual_augment
from ibaml.training.start import load_run

SIDE = 16
SMALL = {
    "model": "conv4", "channels": 4, "image_size": SIDE, "queries": 2, "tasks": 2, "iterations": 2,
    "val_every": 0, "tensorboard": False, "threads": 1, "device": "cpu",
}  # fmt: skip


def pictures(classes: int = 12, each: int = 8) -> Dataset:
    """Noisy pictures of a stripe whose place and color is that of the class."""
    rng = np.random.default_rng(0)
    x = rng.integers(0, 120, (classes, each, 3, SIDE, SIDE), dtype=np.uint8)
    for c in range(classes):
        x[c, :, c % 3, (c // 3) * 4 : (c // 3) * 4 + 4] += 130
    splits = {
        "train": tuple(range(classes - 5)),
        "val": (),
        "test": tuple(range(classes - 5, classes)),
    }
    labels = np.repeat(np.arange(classes), each)
    names = tuple(f"c{c}" for c in range(classes))
    return Dataset("stripes", x.reshape(-1, 3, SIDE, SIDE), labels, names, splits)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The same pictures as files."""
    from PIL import Image

    root, data = tmp_path_factory.mktemp("stripes"), pictures()
    for split, members in data.splits.items():
        for c in members:
            for i, row in enumerate(np.flatnonzero(data.labels == c)):
                path = root / split / data.classes[c] / f"{i}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(data.examples[row].transpose(1, 2, 0)).save(path)
    return root


def settings(folder, **given):
    return resolve({"data": str(folder), "ways": 3, **SMALL, **given})


def test_a_pass_has_every_example_once_with_the_label_of_its_class():
    passes = Passes(pictures(), batch=8)
    assert (passes.classes, passes.steps) == (7, 7)
    converted = Episodes(pictures(), "train", ways=2, queries=1)._converted
    expected = converted(torch.arange(56)[None])[0]
    for epoch in (0, 1):
        found = [passes.examples(epoch * 7 + step) for step in range(7)]
        x, y = (torch.cat(parts) for parts in zip(*found, strict=True))
        order = [int((expected == one).flatten(1).all(1).nonzero()) for one in x]
        assert sorted(order) == list(range(56))
        assert y.tolist() == [row // 8 for row in order]


def test_rotations_are_classes_and_keep_their_pictures():
    plain, turned = Passes(pictures(), batch=500), Passes(pictures(), batch=500, rotations=True)
    assert turned.classes == 4 * plain.classes
    x, y = turned.examples(0)
    assert torch.bincount(y).tolist() == [8] * 28
    upright, labels = plain.examples(0)
    for quarter in range(4):
        back = torch.rot90(x[y // 7 == quarter], -quarter, (-2, -1))
        own = y[y // 7 == quarter] % 7
        key = [tuple(row) for row in torch.cat([own[:, None], back.flatten(1)], 1).tolist()]
        known = [tuple(r) for r in torch.cat([labels[:, None], upright.flatten(1)], 1).tolist()]
        assert sorted(key) == sorted(known)


def test_too_few_classes_are_refused():
    data = replace(pictures(), splits={"train": (0,), "val": (), "test": (1, 2)})
    with pytest.raises(DataError, match="a classifier needs two"):
        Passes(data)


def test_gray_images_are_not_mirrored_and_vectors_not_augmented():
    data = pictures()
    assert usual_augment(data) == Augment(flip=True, crop=1, color=0.4)
    gray = replace(data, examples=data.examples[:, :1])
    assert usual_augment(gray) == Augment(flip=False, crop=1)
    vectors = replace(data, examples=data.examples.reshape(len(data.labels), -1).astype(np.float32))
    assert usual_augment(vectors) is None


@pytest.mark.parametrize("name", ["conv4", "resnet12"])
def test_features_tell_new_classes_apart(name):
    data, heard = pictures(), []
    if name == "conv4":
        model = ibaml.nn.conv4(5, channels=8, image_size=SIDE)
    else:
        model = ibaml.nn.resnet12(5, widths=(4, 4, 8, 8))
    head = [p.clone() for p in model.head.parameters()]
    statistics = {n: b.clone() for n, b in model.named_buffers() if n.endswith("running_mean")}
    found = pretrain(model, data, epochs=12, on_epoch=lambda *figures: heard.append(figures))
    assert found is model
    assert all(torch.equal(a, b) for a, b in zip(head, model.head.parameters(), strict=True))
    assert all(
        not torch.equal(b, statistics[n]) for n, b in model.named_buffers() if n in statistics
    )
    assert [epoch for epoch, _, _ in heard] == list(range(1, 13))
    assert heard[-1][2] > 0.6 > 0.4 > heard[0][2]  # of seven classes
    learner = ibaml.methods.ibaml(model.eval(), posterior="prototypes", data=data)
    batch = EpisodeTasks(data, ways=5, shots=1, queries=5).episodes("test").batch(range(20))
    right = learner.adapt_all(batch).predict_proba(batch.query_x).argmax(-1) == batch.query_y
    assert right.double().mean() > 0.6


def test_a_run_starts_from_its_features(folder, tmp_path):
    run, _ = train(settings(folder, pretrain=2, iterations=0), tmp_path / "run")
    learner, _ = load_run(run)
    data = ibaml.tasks.open_data(str(folder), image_size=SIDE)
    from ibaml.training.build import build_network

    own = pretrain(build_network(run.settings, (3, SIDE, SIDE)), data, epochs=2)
    state = learner.model.state_dict()
    assert any(n.endswith("running_var") for n in state)
    for name, value in own.state_dict().items():
        if not name.startswith("head."):
            torch.testing.assert_close(state[name], value, rtol=0, atol=0)
    notes = (tmp_path / "run/log.jsonl").read_text()
    assert "pre-training: epoch 2 of 2, 7 classes, loss" in notes


def test_a_stopped_run_goes_on_bit_for_bit(folder, tmp_path, monkeypatch):
    given = settings(folder, pretrain=3, rotations=True)
    whole, _ = train(given, tmp_path / "whole")
    advance = Pretraining.advance

    def interrupted(self):
        advance(self)
        if self.step == 5:  # in the middle of an epoch of three batches
            os.kill(os.getpid(), signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(Pretraining, "advance", interrupted)
        _, outcome = train(given, tmp_path / "parts")
    assert (outcome.step, outcome.signal) == (0, signal.SIGINT)
    assert not list((tmp_path / "parts/checkpoints").glob("step-*"))
    begun = []

    def counted(self):
        begun.append(self.step)
        advance(self)

    with monkeypatch.context() as patch:
        patch.setattr(Pretraining, "advance", counted)
        resume(tmp_path / "parts")
    assert begun[0] == 5
    resumed = open_run(tmp_path / "parts")
    for which in ("last", "best"):
        ours, theirs = (load_run(run, which)[0].state_dict() for run in (whole, resumed))
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_meta_training_that_has_begun_is_not_pre_trained_again(folder, tmp_path, monkeypatch):
    run, _ = train(settings(folder, pretrain=1), tmp_path / "run")
    monkeypatch.setattr("ibaml.training.start.pretrain_run", None)
    resume(run.path, iterations=3)


def test_a_damaged_file_of_this_phase_is_refused(folder, tmp_path):
    run, _ = train(settings(folder, pretrain=1, iterations=0), tmp_path / "run")
    for checkpoint in run.checkpoints.glob("*"):
        checkpoint.unlink()
    content = bytearray((run.path / FILE).read_bytes())
    content[-1] ^= 1
    (run.path / FILE).write_bytes(content)
    with pytest.raises(RunError, match="cannot be continued"):
        resume(run.path)


def test_several_processes_are_refused(folder, tmp_path):
    from ibaml.training.processes import Processes
    from ibaml.training.start import _go

    run = train(settings(folder, iterations=0), tmp_path / "run")[0]
    run = replace(run, settings=settings(folder, pretrain=1))
    with pytest.raises(RunError, match="leave torchrun out"):
        _go(run, None, None, Processes(0, 2), lambda *_: [], None)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"label_smoothing": 0.2}, "label_smoothing is for pre-training: give pretrain too"),
        ({"data": "sinusoids", "pretrain": 1}, "pretrain is for classification"),
        ({"data": "x.npz", "pretrain": 1}, "use model mlp, or leave it out"),
        ({"pretrain": -1}, "pretrain must be 0 or more"),
        ({"pretrain": 1, "label_smoothing": 1.5}, "label_smoothing must be"),
    ],
)
def test_what_nobody_would_read_is_refused(given, sentence):
    with pytest.raises(SettingsError, match=sentence):
        resolve(given)
