"""A run that loses what it had learned says so, and goes back or ends with a diagnosis."""

from __future__ import annotations

import dataclasses
import math
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ibaml
from ibaml.training import TrainingError, resume, train
from ibaml.training.rise import NATS, WINDOW, Rise
from runs import features_file, final_state, same
from test_checkpoints import Crash
from test_training import Recorder


def first_alarm(losses: list[float]) -> int | None:
    rise = Rise()
    return next((i for i, loss in enumerate(losses) if rise.watch(i + 1, loss)), None)


def learning(steps: int, noise: float, seed: int = 0) -> list[float]:
    """A loss that falls from log 5 to 0.2, with the noise of eight tasks."""
    rng = random.Random(seed)
    return [0.2 + 1.4 * math.exp(-i / 50) + noise * rng.gauss(0, 1) for i in range(steps)]


# --- the rule ------------------------------------------------------------------------------------


@pytest.mark.parametrize("noise", [0.0, 0.1, 0.5, 2.0])
def test_a_run_that_learns_is_not_blamed_however_noisy_it_is(noise):
    for seed in range(10):
        assert first_alarm(learning(1000, noise, seed)) is None


def test_a_run_that_stays_where_it_is_is_not_blamed():
    rng = random.Random(0)
    assert first_alarm([1.6 + 0.2 * rng.gauss(0, 1) for _ in range(3000)]) is None


@pytest.mark.parametrize("seed", range(10))
def test_losses_with_heavy_tails_are_seldom_blamed(seed):
    """One task a step, in regression: the luckiest twenty are quiet, and say nothing."""
    rng = random.Random(seed)
    alarms = sum(
        first_alarm([10 * rng.gauss(0, 1) ** 2 for _ in range(1000)]) is not None for _ in range(10)
    )
    assert alarms <= 2


def test_single_spikes_are_not_blamed():
    losses = learning(400, 0.05)
    for at in (100, 150, 151, 152, 300):
        losses[at] = 1e6
    losses[200] = math.nan
    assert first_alarm(losses) is None


def test_the_run_of_the_issue_is_found_within_a_window():
    losses = [*learning(150, 0.05), *(16.0 + i for i in range(100))]
    alarm = first_alarm(losses)
    assert alarm is not None
    assert 150 <= alarm <= 150 + WINDOW


@given(st.floats(0.01, 3.0), st.floats(-50.0, 50.0), st.integers(0, 1000))
def test_the_rule_sees_the_shape_of_a_loss_and_not_its_level(noise, level, seed):
    """A density's nll may be negative; the alarm is the same."""
    losses = [*learning(100, noise, seed), *([1e3] * 60)]
    alarm = first_alarm([loss + level for loss in losses])
    assert alarm is not None
    assert 100 <= alarm < 100 + WINDOW


def test_the_rule_is_what_the_docs_say():
    rise = Rise()
    for i in range(WINDOW):
        assert not rise.watch(i + 1, 0.5)
    assert rise.bound == 0.5 + NATS
    assert [rise.watch(30 + i, 0.5 + NATS) for i in range(WINDOW)] == [False] * WINDOW
    assert any(rise.watch(60 + i, 0.5001 + NATS) for i in range(WINDOW))


def test_what_the_rule_remembers_survives_a_checkpoint():
    losses = [*learning(130, 0.1), *([9.0] * 30)]
    whole, cut = Rise(), Rise()
    for i, loss in enumerate(losses):
        if i % 7 == 0:
            again = Rise()
            again.restore(cut.facts())
            cut = again
        assert whole.watch(i, loss) == cut.watch(i, loss)
    assert whole.facts() == cut.facts()


# --- the run -------------------------------------------------------------------------------------


class Ruin(Recorder):
    """Something ruins the weights after these steps (as a step too long does)."""

    def __init__(self, *steps: int) -> None:
        super().__init__()
        self.at = steps

    def stepped(self, step):
        super().stepped(step)
        if step.step in self.at:
            for p in self.learner.model.parameters():
                p.data.mul_(-30.0)


def settings(tmp_path, **given):
    from ibaml.training import resolve

    return resolve(
        {
            "data": features_file(tmp_path / "features.npz", 60), "ways": 3, "shots": 2,
            "queries": 4,
            "method": "maml", "hidden": "8", "inner_lr": 0.1, "tasks": 4, "meta_lr": 0.02,
            "iterations": 160, "val_every": 20, "val_tasks": 10, "checkpoint_every": 20,
            "schedule": "constant", "log_every": 1, "tensorboard": False, "threads": 1, **given,
        }
    )  # fmt: skip


def watched(*recorders: Recorder):
    def watchers(run, learner):
        for recorder in recorders:
            recorder.learner = learner
        return list(recorders)

    return watchers


def test_it_goes_on_from_the_best_weights_with_a_smaller_step_and_says_so(tmp_path):
    seen = Ruin(70)
    _run, outcome = train(settings(tmp_path), tmp_path / "run", watchers=watched(seen))
    assert outcome.step == 160
    (said,) = [text for text in seen.sentences if "continuing from the best weights" in text]
    assert "the training loss rose to" in said
    assert "with 0.3 times the step size" in said
    at = int(said.split(":")[0].split()[-1])
    assert 70 < at <= 70 + WINDOW
    rates = [step.rate for step in seen.steps]
    assert rates[at - 1] == pytest.approx(0.02)
    assert rates[at] == pytest.approx(0.006)
    # after it the run is what it was before, and better in the end than when it was ruined
    losses = {step.step: step.loss for step in seen.steps}
    before = sum(losses[i] for i in range(50, 70)) / 20
    ruined = sum(losses[i] for i in range(72, at)) / (at - 72)
    after = sum(losses[i] for i in range(140, 160)) / 20
    assert after < before + 0.3 < ruined


def test_a_run_that_goes_back_is_bit_for_bit_the_same_when_it_was_killed_on_the_way(tmp_path):
    given = settings(tmp_path)
    train(given, tmp_path / "whole", watchers=watched(Ruin(70)))
    with pytest.raises(ZeroDivisionError):
        train(given, tmp_path / "cut", watchers=watched(Ruin(70), Crash(75)))
    resume(tmp_path / "cut", watchers=watched(Ruin(70)))
    assert same(final_state(tmp_path / "cut"), final_state(tmp_path / "whole"))


def test_a_loss_that_rises_with_nothing_lost_is_no_fault(tmp_path, monkeypatch):
    """Harder tasks, say: validation answers the question, and the run goes on as it was."""
    from ibaml.training.loop import Trainer

    original = Trainer.report

    def harder(self, pending):
        report = original(self, pending)
        return dataclasses.replace(report, loss=report.loss + (50 if report.step > 70 else 0))

    given = settings(tmp_path)
    train(given, tmp_path / "plain")
    monkeypatch.setattr(Trainer, "report", harder)
    seen = Recorder()
    train(given, tmp_path / "run", watchers=watched(seen))
    assert not any("continuing from" in text for text in seen.sentences)
    assert same(final_weights(tmp_path / "run"), final_weights(tmp_path / "plain"))


def final_weights(run):
    return {n: t for n, t in final_state(run).items() if n.startswith("learner/")}


def test_a_run_that_is_ruined_again_and_again_ends_with_a_diagnosis(tmp_path):
    seen = Ruin(30, 60, 90, 120)
    with pytest.raises(TrainingError) as error:
        train(settings(tmp_path), tmp_path / "run", watchers=watched(seen))
    said = str(error.value)
    assert sum("continuing from the best" in text for text in seen.sentences) == 3
    for words in ("the training loss rose to", "after 3 returns", "Lower meta_lr (now 0.02, try "
                  "0.0002)", "best.safetensors"):  # fmt: skip
        assert words in said
    learner = ibaml.load(tmp_path / "run")  # the best is there still
    assert all(torch.isfinite(p).all() for p in learner.parameters())


def test_where_nothing_was_validated_it_ends_with_a_diagnosis(tmp_path):
    with pytest.raises(
        TrainingError, match=r"far above its best.*try 0\.006.*No weights were validated"
    ):
        train(settings(tmp_path, val_every=0), tmp_path / "run", watchers=watched(Ruin(70)))


def test_a_run_that_ends_worse_than_its_best_says_which_weights_are_taken(tmp_path):
    seen = Ruin(155)  # too late for a window
    train(settings(tmp_path), tmp_path / "run", watchers=watched(seen))
    best = min(seen.validations, key=lambda v: v[1]["nll"])
    assert any(
        f"best weights are from iteration {best[0]} (validation nll {best[1]['nll']:.3f})" in text
        for text in seen.sentences
    )


# --- linear systems that are not solved ----------------------------------------------------------


def test_default_options_solve_the_linear_systems_of_sinusoids():
    """In float32, so that weights moved by a rounding error give the same meta-gradient."""
    from runs import make, waves

    unsolved = []
    for moved in (0.0, 1e-7):
        trainer = make(waves(hidden="40,40", tasks=8, queries=15, posterior="diagonal"))
        torch.manual_seed(0)
        for p in trainer.parameters:
            p.data.add_(moved * torch.randn_like(p))
        trainer.gradient(0)
        assert not trainer.learner.diagnostics.unsolved.any()
        unsolved.append(torch.cat([p.grad.reshape(-1) for p in trainer.parameters]))
    assert (unsolved[0] - unsolved[1]).norm() <= 0.02 * unsolved[0].norm()


def test_steps_that_were_given_are_obeyed_and_unsolved_systems_are_reported(tmp_path):
    from ibaml.training.loop import Trainer
    from runs import make, waves

    seen = Recorder()
    trainer: Trainer = make(waves(hidden="40,40", cg_steps=2, log_every=1, iterations=3))
    trainer.watchers = [seen]
    trainer.train()
    d = trainer.learner.diagnostics
    assert d.cg_steps.tolist() == [2] * 4
    assert d.unsolved.tolist() == (d.cg_residual > 0.1).tolist()
    assert d.unsolved.any()
    assert "unsolved" in str(d)
    assert seen.steps[-1].unsolved == pytest.approx(float(d.unsolved.double().mean()))


def test_the_screen_shows_the_share_of_unsolved_systems(capsys):
    from ibaml.cli.screen import LiveView
    from ibaml.training import Step

    view = LiveView(every=1, second="accuracy")
    view.started(0, 10)
    view.stepped(Step(1, 0.5, 8, 0, 1.0, True, 0.01, cg_residual=24.0, unsolved=0.75))
    assert "unsolved 75 %" in capsys.readouterr().out
    view.stepped(Step(2, 0.5, 8, 0, 1.0, True, 0.01, cg_residual=1e-3, unsolved=0.0))
    assert "unsolved" not in capsys.readouterr().out
