"""Checkpoints that are damaged, missing, or cannot be written: the best state that can be read is
used, nothing good is lost, and the last words say what was saved and what to do."""

from __future__ import annotations

import json
import shutil
from itertools import combinations
from pathlib import Path

import pytest
import torch

from ibaml.training import RunError, TrainingError, open_run, resume, train
from ibaml.training.checkpoint import unpack
from runs import bytes_of, final_state, ibaml, same, waves
from test_training import Recorder


class Crash(Recorder):
    """The process dies after a step (as far as the run can tell)."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.at = at

    def stepped(self, step):
        if step.step == self.at:
            raise ZeroDivisionError("the process died")


def crashed(path: Path, at: int = 13, **given: object) -> Path:
    """A run of 16 iterations that died in one of them, with checkpoints after 4, 8 and 12."""
    options = {"iterations": 16, "checkpoint_every": 4, "val_every": 4, **given}
    with pytest.raises(ZeroDivisionError, match="the process died"):
        train(waves(**options), path, watchers=lambda run, learner: [Crash(at)])
    return path


def cut_short(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-100])


def flip_a_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content)


def put_a_folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> tuple[Path, Path]:
    """The run as nobody disturbed it, and the one that died."""
    folder = tmp_path_factory.mktemp("checkpoints")
    options = {"iterations": 16, "checkpoint_every": 4, "val_every": 4}
    train(waves(**options), folder / "whole")
    return folder / "whole", crashed(folder / "cut")


NAMES = ("step-00000004", "step-00000008", "step-00000012", "best")
DAMAGED = [some for count in range(5) for some in combinations(NAMES, count)]


def step_of(file: Path) -> int:
    return unpack(file.read_bytes())[1]["step"]


def best_nll(run: Path) -> float:
    return unpack((run / "checkpoints" / "best.safetensors").read_bytes())[1]["validation"]["nll"]


@pytest.mark.parametrize("damaged", DAMAGED, ids=lambda names: "+".join(names) or "none")
def test_whatever_is_damaged_the_newest_state_that_can_be_read_is_gone_on_from(
    damaged, whole, tmp_path
):
    """Every combination of three checkpoints and the best one; cut short and with a bit flipped."""
    run = tmp_path / "run"
    shutil.copytree(whole[1], run)
    files = {name: run / "checkpoints" / f"{name}.safetensors" for name in NAMES}
    steps = {name: step_of(file) for name, file in files.items()}
    nll = best_nll(run)
    for i, name in enumerate(damaged):
        (cut_short, flip_a_bit)[i % 2](files[name])
    left = [steps[name] for name in NAMES if name not in damaged]
    if not left:
        before = {f: f.read_bytes() for f in files.values()}
        with pytest.raises(
            RunError, match=r"no checkpoint of .* can be read .*train in a new fold"
        ):
            resume(run)
        assert {f: f.read_bytes() for f in files.values()} == before
        return
    seen = Recorder()
    resume(run, watchers=lambda run, learner: [seen])
    assert seen.first == max(left)
    for name in damaged:
        if steps[name] >= max(left):
            assert any(f"{name}.safetensors is ignored" in text for text in seen.sentences)
    assert same(final_state(run), final_state(whole[0]))
    if "best" not in damaged:
        assert best_nll(run) <= nll


def test_a_folder_in_the_place_of_the_newest_checkpoint_is_no_checkpoint(whole, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(whole[1], run)
    put_a_folder(run / "checkpoints" / "step-00000012.safetensors")
    (run / "checkpoints" / "best.safetensors").unlink()
    with pytest.raises(
        RunError, match=r"step-00000012.*last good checkpoint is .*step-00000008.*Move the folder"
    ):
        resume(run)
    (run / "checkpoints" / "step-00000012.safetensors").rmdir()
    resume(run)
    assert same(final_state(run), final_state(whole[0]))


@pytest.mark.parametrize("keep", [1, 2])
def test_of_the_checkpoints_that_are_kept_all_can_be_read(keep, tmp_path):
    """Damaged files, older and newer ones, do not count and push out no good one."""
    path = crashed(tmp_path / "run", at=13, checkpoint_every=3, keep=4)
    config = json.loads((path / "config.json").read_text())
    config["settings"]["keep"] = keep
    (path / "config.json").write_text(json.dumps(config))
    files = {n: path / "checkpoints" / f"step-{n:08d}.safetensors" for n in (3, 6, 9, 12)}
    flip_a_bit(files[9])
    flip_a_bit(files[12])
    run = open_run(path)
    tensors, facts = unpack(files[6].read_bytes())
    run.save(7, tensors, {k: v for k, v in facts.items() if k != "step"})
    readable = []
    for file in run.saved():
        try:
            readable.append(step_of(file))
        except ValueError:
            continue
    assert readable == [7, 6][:keep]
    saved, _ = run.newest()
    assert saved is not None


def test_the_best_checkpoint_is_not_replaced_by_a_worse_one_after_a_resume(tmp_path):
    """Every checkpoint of a step is lost; the best one is better than all that is to come."""
    path = crashed(tmp_path / "run", val_every=4)
    for file in (path / "checkpoints").glob("step-*"):
        cut_short(file)
    best = path / "checkpoints" / "best.safetensors"
    before, content = best_nll(path), best.read_bytes()

    class Worse(Recorder):
        def stepped(self, step):  # what is learned from now on is forgotten again
            for p in self.learner.parameters():
                p.data.fill_(0.5)

    seen = Worse()

    def watchers(run, learner):
        seen.learner = learner
        return [seen]

    resume(path, watchers=watchers)
    assert min(scores["nll"] for _, scores, _ in seen.validations) > before
    assert best.read_bytes() == content


# --- a full disk ---------------------------------------------------------------------------------


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs the kernel's full device")
def test_a_full_disk_while_logging_saves_and_says_how_to_go_on(tmp_path):
    options = {"iterations": 12, "checkpoint_every": 100, "val_every": 5, "log_every": 1}
    train(waves(**options), tmp_path / "whole")

    class Fill(Recorder):
        def stepped(self, step):
            if step.step == 5:
                (tmp_path / "cut" / "log.jsonl").unlink()
                (tmp_path / "cut" / "log.jsonl").symlink_to("/dev/full")

    with pytest.raises(RunError, match=r"could not be written \(No space left") as error:
        train(waves(**options), tmp_path / "cut", watchers=lambda run, learner: [Fill()])
    said = str(error.value)
    for words in ("log.jsonl could not be written (No space left", "saved after iteration 5",
                  f"ibaml train --resume {tmp_path / 'cut'}"):  # fmt: skip
        assert words in said
    (tmp_path / "cut" / "log.jsonl").unlink()
    resume(tmp_path / "cut")
    assert same(final_state(tmp_path / "cut"), final_state(tmp_path / "whole"))
    assert best_nll(tmp_path / "cut") == best_nll(tmp_path / "whole")


def test_a_log_that_cannot_be_begun_is_said_before_any_work(tmp_path, monkeypatch):
    from ibaml.training import watch

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(watch, "write_whole", full)
    seen = Recorder()
    with pytest.raises(RunError, match=r"log\.jsonl could not be written .*: make room"):
        train(waves(iterations=3), tmp_path / "run", watchers=lambda run, learner: [seen])
    assert not seen.steps


# --- the micro-batch belongs to the run ----------------------------------------------------------


def with_free(monkeypatch: pytest.MonkeyPatch, free: int | None) -> None:
    monkeypatch.setattr("ibaml.training.fitting.free_bytes", lambda device: free)


def chosen(run: Path) -> int:
    return json.loads((run / "config.json").read_text())["settings"]["micro_batch"]


@pytest.mark.parametrize("free", [None, 10**13])
def test_a_run_resumed_with_less_memory_takes_the_micro_batch_it_began_with(
    free, tmp_path, monkeypatch
):
    options = {"method": "maml", "tasks": 6, "val_every": 0}
    with_free(monkeypatch, free)
    train(waves(iterations=16, **options), tmp_path / "whole")
    crashed(tmp_path / "cut", **options)
    assert chosen(tmp_path / "cut") == 6
    from runs import make

    trainer = make(waves(**options))
    some = 2 * bytes_of(trainer, 3)  # a fresh run would take fewer at a time
    with_free(monkeypatch, some)
    train(waves(iterations=1, **options), tmp_path / "fresh")
    if chosen(tmp_path / "fresh") < 6:
        with pytest.raises(TrainingError, match=r"takes 6 tasks at a time.*--micro-batch"):
            resume(tmp_path / "cut")
    else:
        resume(tmp_path / "cut")
        assert same(final_state(tmp_path / "cut"), final_state(tmp_path / "whole"))


def test_the_micro_batch_that_fitted_stays_when_there_is_more_memory(tmp_path, monkeypatch):
    from runs import make

    options = {"method": "maml", "tasks": 6, "val_every": 0}
    little = 2 * bytes_of(make(waves(**options)), 2)
    with_free(monkeypatch, little)
    train(waves(iterations=16, **options), tmp_path / "whole")
    crashed(tmp_path / "cut", **options)
    assert 1 <= chosen(tmp_path / "cut") < 6
    with_free(monkeypatch, 10**13)
    resume(tmp_path / "cut")
    assert same(final_state(tmp_path / "cut"), final_state(tmp_path / "whole"))


def test_another_micro_batch_may_be_asked_for_when_a_run_goes_on(tmp_path):
    run = crashed(tmp_path / "run", tasks=6, val_every=0)
    done = ibaml("train", "--resume", run, "--micro-batch", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert chosen(run) == 2
    assert "micro_batch is 2 from here on (it was 6)" in (run / "log.jsonl").read_text()
    assert "micro_batch = 2" in (run / "config.toml").read_text()
    assert torch.isfinite(torch.cat([t.reshape(-1) for t in final_state(run).values()])).all()


def test_two_processes_take_the_smaller_of_their_micro_batches(monkeypatch):
    """Memory differs between processes; sums must be rounded alike when the run is resumed."""
    from ibaml.training.processes import Processes
    from runs import make

    asked: list[int] = []

    class Pair(Processes):
        def least(self, number, device):
            asked.append(number)
            return min(number, 2)

    with_free(monkeypatch, 10**13)
    trainer = make(waves(method="maml", tasks=12), processes=Pair(world=2))
    trainer.fit_memory()
    assert asked[0] >= 6
    assert trainer.settings.micro_batch == 2
