"""The loop: the same gradient however tasks are spread, the same run however it is interrupted."""

from __future__ import annotations

import json
import math
import os
import signal
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch

import ibaml
from ibaml.training import RunError, TrainingError, open_run, resolve, resume, train
from ibaml.training.outer import Average, build_optimizer, rate_at
from ibaml.training.processes import Processes
from live_bytes import peak_bytes
from oracles import relative
from real_data import DATA, real
from runs import bytes_of, features_file, final_state, gradient, make, same, waves


class Recorder:
    """A watcher that keeps what it is told."""

    def __init__(self) -> None:
        self.steps, self.validations, self.sentences = [], [], []

    def started(self, first, total):
        self.first = first

    def stepped(self, step):
        self.steps.append(step)

    def validated(self, step, scores, best):
        self.validations.append((step, scores, best))

    def message(self, text):
        self.sentences.append(text)

    def ended(self):
        pass


# --- one gradient, however it is computed --------------------------------------------------------


@pytest.mark.parametrize("method", ["ibaml", "maml", "abml", "imaml", "fomaml", "reptile"])
@pytest.mark.parametrize("micro", [1, 3])
def test_micro_batches_give_the_gradient_of_the_whole(method, micro):
    settings = waves(method=method, dtype="float64", tasks=7)
    whole = gradient(make(settings))
    parts = gradient(make(replace(settings, micro_batch=micro)))
    assert whole.norm() > 0
    assert relative(parts, whole) <= 1e-12


def test_micro_batches_with_batch_norm_move_running_statistics_once(tmp_path):
    settings = resolve(
        {
            "data": "glyphs",
            "channels": 4,
            "tasks": 4,
            "queries": 2,
            "dtype": "float64",
            "threads": 1,
        }
    )
    actual = []
    for micro in (None, 1):
        trainer = make(replace(settings, micro_batch=micro))
        actual.append(
            (gradient(trainer), {n: b.clone() for n, b in trainer.learner.named_buffers()})
        )
    (whole, buffers), (parts, others) = actual
    assert relative(parts, whole) <= 1e-12
    moved = [n for n in buffers if n.endswith("running_mean")]
    assert moved
    for name in buffers:
        torch.testing.assert_close(others[name], buffers[name], rtol=1e-12, atol=1e-14)
        if name.endswith("num_batches_tracked"):
            assert int(buffers[name]) == 1


def test_a_diverging_task_leaves_the_others_gradient_however_they_are_batched():
    """The mean is over the tasks that took part, in one batch and in micro-batches."""
    settings = waves(method="maml", dtype="float64", tasks=6, steps=3)
    ill = _IllTasks(make(settings).tasks, {2, 3})
    actual = {}
    for micro in (None, 1, 2, 4):
        trainer = make(replace(settings, micro_batch=micro))
        trainer.tasks = ill
        _, kept, out, _ = trainer.gradient(0)
        assert (int(kept), int(out)) == (4, 2)
        actual[micro] = torch.cat([p.grad.reshape(-1) for p in trainer.parameters])
    for micro in (1, 2, 4):
        assert relative(actual[micro], actual[None]) <= 1e-12


class _IllTasks:
    """Tasks some of which overflow."""

    def __init__(self, tasks, ill, name="ill"):
        self.tasks, self.ill = tasks, ill
        self.name, self.digest = name, tasks.digest
        self.example_shape, self.ways = tasks.example_shape, tasks.ways

    def batches(self, split, keys):
        (batch,) = self.tasks.batches(split, keys)
        x = batch.support_x.clone()
        for t, key in enumerate(batch.task_keys):
            if self.ill is None or key in self.ill:
                x[t] = 1e200 if x.dtype == torch.float64 else 1e30
        return [
            ibaml.TaskBatch(
                x, batch.support_y * x[..., :1], batch.query_x, batch.query_y,
                batch.keys, validate=False,
            )
        ]  # fmt: skip


@real
def test_tables_of_unequal_tasks_train_and_micro_batches_agree(tmp_path):
    given = {
        "data": str(DATA / "gapminder" / "gapminder.tsv"),
        "task": "country", "features": "year", "target": "lifeExp",
        "shots": 3, "dtype": "float64", "iterations": 30, "hidden": "8",
        "threads": 1, "val_every": 30, "val_tasks": 5, "tensorboard": False,
    }  # fmt: skip
    whole = gradient(make(resolve(given)))
    assert relative(gradient(make(resolve({**given, "micro_batch": 1}))), whole) <= 1e-12
    seen = Recorder()
    train(resolve(given), tmp_path / "run", watchers=lambda run, learner: [seen])
    assert seen.validations[-1][1]["rmse"] < 15  # years


def test_tasks_of_unequal_size_train_together(tmp_path):
    rows = ["who\tx\ty"]
    for task in range(30):
        rows += [f"t{task}\t{i / 5}\t{task / 30 + i / 5}" for i in range(5 + task % 4)]
    file = tmp_path / "table.tsv"
    file.write_text("\n".join(rows))
    given = {"data": str(file), "task": "who", "features": "x", "target": "y", "shots": 3}
    settings = resolve({**given, "hidden": "4", "dtype": "float64", "tasks": 12, "threads": 1})
    trainer = make(settings)
    assert len(trainer.tasks.batches("train", range(12))) > 1
    whole = gradient(trainer)
    assert relative(gradient(make(replace(settings, micro_batch=1))), whole) <= 1e-12


def test_256_tasks_train_in_the_memory_of_8():
    settings = waves(method="maml", hidden="40,40", queries=40)

    def peak(tasks: int, micro: int) -> int:
        trainer = make(replace(settings, tasks=tasks, micro_batch=micro))
        return peak_bytes(lambda: trainer.gradient(0))

    assert peak(256, 8) <= 1.05 * peak(8, 8)
    assert peak(64, 64) > 3 * peak(8, 8)


def test_processes_share_all_tasks_evenly():
    keys = range(40, 51)
    for world in (1, 2, 3, 16):
        shares = [Processes(rank, world).share(keys) for rank in range(world)]
        assert [k for share in shares for k in share] == list(keys)
        assert max(map(len, shares)) - min(map(len, shares)) <= 1


# --- the outer optimizer -------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_the_step_size_warms_up_and_falls(schedule):
    settings = waves(schedule=schedule, warmup=10, iterations=110, meta_lr=0.5)
    rates = [rate_at(settings, step) for step in range(110)]
    assert rates[:3] == pytest.approx([0.05, 0.1, 0.15])
    assert rates[10] == pytest.approx(0.5)
    middle = {"constant": 0.5, "linear": 0.25, "cosine": 0.25}[schedule]
    assert rates[60] == pytest.approx(middle)
    assert all(b <= a for a, b in pairwise(rates[10:]))


def test_the_average_weighs_iterates_geometrically():
    parameter = torch.nn.Parameter(torch.zeros(2, dtype=torch.float64))
    average = Average(0.9, [("w", parameter)])
    values = []
    for i in range(1, 6):
        parameter.data.fill_(float(i * i))
        values.append(float(i * i))
        average.update(torch.tensor(True))
    weights = [0.9 ** (5 - i) for i in range(1, 6)]
    expected = sum(w * v for w, v in zip(weights, values, strict=True)) / sum(weights)
    assert float(average.values["w"][0]) == pytest.approx(expected, rel=1e-12)
    with average.in_place():
        assert float(parameter.detach()[0]) == pytest.approx(expected)
    assert float(parameter.detach()[0]) == 25.0


@pytest.mark.parametrize(
    "optimizer", ["adam", "adamw", "sgd", "rmsprop", "radam", "nadam", "adagrad"]
)
def test_every_optimizer_resumes_bit_for_bit(optimizer, tmp_path):
    extra = {"momentum": 0.9} if optimizer in ("sgd", "rmsprop") else {}
    lr = 1e-4 if optimizer == "sgd" else 1e-3
    settings = waves(
        method="fomaml", optimizer=optimizer, meta_lr=lr, iterations=6, checkpoint_every=3,
        val_every=0, ema=0.9, weight_decay=0.01, **extra,
    )  # fmt: skip
    assert type(
        build_optimizer(settings, [torch.nn.Parameter(torch.ones(1))])
    ).__name__.lower() == (optimizer)
    train(settings, tmp_path / "whole")
    train(settings, tmp_path / "cut")
    (tmp_path / "cut" / "checkpoints" / "step-00000006.safetensors").unlink()
    resume(tmp_path / "cut")
    assert same(final_state(tmp_path / "cut"), final_state(tmp_path / "whole"))


def test_clipping_bounds_the_step():
    trainer = make(
        waves(method="maml", optimizer="sgd", meta_lr=1.0, clip=0.01, schedule="constant")
    )
    before = torch.cat([p.detach().reshape(-1).clone() for p in trainer.parameters])
    step = trainer.advance()
    after = torch.cat([p.detach().reshape(-1) for p in trainer.parameters])
    assert step.gradient_norm > 0.01
    assert float((after - before).norm()) == pytest.approx(0.01, rel=1e-3)


# --- the run folder ------------------------------------------------------------------------------


def test_a_run_resumes_bit_for_bit_with_its_log(tmp_path):
    settings = waves(iterations=6, checkpoint_every=2, val_every=2, log_every=1, ema=0.8)
    train(settings, tmp_path / "whole")
    train(settings, tmp_path / "cut")
    for name in ("step-00000006", "step-00000004"):
        (tmp_path / "cut" / "checkpoints" / f"{name}.safetensors").unlink()
    resume(tmp_path / "cut")
    assert same(final_state(tmp_path / "cut"), final_state(tmp_path / "whole"))

    def log(run: Path) -> list:
        lines = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
        return [{k: v for k, v in x.items() if k != "seconds"} for x in lines if "step" in x]

    assert log(tmp_path / "cut") == log(tmp_path / "whole")


def test_a_damaged_checkpoint_falls_back_to_the_one_before_and_says_so(tmp_path):
    settings = waves(method="fomaml", iterations=9, checkpoint_every=3, val_every=0)
    train(settings, tmp_path / "whole")
    train(settings, tmp_path / "cut")
    newest = tmp_path / "cut" / "checkpoints" / "step-00000009.safetensors"
    for damage in ("flip", "cut", "empty", "foreign"):
        content = bytearray((tmp_path / "whole" / "checkpoints" / newest.name).read_bytes())
        if damage == "flip":
            content[-5] ^= 1
        content = {"cut": content[:-100], "empty": b"", "foreign": b"PK" * 50}.get(damage, content)
        newest.write_bytes(bytes(content))
        seen = Recorder()
        resume(tmp_path / "cut", watchers=lambda run, learner, seen=seen: [seen])
        assert seen.first == 6, damage
        assert any("step-00000009.safetensors is ignored" in text for text in seen.sentences)
        assert same(final_state(tmp_path / "cut"), final_state(tmp_path / "whole"))


def test_only_the_last_checkpoints_are_kept_and_the_best(tmp_path):
    run, _ = train(
        waves(method="imaml", iterations=10, checkpoint_every=2, keep=2, val_every=5),
        tmp_path / "run",
    )
    names = sorted(p.name for p in run.checkpoints.iterdir())
    assert names == ["best.safetensors", "step-00000008.safetensors", "step-00000010.safetensors"]
    config = json.loads((run.path / "config.json").read_text())
    assert config["versions"]["torch"] == str(torch.__version__)
    assert {"git", "command", "data", "settings", "ibaml"} <= config.keys()


def test_load_gives_the_trained_learner_best_or_last(tmp_path):
    run, _ = train(waves(iterations=8, val_every=4), tmp_path / "run")
    last = ibaml.load(run.path, which="last")
    tensors = final_state(run.path)
    for name, value in last.state_dict().items():
        assert torch.equal(value, tensors[f"learner/{name}"])
    best = ibaml.load(str(run.path))
    x = torch.linspace(-1, 1, 5)[:, None]
    mean, variance = best.adapt(x, x.sin()).predict(x)
    assert mean.shape == variance.shape == (5, 1)
    with pytest.raises(ValueError, match='which must be "best" or "last", got \'first\''):
        ibaml.load(run.path, which="first")
    run.best.write_bytes(b"x")
    with pytest.raises(
        RunError, match=r"it is damaged or not a checkpoint of ibaml.*use the last one"
    ):
        ibaml.load(run.path)


def test_the_average_is_what_is_loaded(tmp_path):
    run, _ = train(waves(iterations=5, ema=0.5, val_every=0), tmp_path / "run")
    tensors = final_state(run.path)
    learner = ibaml.load(run.path)
    for name, value in learner.named_parameters():
        assert torch.equal(value, tensors[f"average/{name}"])


def test_folders_that_are_no_runs_or_of_another_version_are_refused(tmp_path):
    with pytest.raises(RunError, match="nothing does not exist"):
        open_run(tmp_path / "nothing")
    (tmp_path / "empty").mkdir()
    with pytest.raises(RunError, match=r"empty is not a run folder: it has no config\.json"):
        open_run(tmp_path / "empty")
    run, _ = train(waves(iterations=1, val_every=0), tmp_path / "run")
    with pytest.raises(
        RunError,
        match=r"is a run already: resume it \(ibaml train --resume .*or choose another --out",
    ):
        train(waves(iterations=1), tmp_path / "run")
    config = run.path / "config.json"
    content = json.loads(config.read_text())
    for change, words in (
        ({"format": 99, "ibaml": "9.9"}, "was made by ibaml 9.9 in format 99, and this is ibaml"),
        (
            {"settings": {**content["settings"], "brand_new": 1}},
            "with settings this version does not know: brand_new",
        ),
        ({"settings": {**content["settings"], "ways": "x"}}, "ways must be a whole number"),
    ):
        config.write_text(json.dumps({**content, **change}))
        with pytest.raises(RunError, match=words):
            open_run(run.path)
    config.write_text("{")
    with pytest.raises(RunError, match=r"config\.json cannot be read: it is not JSON"):
        open_run(run.path)


def test_other_data_than_before_is_refused(tmp_path):
    file = features_file(tmp_path / "features.npz")
    given = {"data": file, "ways": 2, "queries": 2, "iterations": 2, "hidden": "4", "val_every": 0}
    run, _ = train(resolve({**given, "tensorboard": False, "threads": 1}), tmp_path / "run")
    features_file(tmp_path / "features.npz", classes=25)
    with pytest.raises(RunError, match=r"is not what .* was trained on"):
        resume(run.path)


def test_two_processes_do_not_train_in_one_folder(tmp_path):
    run, _ = train(waves(iterations=2, val_every=0), tmp_path / "run")
    with run.held(), pytest.raises(RunError, match="is being trained by another process"):
        resume(run.path, iterations=4)


def test_a_disk_that_is_full_stops_the_run_and_keeps_the_last_checkpoint(tmp_path, monkeypatch):
    from ibaml import files

    real, count = os.fsync, []

    def full(handle):
        count.append(1)
        if len(count) > 14:
            raise OSError(28, "No space left on device")
        return real(handle)

    monkeypatch.setattr(files.os, "fsync", full)
    settings = waves(method="fomaml", iterations=12, checkpoint_every=1, val_every=0)
    with pytest.raises(RunError, match=r"No space left.*last good checkpoint is .*--resume"):
        train(settings, tmp_path / "run")
    monkeypatch.undo()
    folder = tmp_path / "run" / "checkpoints"
    assert not list(folder.glob(".*")), "nothing half written is left"
    before = len(list(folder.iterdir()))
    assert before
    resume(tmp_path / "run")
    train(settings, tmp_path / "whole")
    assert same(final_state(tmp_path / "run"), final_state(tmp_path / "whole"))


# --- when something goes wrong -------------------------------------------------------------------


def test_too_many_faults_in_a_row_stop_the_run_with_a_diagnosis(tmp_path):
    settings = waves(
        method="maml", inner_lr=1e6, steps=8, patience=3, iterations=50, checkpoint_every=1,
        val_every=0,
    )  # fmt: skip
    with pytest.raises(TrainingError, match="3 faulty iterations in a row") as caught:
        train(settings, tmp_path / "run")
    text = str(caught.value)
    assert "3 faulty iterations in a row" in text
    assert "lower inner_lr (now 1e+06)" in text
    assert "last good checkpoint" in text
    assert any(f"{i}." in text for i in range(4)), "a layer is named"


def test_a_meta_gradient_that_is_not_finite_moves_nothing():
    trainer = make(waves(method="maml"))
    before = [p.detach().clone() for p in trainer.parameters]
    hook = trainer.parameters[0].register_hook(lambda g: g * math.nan)
    step = trainer.advance()
    assert not step.moved
    assert trainer.faulty == 1
    assert all(torch.equal(a, b) for a, b in zip(before, trainer.parameters, strict=True))
    hook.remove()
    assert trainer.advance().moved
    assert trainer.faulty == 0


def test_memory_is_estimated_and_what_cannot_fit_is_refused_by_name(monkeypatch):
    from ibaml.training import fitting

    def told(free: int, **given) -> tuple[int | None, list[str]]:
        monkeypatch.setattr(fitting, "free_bytes", lambda device: free)
        seen = Recorder()
        trainer = make(waves(method="maml", tasks=64, **given), watchers=[seen])
        trainer.fit_memory()
        return trainer.settings.micro_batch, seen.sentences

    micro, sentences = told(10**12)
    assert micro == 64
    assert "memory: at most" in sentences[-1]  # as if nothing were shared, so no second trial
    one, two = (bytes_of(make(waves(method="maml", tasks=64)), n) for n in (1, 2))
    between = (64 * one + (64 * (two - one) + 2 * one - two)) / 2
    micro, sentences = told(int(between / 0.9))
    assert micro == 64
    assert "memory: about" in sentences[-1]
    four = bytes_of(make(waves(method="maml", tasks=64)), 4)
    micro, sentences = told(2 * four)
    assert micro is not None
    assert 1 <= micro < 64
    assert "at a time" in sentences[0]
    with pytest.raises(TrainingError, match=r"lower micro_batch .*queries.*steps"):
        told(2 * four, micro_batch=64)
    with pytest.raises(
        TrainingError, match=r"at once need about .* is free: lower .*queries.*steps"
    ):
        told(1000)


def test_running_out_of_memory_is_a_sentence(tmp_path, monkeypatch):
    trainer = make(waves(iterations=3, val_every=0))

    def burst(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.\nmore")

    monkeypatch.setattr(trainer, "gradient", burst)
    with pytest.raises(TrainingError, match=r"out of memory in iteration 1 .*20.00 GiB.*lower"):
        trainer.train()


def test_a_signal_saves_and_ends_after_the_iteration(tmp_path):
    settings = waves(iterations=1000, val_every=0, checkpoint_every=1000)

    class Stop(Recorder):
        def stepped(self, step):
            if step.step == 5:
                os.kill(os.getpid(), signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    run, outcome = train(settings, tmp_path / "run", watchers=lambda run, learner: [Stop()])
    assert outcome.signal == signal.SIGTERM
    assert outcome.step in (5, 6)
    assert signal.getsignal(signal.SIGTERM) is before
    assert [p.name for p in run.saved()] == [f"step-{outcome.step:08d}.safetensors"]


def test_validation_of_an_ill_learner_is_told_not_fatal():
    seen = Recorder()
    trainer = make(waves(method="fomaml"), watchers=[seen])
    with torch.no_grad():
        trainer.parameters[0].fill_(math.nan)
    assert math.isnan(trainer.validate()["nll"])
    assert "not finite" in seen.sentences[0]
    assert trainer.best is None


def test_a_thousand_steps_leave_memory_and_files_as_they_were(tmp_path):
    def files() -> int:
        return len(os.listdir("/proc/self/fd"))

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    at: dict[int, tuple[int, int]] = {}

    class Look(Recorder):
        def stepped(self, step):
            if step.step in (100, 1100):
                at[step.step] = (files(), resident())

    settings = waves(
        method="fomaml", steps=1, tasks=1, hidden="2", iterations=1100, val_every=400,
        checkpoint_every=40, tensorboard=True,
    )  # fmt: skip
    train(settings, tmp_path / "run", watchers=lambda run, learner: [Look()])
    assert at[1100][0] <= at[100][0]
    assert at[1100][1] - at[100][1] <= 8e6


# --- and it learns -------------------------------------------------------------------------------


@pytest.mark.parametrize(("method", "iterations"), [("ibaml", 100), ("maml", 400)])
def test_two_methods_learn(method, iterations, tmp_path):
    """Which dimensions tell classes apart is what all tasks have in common."""
    file = features_file(tmp_path / "features.npz", classes=100, each=20, nuisance=12)
    settings = resolve(
        {
            "data": file, "method": method, "hidden": "32", "iterations": iterations, "queries": 10,
            "val_every": iterations, "val_tasks": 50, "tensorboard": False, "threads": 1,
        }
    )  # fmt: skip
    seen = Recorder()
    untrained = make(settings).validate()
    train(settings, tmp_path / "run", watchers=lambda run, learner: [seen])
    trained = seen.validations[-1][1]
    assert trained["accuracy"] > untrained["accuracy"] + 0.2, (untrained, trained)
    assert trained["nll"] < untrained["nll"] - 0.2


# --- what a hostile user found -------------------------------------------------------------------


def test_a_new_end_is_remembered_and_must_lie_ahead(tmp_path):
    settings = waves(method="fomaml", iterations=4, val_every=0)
    run, _ = train(settings, tmp_path / "run")
    resume(run.path, iterations=8)
    assert open_run(run.path).settings.iterations == 8
    assert resume(run.path)[1].step == 8
    for wrong, words in (
        (3, "is at iteration 8 already: --iterations must be more"),
        (-1, "iterations must be 0 or more"),
    ):
        with pytest.raises(ValueError, match=words):
            resume(run.path, iterations=wrong)


def test_checkpoints_of_another_run_are_not_mixed_with_new_ones(tmp_path):
    settings = waves(method="fomaml", iterations=9, checkpoint_every=3, val_every=0)
    run, _ = train(settings, tmp_path / "run")
    (run.path / "config.json").unlink()
    with pytest.raises(RunError, match=r"is a run already: choose another --out$"):
        train(replace(settings, iterations=2), run.path)


def test_a_run_that_never_saved_may_begin_anew_unless_it_is_being_trained(tmp_path):
    settings = waves(method="fomaml", iterations=2, val_every=0)
    run, _ = train(settings, tmp_path / "run")
    for path in run.saved():
        path.unlink()
    with run.held(), pytest.raises(RunError, match="is being trained by another process"):
        train(waves(method="maml", iterations=2, val_every=0), run.path)
    assert open_run(run.path).settings.method == "fomaml"
    train(waves(method="maml", iterations=2, val_every=0), run.path)
    assert open_run(run.path).settings.method == "maml"


def test_no_iterations_leave_the_prior_a_run_begins_from(tmp_path):
    settings = waves(iterations=0)
    run, _ = train(settings, tmp_path / "run")
    expected = make(settings).learner.state_dict()
    assert same(ibaml.load(run.path).state_dict(), expected)


def test_the_log_is_json_also_when_nothing_is_finite(tmp_path):
    settings = waves(method="maml", inner_lr=1e6, iterations=2, log_every=1, val_every=0)
    run, _ = train(settings, tmp_path / "run")

    def never(word: str):
        raise AssertionError(word)

    lines = (run.path / "log.jsonl").read_text().splitlines()
    entries = [json.loads(line, parse_constant=never) for line in lines]
    assert [x["loss"] for x in entries if "loss" in x] == [None, None]


def test_one_task_at_a_time_is_not_refused_because_two_do_not_fit(monkeypatch):
    from ibaml.training import fitting

    trainer = make(waves(method="maml", micro_batch=1))
    real = fitting.meta_step_bytes

    def probe(learner, tasks, settings, count: int) -> int:
        if count > 1:
            raise TrainingError("2 task(s) do not fit into memory")
        return real(learner, tasks, settings, count)

    monkeypatch.setattr(fitting, "meta_step_bytes", probe)
    trainer.fit_memory()
    assert trainer.settings.micro_batch == 1


def test_errors_too_large_to_square_are_told_not_fatal():
    seen = Recorder()
    trainer = make(waves(method="fomaml"), watchers=[seen])
    with torch.no_grad():  # σ so large that the nll is finite
        for name, parameter in trainer.learner.named_parameters():
            parameter.fill_(70.0 if name.startswith("likelihood") else 1e25)
    assert math.isnan(trainer.validate()["rmse"])
    assert "not finite" in seen.sentences[0]
