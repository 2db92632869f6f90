"""Does a run survive what happens to long runs? Kills, full disks, damaged files, scarce memory.

    make soak                         # 30 minutes: python tests/soak.py --minutes 30

Runs of several kinds are trained undisturbed once. Then runs like them are disturbed at random
moments and resumed each time. Each must end with the same last and best state, bit for bit; where
memory ran out, with the same to rounding. Beside them, one process goes on all the time (training,
evaluating, adapting, saving, loading): its memory, descriptors and threads must not grow, and no
temporary file may be left. The last lines are the verdict.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from ibaml.training.checkpoint import unpack

TASKS = "--checkpoint-every 5 --threads 1 --keep 2 --log-every 5"
KINDS = {
    "sinusoids, iBaML's head, ema": (
        "--data sinusoids --hidden 8 --queries 5 --tasks 4 --iterations 400 --val-every 20 "
        "--val-tasks 4 --ema 0.9"
    ),
    "vectors, MAML, micro-batches": (
        "--data {vectors} --method maml --ways 3 --queries 4 --hidden 8 --tasks 6 --micro-batch 4 "
        "--iterations 400 --val-every 20 --val-tasks 6 --no-tensorboard"
    ),
    "glyphs, iBaML with batch norm": (
        "--data glyphs --channels 4 --queries 3 --tasks 2 --iterations 120 --val-every 20 "
        "--val-tasks 2 --no-tensorboard"
    ),
    "sinusoids, large tasks in float64": (
        "--data sinusoids --method maml --hidden 64 --queries 1000 --tasks 8 --iterations 150 "
        "--val-every 20 --val-tasks 4 --dtype float64 --no-tensorboard"
    ),
}
SLOW = """
import os, time
real = os.fsync
os.fsync = lambda handle: (time.sleep(0.05), real(handle))
from ibaml.__main__ import main
main()
"""  # every write takes 50 ms, so that the process is always at it
ROUNDING = 1e-6  # relative, in float64, after 150 iterations


# --- what happens to a process -------------------------------------------------------------------


@dataclass
class Disk:
    """A file system of its own, which can be filled; where that is not allowed, a folder."""

    path: Path
    mounted: bool = False

    def mount(self, megabytes: int = 64) -> None:
        self.path.mkdir(parents=True)
        words = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "soak", str(self.path)]
        self.mounted = (
            shutil.which("mount") is not None
            and not subprocess.run(words, capture_output=True).returncode
        )

    def unmount(self) -> None:
        if self.mounted:
            subprocess.run(["umount", "-l", str(self.path)], check=True)

    def fill(self) -> None:
        with suppress(OSError), (self.path / "ballast").open("wb", buffering=0) as file:
            while file.write(bytes(4096)):
                pass

    def free(self) -> None:
        (self.path / "ballast").unlink(missing_ok=True)


def full_disk(process: subprocess.Popen[str], disk: Disk) -> None:
    """No room on the disk, or else no file may grow beyond a few bytes."""
    if disk.mounted:
        disk.fill()
    else:
        limit(process, resource.RLIMIT_FSIZE, 5000)


def no_memory(process: subprocess.Popen[str], disk: Disk) -> None:
    """The process may take next to no more memory than it has now."""
    try:
        pages = int(Path(f"/proc/{process.pid}/statm").read_text().split()[0])
    except (OSError, IndexError):  # it has just ended
        return
    most = pages * os.sysconf("SC_PAGE_SIZE") + 4_000_000
    limit(process, resource.RLIMIT_AS, most)


def limit(process: subprocess.Popen[str], kind: int, most: int) -> None:
    with suppress(ProcessLookupError):  # it has just ended
        resource.prlimit(process.pid, kind, (most, most))


def send(number: int) -> Callable[[subprocess.Popen[str], Disk], None]:
    return lambda process, disk: process.send_signal(number)


# each with the exit statuses it may end in; 0: the run came to its end first, or went on
EVENTS: dict[str, tuple[Callable[[subprocess.Popen[str], Disk], None], tuple[int, ...]]] = {
    "SIGKILL": (send(signal.SIGKILL), (-9, 0)),
    "SIGTERM": (send(signal.SIGTERM), (143, -15, 0)),
    "Ctrl-C": (send(signal.SIGINT), (130, 0)),
    "full disk": (full_disk, (1, 0)),
    "no memory": (no_memory, (1, 0)),
}


# --- what happens to files while no process runs -------------------------------------------------


def newest_file(run: Path) -> Path | None:
    return max((run / "checkpoints").glob("step-*.safetensors"), default=None)


def cut_short(run: Path, draw: random.Random) -> None:
    if (file := newest_file(run)) is not None:
        os.truncate(file, draw.randrange(file.stat().st_size))


def flipped(run: Path, draw: random.Random) -> None:
    if (file := newest_file(run)) is not None:
        content = bytearray(file.read_bytes())
        content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
        file.write_bytes(content)


def log_cut_short(run: Path, draw: random.Random) -> None:
    log = run / "log.jsonl"
    if log.exists() and log.stat().st_size:
        os.truncate(log, max(0, log.stat().st_size - draw.randrange(1, 60)))


def half_written(run: Path, draw: random.Random) -> None:
    if (run / "checkpoints").exists():
        name = f".step-{draw.randrange(100):08d}.safetensors-abc_{draw.randrange(10)}"
        (run / "checkpoints" / name).write_bytes(draw.randbytes(999))


DAMAGE: dict[str, Callable[[Path, random.Random], None]] = {
    "newest checkpoint cut short": cut_short,
    "newest checkpoint with a flipped bit": flipped,
    "log cut short": log_cut_short,
    "half-written file left": half_written,
}


# --- a disturbed run -----------------------------------------------------------------------------


@dataclass
class Soak:
    """All runs, where they lie, and what was found."""

    folder: Path
    disk: Disk
    draw: random.Random
    apart: int = 100  # the most iterations between two events
    wrong: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)

    def environment(self) -> dict[str, str]:
        temporary = self.folder / "temporary"
        temporary.mkdir(exist_ok=True)
        return {
            **os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200", "TMPDIR": str(temporary),
            "IBAML_CACHE": str(self.folder / "cache"),
            "MALLOC_MMAP_THRESHOLD_": "65536",  # freed memory is given back, so that more is needed
        }  # fmt: skip

    def start(self, run: Path, words: list[str], slow: bool = False) -> subprocess.Popen[str]:
        begun = newest_file(run) is not None
        if run.exists() and not begun:
            shutil.rmtree(run)
        again = ["--resume", str(run)] if begun else [*words, "--out", str(run)]
        return subprocess.Popen(
            [sys.executable, *(["-c", SLOW] if slow else ["-m", "ibaml"]), "train", *again],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=self.environment(),
        )  # fmt: skip

    def whole(self, words: list[str], run: Path) -> None:
        """Train undisturbed."""
        process = self.start(run, words)
        said, _ = process.communicate()
        if process.returncode:
            raise RuntimeError(said)

    def disturbed(self, words: list[str], run: Path, events: list[str]) -> None:
        """Train with these events, one in each process, then to the end."""
        for name in [*events, None]:
            slow = name is not None and self.draw.random() < 0.3
            self.counts["slow disk"] += slow
            process = self.start(run, words, slow)
            if name is not None:
                self._wait(process, run)
                EVENTS[name][0](process, self.disk)
            try:
                said, _ = process.communicate(timeout=1800)
            except subprocess.TimeoutExpired:
                process.kill()
                said = process.communicate()[0] + "\nit hangs"
                self.wrong.append(f"{run.name}: after {name or 'the last resume'} it hangs")
            self.disk.free()
            allowed = (0,) if name is None else EVENTS[name][1]
            if process.returncode not in allowed or "Traceback" in said:
                self.wrong.append(f"{run.name}: {name}: status {process.returncode}: {said[-900:]}")
            self.counts[name or "runs to the end"] += 1
            if name is not None and self.draw.random() < 0.5 and not finished(run):
                damage = self.draw.choice(list(DAMAGE))
                DAMAGE[damage](run, self.draw)
                self.counts[damage] += 1

    def _wait(self, process: subprocess.Popen[str], run: Path) -> None:
        """Until a random moment of the run."""
        goal = step(run) + self.draw.randrange(0, self.apart)
        until = time.monotonic() + 120
        while step(run) < goal and process.poll() is None and time.monotonic() < until:
            time.sleep(0.005)
        time.sleep(self.draw.random() * 0.05)


def step(run: Path) -> int:
    file = newest_file(run)
    return 0 if file is None else int(file.stem[5:])


def settings(run: Path) -> dict[str, object]:
    return json.loads((run / "config.json").read_text())["settings"]


def finished(run: Path) -> bool:
    return newest_file(run) is not None and step(run) == settings(run)["iterations"]


def differences(whole: Path, cut: Path) -> list[str]:
    """In what a disturbed run differs from one that nobody disturbed."""
    found = []
    rounds = settings(whole)["micro_batch"] != settings(cut)["micro_batch"]
    last = newest_file(whole)
    assert last is not None
    for name in (last.name, "best.safetensors"):
        if not (cut / "checkpoints" / name).exists():
            found.append(f"{name} is missing")
            continue
        a, b = (unpack((run / "checkpoints" / name).read_bytes())[0] for run in (whole, cut))
        if a.keys() != b.keys():
            found.append(f"{name} holds other tensors")
        elif rounds and name == last.name:  # (the best may be another iteration's)
            far = [n for n in a if not torch.allclose(a[n], b[n], rtol=ROUNDING, atol=ROUNDING)]
            found += [f"{name}: {n} differs by more than rounding" for n in far]
        elif not rounds:
            found += [f"{name}: {n} differs" for n in a if not torch.equal(a[n], b[n])]
    logged = [json.loads(line) for line in (cut / "log.jsonl").read_text().splitlines()]
    steps = [line["step"] for line in logged if "loss" in line]
    if steps != sorted(set(steps)):
        found.append("the log repeats steps")
    left = [p.name for p in (cut / "checkpoints").iterdir() if p.name.startswith(".")]
    return found + [f"{name} is left over" for name in left]


# --- a process that goes on ----------------------------------------------------------------------


def go_on(folder: Path) -> None:
    """Train, evaluate, adapt, save and load again and again, until there is a file named stop; each
    time a line with the resources of this process."""
    import ibaml
    from ibaml.assessment import Protocol, assess
    from ibaml.training import resolve, resume, train

    given = {"data": "sinusoids", "hidden": "8", "queries": 5, "tasks": 4, "iterations": 20,
             "checkpoint_every": 5, "val_every": 10, "val_tasks": 4, "threads": 1}  # fmt: skip
    x, y = torch.randn(5, 1), torch.randn(5, 1)
    while not (folder / "stop").exists():
        run, _ = train(resolve(given), folder / "run")
        resume(run.path, iterations=30)
        assess(run, Protocol(tasks=10))
        learner = ibaml.load(run.path)
        learner.adapt(x, y).save(folder / "p.ibaml")
        ibaml.load_posterior(folder / "p.ibaml").predict(x)
        shutil.rmtree(run.path)
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        threads = len(os.listdir("/proc/self/task"))
        print(json.dumps([pages * os.sysconf("SC_PAGE_SIZE") / 1e6,
                          len(os.listdir("/proc/self/fd")), threads]), flush=True)  # fmt: skip


def growth(samples: list[list[float]]) -> list[str]:
    """Which of memory (MB), descriptors and threads grew from the second third to the last."""
    if len(samples) < 9:
        return [f"only {len(samples)} samples of the steady process"]
    _, before, after = np.array_split(np.array(samples), 3)
    found = []
    for column, (name, slack) in enumerate(
        (("memory (MB)", 5.0), ("descriptors", 0.0), ("threads", 0.0))
    ):
        then, now = np.median(before[:, column]), np.median(after[:, column])
        if now > then + slack:
            found.append(f"{name} grew from {then:.0f} to {now:.0f}")
    return found


# --- all of it -----------------------------------------------------------------------------------


def vectors(path: Path) -> Path:
    rng = np.random.default_rng(0)
    x = 2 * rng.normal(size=(60, 1, 4)) + 0.4 * rng.normal(size=(60, 12, 4))
    np.savez(path, x=x.reshape(-1, 4).astype(np.float32), y=np.repeat(np.arange(60), 12))
    return path


def soak(minutes: float, seed: int, folder: Path) -> int:
    end, draw = time.monotonic() + 60 * minutes, random.Random(seed)
    work = Soak(folder, Disk(folder / "disk"), draw)
    work.disk.mount()
    (steady := folder / "steady").mkdir()
    beside = subprocess.Popen(
        [sys.executable, __file__, "--go-on", str(steady)], stdout=(folder / "samples").open("w"),
        stderr=(folder / "said").open("w"), env=work.environment(),
    )  # fmt: skip
    try:
        done = 0
        names = list(KINDS)
        while time.monotonic() < end:
            name = names[done % len(names)]
            words = f"{KINDS[name]} {TASKS}".format(vectors=folder / "v.npz").split()
            if not (folder / "v.npz").exists():
                vectors(folder / "v.npz")
            whole = folder / f"whole-{done % len(names)}"
            if not whole.exists():
                work.whole(words, whole)
            cut = work.disk.path / f"cut-{done}"
            events = draw.sample(list(EVENTS), 4)
            before = len(work.wrong)
            work.disturbed(words, cut, events)
            if len(work.wrong) == before:
                work.wrong += [f"{cut.name} ({name}): {what}" for what in differences(whole, cut)]
            verdict = "as if undisturbed" if len(work.wrong) == before else "WRONG"
            small = settings(cut)["micro_batch"] != settings(whole)["micro_batch"]
            print(*work.wrong[before:], sep="\n", end="\n" if work.wrong[before:] else "")
            verdict += " (to rounding: fewer tasks at a time)" if small else ""
            print(f"{name}: {', '.join(events)}: {verdict}", flush=True)
            done += 1
            shutil.rmtree(cut)
    finally:
        (steady / "stop").touch()
        try:
            beside.wait(timeout=120)
        except subprocess.TimeoutExpired:
            beside.kill()
        work.disk.unmount()
    if "Traceback" in (said := (folder / "said").read_text()):
        work.wrong.append(f"the steady process: {said[-900:]}")
    samples = [json.loads(line) for line in (folder / "samples").read_text().splitlines()]
    work.wrong += growth(samples)
    # what a killed process leaves is its own: torch's empty folders
    left = [p.name for p in (folder / "temporary").iterdir() if p.is_file() or any(p.iterdir())]
    work.wrong += [f"temporary file left: {name}" for name in left]
    first, last = samples[len(samples) // 3], samples[-1]
    print(f"{done} runs; " + ", ".join(f"{n} × {name}" for name, n in sorted(work.counts.items())))
    for when, (memory, files, threads) in (("after a third", first), ("at the end", last)):
        print(f"the steady process {when} of its {len(samples)} rounds: {memory:.0f} MB, "
              f"{files:.0f} descriptors, {threads:.0f} threads")  # fmt: skip
    print(*work.wrong, f"verdict: {len(work.wrong)} wrong", sep="\n")
    return 1 if work.wrong else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--go-on", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.go_on is not None:
        go_on(given.go_on)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        return soak(given.minutes, given.seed, Path(folder))


if __name__ == "__main__":
    sys.exit(main())
