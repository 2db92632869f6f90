"""Nobody waits for a number: figures are read a step late and checkpoints are written by a thread,
and what a run decides, keeps and refuses stays the same."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from ibaml.training import RunError, TrainingError, open_run, resume, train
from ibaml.training.checkpoint import unpack
from ibaml.training.outer import _OPTIMIZERS, build_optimizer, step_where
from ibaml.training.pending import Idle, Pending
from ibaml.training.writer import Snapshot, Writer
from runs import final_state, make, same, waves, words
from test_interruptions import start, steps, wait_for
from test_training import Recorder


def quick(**given):
    return waves(method="fomaml", steps=1, tasks=2, **given)


# --- figures -------------------------------------------------------------------------------------


class Order(Recorder):
    """Notes how many iterations were begun when one is told of."""

    def __init__(self):
        super().__init__()
        self.events = []

    def stepped(self, step):
        self.events.append((step.step, self.trainer.step))

    def validated(self, step, scores, best):
        self.events.append(("validated", step))


def test_an_iteration_is_told_of_when_the_next_has_begun():
    """But for where something is saved or validated: there nothing may be open."""
    seen = Order()
    settings = quick(iterations=9, checkpoint_every=4, val_every=6)
    trainer = seen.trainer = make(settings, watchers=[seen])
    trainer.train()
    assert seen.events == [
        (1, 2), (2, 3), (3, 4), (4, 4), (5, 6), (6, 6), ("validated", 6), (7, 8), (8, 8), (9, 9),
        ("validated", 9),
    ]  # fmt: skip


def test_a_run_that_was_stopped_between_two_readings_goes_on_as_if_nothing_had_been(tmp_path):
    settings = waves(iterations=9, checkpoint_every=100, val_every=5, log_every=1, ema=0.8)
    train(settings, tmp_path / "whole")

    class Stop(Recorder):
        def stepped(self, step):
            if not self.steps:  # after the first iteration of every process
                os.kill(os.getpid(), signal.SIGTERM)
            super().stepped(step)

    def log(run: Path) -> list:
        lines = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
        return [{k: v for k, v in x.items() if k != "seconds"} for x in lines if "step" in x]

    cut = tmp_path / "cut"
    _, outcome = train(settings, cut, watchers=lambda run, learner: [Stop()])
    ends = [outcome.step]
    while ends[-1] < 9:
        saved, _ = open_run(cut).newest()
        assert saved is not None
        assert (saved.facts["pending"] is None) == (ends[-1] in (5, 9))
        _, outcome = resume(cut, watchers=lambda run, learner: [Stop()])
        ends.append(outcome.step)
    assert ends == [2, 3, 4, 5, 7, 8, 9]
    assert same(final_state(cut), final_state(tmp_path / "whole"))
    assert log(cut) == log(tmp_path / "whole")


def test_a_fault_is_diagnosed_by_its_own_iteration_though_the_next_has_begun(tmp_path):
    """The gradient is NaN in iteration 3 only; 4 is sound, and has begun when 3 is looked at."""
    trainer = make(waves(method="maml", iterations=9, patience=1, val_every=0))
    name, parameter = next(iter(trainer.learner.named_parameters()))
    seen = []

    def ruin(gradient):
        return gradient * float("nan") if trainer.step == 2 else gradient

    parameter.register_hook(ruin)
    weights = []
    real = trainer.launch

    def launch():
        pending = real()
        weights.append(parameter.detach().clone())
        seen.append(trainer.step)
        return pending

    trainer.launch = launch
    with pytest.raises(TrainingError, match=f"1 faulty .* meta-gradient of {name} is NaN"):
        trainer.train()
    assert seen[-1] == 4
    assert torch.equal(weights[2], weights[1]), "a step that is not finite moves nothing"
    assert not torch.equal(weights[3], weights[2])


@pytest.mark.parametrize("name", _OPTIMIZERS)
@pytest.mark.parametrize("fused", [False, True])
def test_a_step_that_the_device_forbids_never_was(name, fused):
    """Bit for bit, at the first step and later, whatever the optimizer remembers."""
    if fused and name not in ("adam", "adamw"):
        pytest.skip("no fused kernel is used for it")
    momentum = {"momentum": 0.9} if name in ("sgd", "rmsprop") else {}
    settings = waves(optimizer=name, meta_lr=0.01, weight_decay=0.1, **momentum)

    def run(gradients, where):
        p = torch.nn.Parameter(torch.linspace(-1, 1, 5))
        optimizer = build_optimizer(settings, [p])
        if fused:
            optimizer = type(optimizer)([p], lr=0.01, weight_decay=0.1, fused=True)
        for gradient in gradients:
            p.grad = gradient.clone()
            moved = gradient.isfinite().all()
            if where:
                step_where(optimizer, moved)
            elif bool(moved):
                optimizer.step()
        memory = [t for t in optimizer.state[p].values() if isinstance(t, torch.Tensor)]
        return [p.detach(), *memory]

    torch.manual_seed(0)
    gradients = [torch.randn(5) for _ in range(7)]
    gradients[0][2] = gradients[4][0] = gradients[5][1] = float("nan")
    for a, b in zip(run(gradients, True), run(gradients, False), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    "facts",
    [
        {"step": 3, "rate": 0.1, "figures": [1.0], "names": [], "stale": False},
        {"step": 3, "rate": 0.1, "figures": [1.0] * 6, "names": ["cg_residual"], "stale": False},
        {"step": 3, "rate": 0.1, "figures": ["x"] * 6, "names": [], "stale": False},
        {"step": 3},
        [],
    ],
)
def test_figures_that_a_checkpoint_does_not_hold_are_refused(facts):
    with pytest.raises((ValueError, KeyError, TypeError)):
        Pending.read(facts)


@pytest.mark.parametrize(("ready", "told"), [(0.9, True), (0.4, False)])
def test_a_device_that_waits_for_the_host_is_told_of_once(ready, told):
    idle, chance, said = Idle(), random.Random(0), []
    for _ in range(300):
        reading = SimpleNamespace(ready=chance.random() < ready)
        said.append(idle.sees(Pending(1, 0.1, reading), 8))
    sentences = [text for text in said if text]
    assert len(sentences) == told
    if told:
        assert said.index(sentences[0]) == Idle.SKIPPED + Idle.COUNTED - 1
        assert "raise --tasks (now 8)" in sentences[0]


# --- checkpoints ---------------------------------------------------------------------------------


def test_a_snapshot_is_the_state_of_its_moment():
    x = torch.arange(4.0)
    view = x[1:3]
    snapshot = Snapshot({"x": x, "view": view})
    x.fill_(9.0)
    assert snapshot.tensors()["x"].tolist() == [0, 1, 2, 3]
    assert snapshot.tensors()["view"].tolist() == [1, 2]


def _fail_twice(writer, fail):
    writer.submit(fail)
    raise ZeroDivisionError


def test_a_writer_keeps_the_order_tells_its_errors_and_is_waited_for():
    done, gate = [], threading.Event()

    def fail():
        raise RunError("no room")

    with Writer() as writer:
        writer.submit(lambda: (gate.wait(), done.append(1)))
        writer.submit(lambda: done.append(2))
        writer.check()
        assert done == []
        threading.Timer(0.05, gate.set).start()
        writer.submit(lambda: done.append(3))  # waits for the first
        assert done[0] == 1
        writer.wait()
        assert done == [1, 2, 3]
        writer.submit(fail)
        with pytest.raises(RunError, match="no room"):
            writer.wait()
    writer.submit(lambda: done.append(4))  # a closed one does it at once
    assert done[-1] == 4
    with pytest.raises(RunError, match="no room"), Writer() as writer:
        writer.submit(fail)
    with pytest.raises(ZeroDivisionError), Writer() as writer:  # the run's own error counts
        _fail_twice(writer, fail)


def test_the_run_goes_on_while_a_checkpoint_is_written_and_ends_when_it_is(tmp_path, monkeypatch):
    """With a disk that holds a write back until a later iteration has been told of."""
    from ibaml.training import run as run_

    settings = quick(iterations=12, checkpoint_every=4, val_every=0, log_every=1)
    train(settings, tmp_path / "whole")
    told, held = threading.Event(), []
    real = run_.write_whole

    def slow(path, content):
        if path.name == "step-00000004.safetensors":
            held.append(told.wait(30))
        real(path, content)

    class Tell(Recorder):
        def stepped(self, step):
            if step.step == 7:
                assert not (tmp_path / "run/checkpoints/step-00000004.safetensors").exists()
                told.set()

    monkeypatch.setattr(run_, "write_whole", slow)
    train(settings, tmp_path / "run", watchers=lambda run, learner: [Tell()])
    assert held == [True]
    for name in ("step-00000004", "step-00000008", "step-00000012"):
        a, b = (
            unpack((tmp_path / f"{run}/checkpoints/{name}.safetensors").read_bytes())
            for run in ("whole", "run")
        )
        assert same(a[0], b[0])
        assert a[1] == b[1]


def test_a_disk_that_fills_up_stops_the_run_at_one_of_its_next_iterations(tmp_path, monkeypatch):
    from ibaml import files

    real = os.replace

    def full(a, b):
        if str(b).endswith("step-00000006.safetensors"):
            raise OSError(28, "No space left on device")
        return real(a, b)

    monkeypatch.setattr(files.os, "replace", full)
    seen = Recorder()
    with pytest.raises(
        RunError, match=r"step-00000006.*No space left.*last good checkpoint is .*step-00000003"
    ):
        train(
            quick(iterations=5000, checkpoint_every=3, val_every=0),
            tmp_path / "run",
            watchers=lambda run, learner: [seen],
        )
    assert 6 <= len(seen.steps) <= 20


SLOW = """
import os, sys, time
real = os.fsync
def slow(handle):
    time.sleep(0.03)
    real(handle)
os.fsync = slow
from ibaml.cli import app
app()
"""


def test_killed_while_the_writer_is_at_work_nothing_is_lost_or_differs(tmp_path):
    """SIGKILL at random moments of a run whose disk is so slow that something is always being
    written."""
    given = words(
        {
            "data": "sinusoids", "method": "fomaml", "steps": 1, "hidden": "8", "queries": 5,
            "tasks": 2, "iterations": 80, "checkpoint_every": 5, "val_every": 25, "val_tasks": 2,
            "tensorboard": False, "threads": 1,
        }
    )  # fmt: skip
    cut, chance = tmp_path / "cut", random.Random(1)
    script = tmp_path / "slow.py"
    script.write_text(SLOW)
    process = start("train", "--out", cut, *given, script=script)
    for _ in range(2):
        goal = steps(cut) + chance.randrange(5, 30)
        wait_for(lambda goal=goal: steps(cut) >= goal, process)
        time.sleep(chance.random() * 0.1)
        process.kill()
        process.communicate()
        assert process.returncode == -signal.SIGKILL
        process = start("train", "--resume", cut, script=script)
    output, _ = process.communicate(timeout=200)
    assert process.returncode == 0, output
    whole = tmp_path / "whole"
    train(open_run(cut).settings, whole)
    assert same(final_state(cut), final_state(whole))
    best = [unpack((n / "checkpoints/best.safetensors").read_bytes())[0] for n in (cut, whole)]
    assert same(*best)
    assert not list((cut / "checkpoints").glob(".*"))
