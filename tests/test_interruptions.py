"""Processes that are killed, stopped, multiplied and restarted: nothing is lost or differs."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from ibaml.training import resume
from runs import (
    WAVES,
    environment,
    features_file,
    final_state,
    gradient,
    ibaml,
    make,
    same,
    waves,
    words,
)

NORM = {"data": "glyphs", "channels": 2, "tasks": 3, "queries": 2, "dtype": "float64"}
SHORT = {
    **WAVES, "method": "fomaml", "steps": 1, "tasks": 2, "iterations": 250, "checkpoint_every": 5,
    "val_every": 125,
}  # fmt: skip


def start(
    *arguments: str | Path, script: Path | None = None, **extra: str
) -> subprocess.Popen[str]:
    program = ["-m", "ibaml"] if script is None else [str(script)]
    return subprocess.Popen(
        [sys.executable, *program, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment(**extra),
    )


def steps(run: Path) -> int:
    paths = sorted((run / "checkpoints").glob("step-*.safetensors"))
    return int(paths[-1].stem.split("-")[1]) if paths else 0


def wait_for(condition, process: subprocess.Popen[str], seconds: float = 90.0) -> None:
    until = time.monotonic() + seconds
    while not condition():
        if process.poll() is not None or time.monotonic() > until:
            raise AssertionError(process.communicate()[0])
        time.sleep(0.005)


def test_killed_five_times_at_random_the_weights_are_those_of_the_uninterrupted_run(tmp_path):
    """SIGKILL between any two instructions, also while a checkpoint is written (every 5 steps)."""
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    chance = random.Random(0)
    process = start("train", "--out", cut, *words(SHORT))
    for kill in range(5):
        goal = min(steps(cut) + chance.randrange(1, 35), SHORT["iterations"] - 75 + kill)
        wait_for(lambda goal=goal: steps(cut) >= goal, process)
        time.sleep(chance.random() * 0.03)
        process.kill()
        process.communicate()
        assert process.returncode == -signal.SIGKILL
        process = start("train", "--resume", cut)
    output, _ = process.communicate(timeout=200)
    assert process.returncode == 0, output
    done = ibaml("train", "--out", whole, *words(SHORT))
    assert done.returncode == 0, done.stdout
    assert same(final_state(cut), final_state(whole))
    assert steps(cut) == SHORT["iterations"]
    assert not list((cut / "checkpoints").glob(".*")), "half-written files were swept away"


@pytest.mark.parametrize("moment", ["replace", "fsync"])
def test_killed_while_a_checkpoint_is_written(moment, tmp_path):
    """The process dies inside the write of its fourth checkpoint: the third one is there."""
    script = f"""
import os, sys
from ibaml import files
from ibaml.training import train
from runs import waves
real, count = os.{moment}, 0
def dying(*arguments):
    global count
    written = os.listdir({str(tmp_path / "cut" / "checkpoints")!r})
    count += sum(n.startswith(".step-00000008") for n in written)
    if count:
        os._exit(9)
    return real(*arguments)
files.os.{moment} = dying
settings = waves(method="fomaml", iterations=12, checkpoint_every=2, val_every=0)
train(settings, {str(tmp_path / "cut")!r})
"""
    died = subprocess.run(
        [sys.executable, "-c", script], env=environment(PYTHONPATH=str(Path(__file__).parent))
    )
    assert died.returncode == 9
    assert steps(tmp_path / "cut") == 6
    resume(tmp_path / "cut")
    from ibaml.training import train

    train(
        waves(method="fomaml", iterations=12, checkpoint_every=2, val_every=0), tmp_path / "whole"
    )
    assert same(final_state(tmp_path / "cut"), final_state(tmp_path / "whole"))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_and_sigterm_save_and_say_how_to_go_on(number, tmp_path):
    run = tmp_path / "run"
    process = start(
        "train", "--out", run, *words({**SHORT, "iterations": 10_000, "checkpoint_every": 50})
    )
    wait_for(lambda: steps(run) >= 50, process)
    process.send_signal(number)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + number, output
    assert f"{number.name}: saved after iteration {steps(run)}" in output
    assert f"ibaml train --resume {run}" in output
    assert "Traceback" not in output


# --- a clear message, a non-zero exit ------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "words_"),
    [
        (["--methd", "maml"], ["--method"]),
        (["--method", "mmal"], ["method", "did you mean maml"]),
        (["--ways", "5000"], ["5000-way", "2819", "lower ways"]),
        (["--data", "nowhere/at/all"], ["nowhere/at/all", "neither a path nor one of"]),
        (["--config", "nothing.toml"], ["nothing.toml"]),
        (["--resume", "nothing"], ["nothing", "does not exist"]),
        (["--out", "/proc/ibaml/run", "--data", "sinusoids"], ["/proc/ibaml/run", "cannot be"]),
        (["--device", "cuda:77"], ["cuda:77"]),
    ],
)
def test_what_is_wrong_is_a_sentence_and_an_exit_status(given, words_, tmp_path):
    done = ibaml("train", *given, cwd=tmp_path)
    said = " ".join((done.stdout + done.stderr).split())
    assert done.returncode != 0
    assert "Traceback" not in said
    for word in words_:
        assert word in said
    assert not (tmp_path / "runs").exists(), "nothing is begun"


def test_data_that_vanish_during_a_run_do_not_hurt_it_and_are_missed_on_resume(tmp_path):
    file = Path(features_file(tmp_path / "features.npz"))
    given = {
        "data": file, "method": "fomaml", "ways": 2, "queries": 2, "hidden": "4",
        "iterations": 400, "checkpoint_every": 20, "val_every": 0, "tensorboard": False,
    }  # fmt: skip
    run = tmp_path / "run"
    process = start("train", "--out", run, *words(given))
    wait_for(lambda: steps(run) >= 20, process)
    file.unlink()
    output, _ = process.communicate(timeout=100)
    assert process.returncode == 0, output
    assert steps(run) == 400
    again = ibaml("train", "--resume", run, "--iterations", "500")
    assert again.returncode == 1
    assert "features.npz" in again.stdout
    assert "Traceback" not in again.stdout + again.stderr
    assert steps(run) == 400


def test_a_file_larger_than_allowed_is_a_full_disk(tmp_path):
    """The kernel refuses to write beyond a limit, halfway through a checkpoint."""
    given = words({**SHORT, "iterations": 20, "hidden": "99,99"})
    script = f"""
import resource, signal, sys
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
from ibaml.cli import app
app(["train", "--out", {str(tmp_path / "run")!r}, *{given!r}])
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=environment()
    )
    said = " ".join(done.stdout.split())
    assert done.returncode == 1, done.stdout + done.stderr
    assert "could not be written" in said
    assert "there is none before it" in said
    assert not list((tmp_path / "run" / "checkpoints").iterdir())


# --- several processes ---------------------------------------------------------------------------

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def test_two_processes_give_the_gradient_of_one(tmp_path):
    """Odd numbers of tasks, batch norm, and a process without tasks; float64, 1e-12."""
    script = tmp_path / "both.py"
    script.write_text(f"""
import sys, torch
sys.path.insert(0, {str(Path(__file__).parent)!r})
from runs import make, gradient, waves
from ibaml.training import resolve
from ibaml.training.processes import joined, this_process
cases = {{
    "ibaml": waves(dtype="float64", tasks=5),
    "maml": waves(method="maml", dtype="float64", tasks=1),
    "norm": resolve({{**{NORM!r}}}),
}}
me = this_process()
with joined(me, torch.device("cpu")):
    for name, settings in cases.items():
        trainer = make(settings, processes=me)
        found = [gradient(trainer, 4), *trainer.learner.buffers()]
        mine = me.share(range(settings.tasks))
        drawn = [b.task_keys for b in trainer.tasks.batches("train", mine)] if mine else []
        torch.save((found, drawn), f"{tmp_path}/{{name}}-{{me.rank}}.pt")
""")
    done = subprocess.run(
        [*TORCHRUN, str(script)], capture_output=True, text=True, env=environment(), timeout=200
    )
    assert done.returncode == 0, done.stderr
    from ibaml.training import resolve

    cases = {
        "ibaml": waves(dtype="float64", tasks=5),
        "maml": waves(method="maml", dtype="float64", tasks=1),
        "norm": resolve(NORM),
    }
    for name, settings in cases.items():
        trainer = make(settings)
        alone = [gradient(trainer, 4), *trainer.learner.buffers()]
        keys = []
        for rank in range(2):
            actual, drawn = torch.load(tmp_path / f"{name}-{rank}.pt", weights_only=True)
            keys += [k for part in drawn for k in part]
            for a, b in zip(actual, alone, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
        assert keys == list(range(settings.tasks)), "the same episodes"


def test_one_of_two_processes_killed_the_run_completes(tmp_path):
    run = tmp_path / "run"
    given = {**SHORT, "iterations": 300, "checkpoint_every": 20, "val_every": 0}
    process = subprocess.Popen(
        [*TORCHRUN, "--max-restarts", "2", "-m", "ibaml", "train", "--out", run, *words(given)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment(),
    )
    wait_for(lambda: steps(run) >= 40, process)
    workers = subprocess.run(
        ["pgrep", "-P", str(process.pid)], capture_output=True, text=True
    ).stdout.split()
    assert len(workers) == 2
    os.kill(int(workers[1]), signal.SIGKILL)
    output, _ = process.communicate(timeout=200)
    assert process.returncode == 0, output
    assert steps(run) == 300
    assert "resuming after iteration" in output


def test_a_signal_to_one_process_stops_all_at_the_same_iteration(tmp_path):
    script = tmp_path / "stop.py"
    script.write_text(f"""
import os, signal, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from runs import waves
from ibaml.training import train
from test_training import Recorder
class Stop(Recorder):
    def stepped(self, step):
        if step.step == 5:
            os.kill(os.getpid(), signal.SIGTERM)
settings = waves(method="fomaml", iterations=500, val_every=0)
_, outcome = train(settings, {str(tmp_path / "run")!r}, watchers=lambda run, learner: [Stop()])
print(f"{{outcome.step}} {{int(outcome.signal)}}\\n", end="")
""")
    done = subprocess.run(
        [*TORCHRUN, str(script)], capture_output=True, text=True, env=environment(), timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("8 15\n") == 2, done.stdout
    assert steps(tmp_path / "run") == 8  # 5 is told of in 6, asked about in 7, agreed on in 8


def test_a_restart_does_not_go_on_with_another_run(tmp_path):
    run = tmp_path / "run"
    train_ = [*words({**SHORT, "iterations": 3, "val_every": 0}), "--out", run]
    assert ibaml("train", *train_).returncode == 0
    others = words({**SHORT, "iterations": 5, "val_every": 0, "method": "maml"})
    again = environment(
        RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1",
        TORCHELASTIC_RESTART_COUNT="1",
    )  # fmt: skip
    done = ibaml("train", *others, "--out", run, env=again)
    assert done.returncode == 1
    assert "is another run (method differs)" in done.stdout
    assert steps(run) == 3
