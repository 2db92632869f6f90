"""Memory runs out in the middle of a run: it goes on with fewer tasks at a time, says so, and ends
where a run with so few from the start ends."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import ibaml
from ibaml.objectives import Objective, QueryNll
from ibaml.tasks import SinusoidTasks
from ibaml.training import Trainer, TrainingError, create_run, open_run
from ibaml.training.build import describe_source
from ibaml.training.faults import out_of_memory
from ibaml.training.fitting import recorded_at_once
from runs import environment, final_state, waves
from test_interruptions import TORCHRUN
from test_training import Recorder


class Room(Objective):
    """A meta-loss for which memory runs out beyond so many tasks at once."""

    def __init__(self, most: int = 1000) -> None:
        self.most = most
        self.seen: list[int] = []

    def __call__(self, v, support, query):
        self.seen.append(len(v))
        if len(v) > self.most:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.\nmore")
        return QueryNll()(v, support, query)


class Less(Recorder):
    """Another program takes memory after a few steps."""

    def __init__(self, room: Room, after: int, most: int) -> None:
        super().__init__()
        self.room, self.after, self.most = room, after, most

    def stepped(self, step):
        if step.step == self.after:
            self.room.most = self.most


def normed(room: Room) -> ibaml.MetaLearner:
    """With batch norm, whose running statistics move once an iteration."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(1, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1)).double()
    made = ibaml.methods.fomaml(net, steps=2, lr=0.01, likelihood=ibaml.Gaussian(0.3))
    return made.replace(objective=room)


def trainer(room: Room, watcher: Recorder, **given) -> Trainer:
    settings = waves(
        **{"dtype": "float64", "tasks": 7, "iterations": 6, "val_every": 0, "method": "fomaml",
           "log_every": 1, **given}
    )  # fmt: skip
    tasks = SinusoidTasks(shots=5, dtype=torch.float64)
    return Trainer(settings, normed(room), tasks, watchers=[watcher])


def test_a_run_that_runs_out_of_memory_goes_on_with_fewer_tasks_at_a_time():
    room = Room()
    cut = trainer(room, seen := Less(room, after=3, most=2))
    cut.train()
    assert cut.settings.micro_batch == 2
    told = [s for s in seen.sentences if s.startswith("out of memory")]
    assert told == [
        f"out of memory in iteration 5 with {before} task(s) at once (CUDA out of memory. Tried to "
        f"allocate 20.00 GiB.): {now} at a time from here on, which rounds sums differently"
        for before, now in ((7, 4), (4, 2))
    ]
    # the first is the trial; watchers hear of an iteration when the next has begun
    assert room.seen[1:] == [*4 * [7], 7, 4, *2 * [2, 2, 2, 1]]
    small = trainer(Room(), Recorder(), micro_batch=2)
    small.train()
    states = [t.learner.state_dict() for t in (cut, small)]
    assert int(states[0]["model.1.num_batches_tracked"]) == 6, "once an iteration"
    for name, value in states[0].items():
        torch.testing.assert_close(value, states[1][name], rtol=1e-10, atol=1e-10)


def test_a_failed_meta_step_leaves_nothing_behind():
    room = Room()
    one = trainer(room, Recorder())
    before = {n: t.clone() for n, t in one.learner.state_dict().items()}
    room.most = 0
    with pytest.raises(TrainingError, match=r"out of memory in iteration 1 \(CUDA.*: lower quer"):
        one.advance()
    assert all(torch.equal(t, before[n]) for n, t in one.learner.state_dict().items())
    assert all(p.grad is None for p in one.parameters)
    assert (one.step, one.settings.micro_batch) == (0, 1)


def test_the_smaller_micro_batch_is_kept_for_resuming(tmp_path):
    room = Room()
    first = trainer(room, Less(room, after=2, most=3), checkpoint_every=1)
    first.run = create_run(tmp_path / "run", first.settings, describe_source(first.tasks))
    first.train()
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["settings"]["micro_batch"] == 2
    assert "micro_batch = 2" in (tmp_path / "run" / "config.toml").read_text()
    run = open_run(tmp_path / "run")
    again = trainer(room := Room(), Recorder())
    again.settings, again.run = replace(run.settings, iterations=6), run
    again.restore((run.checkpoints / "step-00000004.safetensors").read_bytes())
    room.seen.clear()
    again.train()
    assert set(room.seen) == {1, 2}
    state = final_state(tmp_path / "run")
    for name, value in first.state().items():
        assert torch.equal(value, state[name]), name


def test_validation_that_runs_out_of_memory_goes_on_with_fewer_tasks(monkeypatch):
    from ibaml.training import validation

    real, sizes = validation.score_tasks, []

    def scarce(*words, batch):
        sizes.append(batch)
        if batch > 3:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return real(*words, batch=batch)

    whole = trainer(Room(), seen := Recorder(), val_tasks=20)
    expected = whole.validate()
    monkeypatch.setattr(validation, "score_tasks", scarce)
    assert whole.validate() == pytest.approx(expected, rel=1e-10)
    assert sizes == [16, 8, 4, 2]
    assert "validation: out of memory with 16 task(s) at once" in seen.sentences[-3]


def test_a_trial_of_more_tasks_that_does_not_fit_leaves_one_at_a_time(monkeypatch):
    from ibaml.training import fitting

    monkeypatch.setattr(fitting, "free_bytes", lambda device: 10)  # so more than one is tried
    with pytest.raises(TrainingError, match="is free: lower micro_batch"):
        trainer(Room(), Recorder()).fit_memory()
    one = trainer(Room(1), Recorder())
    need = fitting.meta_step_bytes(one.learner, one.tasks, one.settings, 1)
    monkeypatch.setattr(fitting, "free_bytes", lambda device: 6 * need)  # for five, it seems
    one.fit_memory()
    assert one.settings.micro_batch == 1


def test_recordings_of_two_sizes_fit_beside_each_other():
    assert recorded_at_once(8, 8) == 8
    assert recorded_at_once(7, 8) == 4, "4 and 4 are one recording; 7 and 1, one more"
    assert recorded_at_once(5, 7) == 3
    assert recorded_at_once(1, 7) == 1
    assert recorded_at_once(0, 7) == 0


@pytest.mark.parametrize(
    ("error", "short"),
    [
        (torch.OutOfMemoryError("x"), True),
        (MemoryError(), True),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("cuBLAS: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"), True),
        (RuntimeError("shapes do not fit"), False),
        (TrainingError("out of memory in iteration 1"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_which_errors_mean_that_memory_ran_out(error, short):
    assert out_of_memory(error) is short


def test_one_of_two_processes_runs_out_and_both_take_fewer(tmp_path):
    script = tmp_path / "both.py"
    script.write_text(f"""
import sys, torch
sys.path.insert(0, {str(Path(__file__).parent)!r})
from ibaml.training.processes import joined, this_process
from test_out_of_memory import Room, Recorder, trainer
me = this_process()
with joined(me, torch.device("cpu")):
    room = Room(2 if me.rank else 1000)
    one = trainer(room, Recorder(), micro_batch=4)
    one.processes = me
    one.advance()
    torch.save((one.settings.micro_batch, one.learner.state_dict()), f"{tmp_path}/{{me.rank}}.pt")
""")
    done = subprocess.run(
        [*TORCHRUN, str(script)], capture_output=True, text=True, env=environment(), timeout=200
    )
    assert done.returncode == 0, done.stderr
    alone = trainer(Room(), Recorder())
    alone.advance()
    for rank in range(2):
        micro_batch, state = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        assert micro_batch == 2
        for name, value in alone.learner.state_dict().items():
            torch.testing.assert_close(state[name], value, rtol=1e-12, atol=1e-12)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_systems_own_limit_is_recovered_from(tmp_path):
    """A limit of the address space that a few tasks of 2,000 queries exceed."""
    script = tmp_path / "limited.py"
    script.write_text(f"""
import resource, sys
from dataclasses import replace
from pathlib import Path
sys.path.insert(0, {str(Path(__file__).parent)!r})
from runs import make, waves
from test_training import Recorder
one = make(waves(method="maml", hidden="256", queries=2000, tasks=32, micro_batch=1),
           watchers=[seen := Recorder()])
one.advance()
pages = int(Path("/proc/self/statm").read_text().split()[0])
resource.setrlimit(resource.RLIMIT_AS, 2 * (pages * 4096 + 60_000_000,))
one.settings = replace(one.settings, micro_batch=32)
one.advance()
print(*seen.sentences, one.settings.micro_batch, sep="\\n")
""")
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, env=environment(),
        timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    first, *_, last = done.stdout.splitlines()
    assert "out of memory in iteration 2 with 32 task(s) at once" in first
    assert 1 <= int(last) <= 16
