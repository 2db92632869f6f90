"""A process forked after the library ran: it neither hangs nor answers differently."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from runs import environment

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="nothing is forked here")

BEGIN = f"""
import os, sys, threading, time, warnings
import torch, ibaml
from torch.utils.data import DataLoader, Dataset
sys.path.insert(0, {str(Path(__file__).parent)!r})
torch.set_num_threads(2)
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.Tanh(), torch.nn.Linear(30, 3))
learner = ibaml.methods.ibaml(net.double(), adapt="head")
x, y = torch.randn(15, 20).double(), torch.arange(15) % 3
batch = ibaml.TaskBatch(x[None], y[None], x[None], y[None], classes=3)

def work():
    "Adapts, predicts and trains, by matrices large enough for torch's pool of threads."
    (torch.ones(600, 600) @ torch.ones(600, 600)).exp().sum()
    learner.zero_grad()
    loss = learner(batch, torch.Generator().manual_seed(0))
    loss.backward()
    answers = learner.adapt(x, y).predict_proba(x)
    return torch.cat([answers.flatten(), *(p.grad.flatten() for p in learner.parameters())])

def child(job):
    warnings.simplefilter("ignore")  # Python 3.12 warns of forks in a process with threads
    if (number := os.fork()) == 0:
        signal = 1
        try:
            signal = 0 if job() else 2
        finally:
            os._exit(signal)
    return os.waitpid(number, 0)[1]

def same(other):
    return torch.allclose(expected, other, rtol=1e-9, atol=1e-12)

expected = work()
"""


def run(script: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", BEGIN + script], capture_output=True, text=True, timeout=100,
        env={**environment(), "OMP_NUM_THREADS": "2"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_forked_process_works_like_its_parent():
    out = run("""
print(child(lambda: same(work())), child(lambda: torch.get_num_threads() == 1))
print(torch.get_num_threads(), same(work()))
""")
    assert out.split() == ["0", "0", "2", "True"]


def test_a_fork_while_another_thread_is_inside_the_network():
    """Its parameters are replaced meanwhile. The other thread's training call stays its own."""
    out = run("""
inside = threading.Event()
def wait(*_):
    if threading.current_thread() is not threading.main_thread():
        inside.set()
        time.sleep(0.5)
hook = net[0].register_forward_hook(wait)
thread = threading.Thread(target=lambda: learner(batch), daemon=True)
thread.start()
inside.wait()
def adapts():
    return same(torch.cat([learner.adapt(x, y).predict_proba(x).flatten(), expected[45:]]))
def trains():
    try:
        learner(batch)
    except RuntimeError as error:
        return "another thread is inside a training call" in str(error)
    return True  # it had left: a fork waits for the locks that it holds
print(child(adapts), child(trains))
thread.join()
hook.remove()
print(child(lambda: same(work())), same(work()))
""")
    assert out.split() == ["0", "0", "0", "True"]


def test_workers_of_a_dataloader_may_adapt():
    out = run("""
class Answers(Dataset):
    def __len__(self): return 4
    def __getitem__(self, i): return work()
for found in DataLoader(Answers(), batch_size=None, num_workers=2, multiprocessing_context="fork"):
    print(same(found))
""")
    assert out.split() == ["True"] * 4


CACHE = """
import os, sys, time
import numpy as np
from ibaml.tasks.cache import cached
def build():
    open(sys.argv[1] + "/" + str(os.getpid()), "w").close()
    while len(os.listdir(sys.argv[1])) < 2:  # both are at it
        time.sleep(0.01)
    return np.arange(500_000, dtype=np.uint8), {"who": "both"}
array, facts = cached("pair", "d" * 30, build)
print(int(array.astype(int).sum()), facts["who"])
"""


def test_two_commands_that_build_one_entry_at_once_both_read_it_whole(tmp_path):
    (at_it := tmp_path / "at-it").mkdir()
    here = environment(IBAML_CACHE=str(tmp_path / "cache"))
    pair = [
        subprocess.Popen(
            [sys.executable, "-c", CACHE, at_it], stdout=subprocess.PIPE, text=True, env=here
        )
        for _ in range(2)
    ]
    expected = int(np.arange(500_000, dtype=np.uint8).astype(int).sum())
    for process in pair:
        assert process.communicate(timeout=100)[0] == f"{expected} both\n"
        assert process.returncode == 0
    store = tmp_path / "cache" / "ibaml-datasets"
    (entry,) = (p for p in store.iterdir() if p.name != "CACHEDIR.TAG")
    assert {p.name for p in entry.iterdir()} == {"images.npy", "facts.json"}


def test_an_entry_that_vanishes_while_it_is_built_is_no_loss(tmp_path, monkeypatch):
    """Another process found it damaged and removes it, just after this one has repaired it."""
    from ibaml.tasks import cache

    monkeypatch.setenv("IBAML_CACHE", str(tmp_path))

    def gone(entry):
        raise FileNotFoundError(entry)

    monkeypatch.setattr(cache, "_read", gone)
    array, facts = cache.cached("x", "a" * 30, lambda: (np.arange(5), {"a": 1}))
    assert (array.tolist(), facts) == ([0, 1, 2, 3, 4], {"a": 1})
