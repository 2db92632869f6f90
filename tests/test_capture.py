"""Recorded meta-steps. Here a stand-in plays the recording: it does the work again at every replay.
On an accelerator benchmarks/device_check.py compares real replays with ordinary steps."""

import copy
import warnings
from contextlib import nullcontext

import pytest
import torch

import ibaml
from ibaml import capture as room
from ibaml.capture import Captures, stops_early
from ibaml.energy import Stream, draw_noise, task_roots
from ibaml.learner import replay
from oracles import generator
from problems import class_batch, mlp_model, plain_learner


class _Graph:
    """What `torch.cuda.CUDAGraph` is to a recording: here a replay does the work again and writes
    its results where the first ones lie."""

    def replay(self):
        self.again()


@pytest.fixture
def played(monkeypatch):
    """Recordings that work on a CPU."""
    kept = []
    original = room.Recording.__init__

    def recording(self, learner, work, batch, roots, **options):
        original(self, learner, work, batch, roots, **options)
        kept.append(self)

        def again():
            step = work(batch, roots)  # what the replay was given, in place
            gradients = torch.autograd.grad(
                step.loss, [p for p in learner.parameters() if p.requires_grad], allow_unused=True
            )
            self.flat.copy_(torch.cat([g.reshape(-1) for g in gradients if g is not None]))
            self.step.loss.copy_(step.loss.detach())

        self.graph.again = again

    monkeypatch.setattr(torch.cuda, "CUDAGraph", _Graph)
    monkeypatch.setattr(room, "record", lambda graph, device: nullcontext())
    monkeypatch.setattr(room.Recording, "__init__", recording)
    return kept


@pytest.fixture
def everywhere(monkeypatch):
    """A learner records on every device."""
    monkeypatch.setattr(replay, "can_record", lambda device: True)


def step(learner, captures, batch, seed, choices=()):
    return captures.step(learner, learner.meta_step, choices, batch, seed, True)


def gradient(learner, loss):
    learner.zero_grad()
    loss.backward()
    return torch.cat([p.grad.reshape(-1) for p in learner.parameters() if p.grad is not None])


def full_head():
    return ibaml.methods.ibaml(mlp_model(), adapt="head", posterior="full")


@pytest.mark.parametrize("method", ["maml", "abml", "imaml", "ibaml", "full"])
def test_the_third_batch_of_a_kind_is_recorded_and_later_ones_replayed(played, method):
    learner = full_head() if method == "full" else plain_learner(method, mlp_model())
    captures = Captures()
    batches = [class_batch((3,), seed=i) for i in range(5)]
    for i, batch in enumerate(batches):
        gradients = step(learner, captures, batch, i)
        assert (gradients is None) == (i < 2)
        if gradients is None:
            continue
        roots = task_roots(i, batch.task_keys, None)
        ordinary = learner.meta_step(batch, roots)
        torch.testing.assert_close(gradients.loss, ordinary.loss)
        expected = gradient(learner, 3 * ordinary.loss)
        torch.testing.assert_close(gradient(learner, 3 * gradients.loss), expected)
        with torch.no_grad():  # parameters move in place, and a replay reads them there
            for p in learner.parameters():
                p -= 0.1 * p.grad
    assert len(played) == 1


def test_two_losses_of_one_recording_do_not_share_their_gradients(played):
    learner = plain_learner("ibaml", mlp_model())
    captures = Captures()
    for i in range(3):
        step(learner, captures, class_batch((3,), seed=0), i)
    first, second = (step(learner, captures, class_batch((3,), seed=i), i) for i in (1, 2))
    alone = [gradient(learner, actual.loss) for actual in (first, second)]
    again = [step(learner, captures, class_batch((3,), seed=i), i) for i in (1, 2)]
    together = gradient(learner, again[0].loss + again[1].loss)
    torch.testing.assert_close(together, alone[0] + alone[1])
    assert not torch.allclose(alone[0], alone[1])


@pytest.mark.parametrize("method", ["maml", "ibaml"])
def test_a_loss_is_recorded_without_its_gradients_too(played, method):
    learner = plain_learner(method, mlp_model())
    batch = class_batch((3,), seed=0)
    roots = task_roots(0, batch.task_keys, None)
    alone, whole = (
        room.Recording(learner, learner.meta_step, batch, roots, backward=backward)
        for backward in (False, True)
    )
    assert torch.equal(alone.step.loss, whole.step.loss)
    assert not alone.step.loss.requires_grad
    assert alone.flat.numel() == 0
    assert torch.equal(whole.flat, gradient(learner, learner.meta_step(batch, roots).loss))


def test_another_kind_is_another_recording(played):
    learner = plain_learner("maml", mlp_model())
    captures = Captures()
    batch = class_batch((3,), seed=0)
    for _ in range(3):
        step(learner, captures, batch, 0)
    assert step(learner, captures, batch.select([0]), 0) is None, "fewer tasks"
    assert step(learner, captures, batch, 0, choices=(1,)) is None, "another choice"
    learner.model = copy.deepcopy(learner.model)
    assert step(learner, captures, batch, 0) is None, "other tensors"
    assert len(played) == 1


def test_a_copy_starts_without_recordings(played, everywhere):
    learner, batch = plain_learner("maml", mlp_model()), class_batch((3,))
    for _ in range(3):
        learner(batch)
    assert learner.strategy.endswith(", captured")
    other = copy.deepcopy(learner)
    assert len(played) == 1
    for calls in range(3):
        assert not other.strategy.endswith(", captured"), calls
        other(batch)
    assert other.strategy.endswith(", captured")
    assert len(played) == 2


def test_what_looks_at_its_numbers_is_known_and_a_cpu_records_nothing():
    assert stops_early(ibaml.NewtonCG())
    assert stops_early(ibaml.GradientDescent(tol=1e-3))
    assert not stops_early(ibaml.GradientDescent())
    learner = plain_learner("maml", mlp_model(), capture=True)
    with pytest.raises(ValueError, match="capture=True needs a CUDA device"):
        learner(class_batch((3,)))


def test_a_solver_that_may_not_look_takes_every_step_to_the_same_end(monkeypatch):
    batch = class_batch((3,))
    solver = ibaml.NewtonCG(steps=6, tol=1e-3)
    actual = []
    for looks in (True, False):
        if not looks:
            for place in ("linalg.cg", "solve.base", "solve.newton_cg"):
                monkeypatch.setattr(f"ibaml.{place}.all_done", lambda active: False)
        learner = plain_learner("ibaml", mlp_model(), solver=solver, init_log_var=-2.0)
        loss = learner(batch, torch.Generator().manual_seed(0))
        actual.append((loss.detach(), gradient(learner, loss), learner.diagnostics.steps))
    for a, b in zip(*actual, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


def test_roots_give_noise_that_depends_on_task_stream_and_step_alone():
    roots = task_roots(5, (3, 4), None)
    draw = draw_noise(roots, (3, 4), Stream.ADAPT, 2, 6)
    assert torch.equal(draw[1:], draw_noise(roots[1:], (4,), Stream.ADAPT, 2, 6))
    others = [
        draw_noise(task_roots(6, (3, 4), None), (3, 4), Stream.ADAPT, 2, 6),
        draw_noise(roots, (3, 4), Stream.META, 2, 6),
        draw_noise(roots, (3, 4), Stream.ADAPT, 2, 6, step=1),
    ]
    for other in others:
        assert not (other == draw).any()
    many = draw_noise(task_roots(0, range(50), None), range(50), Stream.META, 40, 100)
    assert abs(float(many.mean())) < 0.01
    assert abs(float(many.std()) - 1) < 0.01


def test_what_cannot_be_recorded_is_said_once_and_done_as_usual(everywhere, monkeypatch):
    def no_graph():
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    monkeypatch.setattr(torch.cuda, "CUDAGraph", no_graph)
    learner, insisting = (
        plain_learner("ibaml", mlp_model(), capture=capture) for capture in (None, True)
    )
    batch = class_batch((3,))

    def loss(learner):
        return float(learner(batch, generator()).detach())

    usual = loss(learner)
    assert loss(learner) == usual
    with pytest.warns(RuntimeWarning, match="cannot be recorded.*operation not permitted when"):
        assert loss(learner) == usual
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert loss(learner) == usual
    assert "not recorded: operation not permitted when stream is capturing" in learner.strategy
    for _ in range(2):
        assert loss(insisting) == usual
    with pytest.raises(RuntimeError, match="operation not permitted when stream is capturing"):
        loss(insisting)
