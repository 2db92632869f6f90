"""The parts of `make soak`: each event is survived, and the verdict sees what goes wrong."""

from __future__ import annotations

import random
import shutil
import sys

import pytest
import torch

import soak
from ibaml.training import open_run, resume, train
from ibaml.training.checkpoint import pack, unpack
from runs import waves, words
from soak import DAMAGE, Disk, Soak, differences, finished, growth, newest_file, step

GIVEN = {"data": "sinusoids", "hidden": "4", "queries": 3, "tasks": 2, "val_every": 0,
         "checkpoint_every": 5, "log_every": 5, "threads": 1, "tensorboard": False}  # fmt: skip


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    path = tmp_path_factory.mktemp("soak") / "whole"
    train(waves(**GIVEN, iterations=20, val_tasks=2), path)
    shutil.copy(newest_file(path), path / "checkpoints" / "best.safetensors")
    return path


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_run_goes_on_as_if_undisturbed(name, whole, tmp_path):
    cut = tmp_path / "cut"
    shutil.copytree(whole, cut)
    newest_file(cut).unlink()  # a run that was ended after iteration 15
    assert step(cut) == 15
    assert not finished(cut)
    before = {p: p.read_bytes() for p in cut.rglob("*") if p.is_file()}
    (cut / "checkpoints" / "best.safetensors").unlink()
    DAMAGE[name](cut, random.Random(name))
    now = {p: p.read_bytes() for p in cut.rglob("*") if p.is_file()}
    assert now != before
    resume(open_run(cut))
    shutil.copy(newest_file(cut), cut / "checkpoints" / "best.safetensors")
    assert differences(whole, cut) == []
    assert finished(cut)


def test_the_verdict_sees_a_weight_that_differs_a_step_twice_and_a_file_left(whole, tmp_path):
    cut = tmp_path / "cut"
    shutil.copytree(whole, cut)
    assert differences(whole, cut) == []
    tensors, facts = unpack(newest_file(cut).read_bytes())
    name = next(iter(tensors))
    tensors[name] = torch.nextafter(tensors[name], tensors[name] + 1)  # the last bit alone
    newest_file(cut).write_bytes(pack(tensors, facts))
    log = (cut / "log.jsonl").read_text()
    (cut / "log.jsonl").write_text(log + log)
    (cut / "checkpoints" / ".step-1-abc").touch()
    (cut / "checkpoints" / "best.safetensors").unlink()
    found = "\n".join(differences(whole, cut))
    for said in (f"{name} differs", "best.safetensors is missing", "repeats steps", ".step-1-abc"):
        assert said in found


def test_growth_is_seen_and_a_steady_process_is_not_accused():
    steady = [[400.0 + i % 3, 7.0, 4.0] for i in range(60)]
    assert growth(steady) == []
    for column, slope, word in ((0, 1.0, "memory"), (1, 0.1, "descriptors"), (2, 0.1, "threads")):
        leaking = [list(sample) for sample in steady]
        for i, sample in enumerate(leaking):
            sample[column] += slope * i
        assert [word in sentence for sentence in growth(leaking)] == [True]
    assert "only 3 samples" in growth(steady[:3])[0]


@pytest.mark.skipif(sys.platform != "linux", reason="limits of another process")
def test_a_run_whose_disk_is_full_is_resumed_to_the_same_end(tmp_path):
    given = {**GIVEN, "iterations": 40, "val_tasks": 2, "val_every": 20}
    train(waves(**given), tmp_path / "whole")
    work = Soak(tmp_path, Disk(tmp_path / "disk"), random.Random(2), apart=20)
    work.disk.path.mkdir()
    cut = tmp_path / "disk" / "cut"
    work.disturbed(words(given), cut, ["full disk"])
    assert work.wrong == []
    assert work.counts["full disk"] == work.counts["runs to the end"] == 1
    assert differences(tmp_path / "whole", cut) == []


def test_every_kind_of_run_is_one_that_the_command_takes(tmp_path):
    from typer.testing import CliRunner

    from ibaml.cli import app

    vectors = soak.vectors(tmp_path / "v.npz")
    for at, name in enumerate(soak.KINDS):
        given = f"{soak.KINDS[name]} {soak.TASKS}".format(vectors=vectors)
        out = ["--iterations", "0", "--val-every", "0", "--out", str(tmp_path / str(at))]
        done = CliRunner().invoke(app, ["train", *given.split(), *out])
        assert done.exit_code == 0, done.output
