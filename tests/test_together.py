"""Do processes that somebody else started learn as one process does?"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import ibaml
from ibaml.training import broadcast, sum_gradients

TASKS = ibaml.tasks.Sinusoids()
SPLITS = [  # uneven, so that the mean of means would differ; and one process has none
    (range(0, 5), range(5, 6)),
    (range(6), range(0)),
]


class Net(torch.nn.Module):
    """A network with running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.Linear(1, 6)
        self.norm = torch.nn.BatchNorm1d(6)
        self.head = torch.nn.Linear(6, 1)

    def forward(self, x):
        return self.head(torch.tanh(self.norm(self.body(x))))


def learner_of(seed: int) -> ibaml.MetaLearner:
    torch.manual_seed(seed)
    return ibaml.methods.ibaml(
        Net().double(), adapt="all", posterior="diagonal", steps=3, samples=2, lr=0.01
    )


def meta_step(learner, keys) -> None:
    with sum_gradients(learner):
        if len(keys):
            batch = TASKS.batch(seed=0, keys=keys, support=5, query=10)
            learner(batch.to(torch.float64), torch.Generator().manual_seed(1)).backward()


def learned(split_of_process, seed: int) -> dict[str, torch.Tensor]:
    """A learner's state after a meta-step with each of two splits of the same tasks."""
    learner = learner_of(seed)
    broadcast(learner)
    for keys in split_of_process:
        meta_step(learner, keys)
        with torch.no_grad():
            for p in learner.parameters():
                p -= 0.01 * p.grad
    return learner.state_dict()


def process(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    torch.save(learned([split[rank] for split in SPLITS], seed=rank), f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def test_two_processes_of_another_program_take_the_steps_of_one(tmp_path):
    mp.spawn(process, (str(tmp_path),), nprocs=2)
    alone = learned([range(6), range(6)], seed=0)
    before = learner_of(0).state_dict()
    for rank in range(2):
        state = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        for name, value in alone.items():
            torch.testing.assert_close(state[name], value, rtol=1e-9, atol=1e-12, msg=name)
    moved = [name for name, value in alone.items() if not torch.equal(before[name], value)]
    assert any("running_var" in name for name in moved)
    assert any("body" in name for name in moved)


def test_a_single_process_has_the_plain_gradient():
    learner, plain = learner_of(0), learner_of(0)
    batch = TASKS.batch(seed=0, keys=range(3), support=5, query=10).to(torch.float64)
    with sum_gradients(learner):
        learner(batch, torch.Generator().manual_seed(1)).backward()
    plain(batch, torch.Generator().manual_seed(1)).backward()
    for p, q in zip(learner.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-12, atol=0)


def test_a_second_call_inside_is_refused():
    learner = learner_of(0)
    batch = TASKS.batch(seed=0, keys=range(2), support=5, query=10).to(torch.float64)

    def twice() -> None:
        with sum_gradients(learner):
            learner(batch).backward()
            learner(batch).backward()

    with pytest.raises(RuntimeError, match="call it once"):
        twice()
