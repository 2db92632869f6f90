"""Which pictures do the concepts have? All are drawn here, by the library, when the site is built.

python docs/pictures.py FOLDER
"""

from __future__ import annotations

import gc
import runpy
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

import ibaml
from ibaml.report import reliability_figure
from ibaml.report.figure import BLUE, GRAY, GREEN, ORANGE, RED, blank, hide_frame, save

HERE = Path(__file__).parent


def draw_all(folder: Path) -> None:
    """Every picture that is not there yet or is older than this file."""
    torch.set_num_threads(1)  # on a busy machine two threads wait for each other
    folder.mkdir(exist_ok=True)
    for name, draw in PICTURES.items():
        path = folder / f"{name}.png"
        if not path.exists() or path.stat().st_mtime < Path(__file__).stat().st_mtime:
            torch.manual_seed(0)
            draw(path)


def bands(path: Path) -> None:
    """The example's own picture."""
    old, sys.argv = sys.argv, ["sinusoids.py", str(path)]
    try:
        with redirect_stdout(StringIO()):
            runpy.run_path(str(HERE.parent / "examples/sinusoids.py"))
    finally:
        sys.argv = old


def clusters(generator: torch.Generator, tasks: int, shots: int = 1) -> ibaml.TaskBatch:
    """Three round classes in the plane, and queries around them."""
    centers = 1.5 * torch.randn(tasks, 3, 1, 2, generator=generator)
    x = centers + 0.45 * torch.randn(tasks, 3, shots + 12, 2, generator=generator)
    y = torch.arange(3)[None, :, None].expand(tasks, 3, shots + 12)
    parts = [(x[:, :, rows].flatten(1, 2), y[:, :, rows].flatten(1, 2)) for rows in
             (slice(shots), slice(shots, None))]  # fmt: skip
    return ibaml.TaskBatch(*parts[0], *parts[1])


def learned(method: Callable[..., ibaml.MetaLearner], **options: object) -> ibaml.MetaLearner:
    torch.manual_seed(0)
    learner = method(ibaml.nn.mlp(2, 3, hidden=(32, 32), activation="tanh"), **options)
    optimizer = torch.optim.Adam(learner.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(0)
    for _ in range(120):
        optimizer.zero_grad()
        learner(clusters(generator, 8)).backward()
        optimizer.step()
    return learner


def sure(path: Path) -> None:
    """How sure two learners are, across the plane, of one new task."""
    task = clusters(torch.Generator().manual_seed(11), 1)
    axis = torch.linspace(-6, 6, 120)
    plane = torch.cartesian_prod(axis, axis)
    figure = blank(8.2, 3.6)
    axes = figure.subplots(1, 2, sharey=True)
    learners = {
        "one weight vector (iMAML)": learned(ibaml.methods.imaml),
        "a posterior over weights (iBaML)": learned(ibaml.methods.ibaml),
    }
    for axis_of, (name, learner) in zip(axes, learners.items(), strict=True):
        posterior = learner.adapt(task.support_x[0], task.support_y[0])
        chance = posterior.predict_proba(plane).max(-1).values.view(120, 120).T
        image = axis_of.contourf(axis, axis, chance, np.linspace(1 / 3, 1, 9), cmap="Blues")
        for c, (color, mark) in enumerate(zip((RED, ORANGE, GREEN), "os^", strict=True)):
            x = task.support_x[0][task.support_y[0] == c]
            axis_of.scatter(*x.T, c=color, marker=mark, edgecolors="white", s=60)
        axis_of.set_title(name, fontsize=11)
    figure.colorbar(image, ax=axes, label="probability of the likeliest class", format="%.2f")
    save(figure, path)


class Held:
    """A tensor that a graph holds, and the largest sum of all held at one time, in bytes."""

    now = peak = 0
    owners: ClassVar[Counter[int]] = Counter()

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, self.place = tensor, tensor.untyped_storage().data_ptr()
        Held.owners[self.place] += 1
        if Held.owners[self.place] == 1:
            Held.now += tensor.untyped_storage().nbytes()
            Held.peak = max(Held.peak, Held.now)

    def __del__(self) -> None:
        Held.owners[self.place] -= 1
        if Held.owners[self.place] == 0:
            Held.now -= self.tensor.untyped_storage().nbytes()


def peak_of_graphs(learner: ibaml.MetaLearner, batch: ibaml.TaskBatch) -> int:
    """The most bytes that graphs hold at one time in a meta-step, forward and backward."""
    learner(batch).backward()  # the first batch is examined, which is not counted
    gc.collect()
    Held.now, Held.peak, Held.owners = 0, 0, Counter()
    with torch.autograd.graph.saved_tensors_hooks(Held, lambda held: held.tensor):
        learner(batch).backward()
    return Held.peak


def memory(path: Path) -> None:
    """What the graphs of a meta-step hold against the number of steps, counted."""
    batch = ibaml.tasks.Sinusoids().batch(seed=0, keys=range(4), support=10, query=10)
    counts = (1, 2, 5, 10, 20, 40)
    figure = blank(6.2, 3.4)
    axis = figure.subplots()
    gaussian: dict[str, Any] = {"posterior": "diagonal", "samples": 1, "lr": 0.01}
    for name, method, options, color, line in (
        ("MAML, unrolled", ibaml.methods.maml, {}, ORANGE, "--"),
        ("iBaML, implicit", ibaml.methods.ibaml, gaussian, BLUE, "-"),
    ):
        kept = []
        for steps in counts:
            network = ibaml.nn.mlp(1, 1, hidden=(128, 128))
            learner = method(network, adapt="all", steps=steps, **options)
            kept.append(peak_of_graphs(learner, batch) / 1e6)
        axis.plot(counts, kept, line, color=color, marker="o", label=name)
    axis.set(xlabel="K, steps of adaptation", ylabel="held by graphs at most, MB", ylim=(0, None))
    axis.legend(frameon=False)
    hide_frame(axis)
    save(figure, path)


def stopping(path: Path) -> None:
    """What K steps leave of the start, along one direction of curvature h."""
    s = np.linspace(0, 6, 200)
    steps = 15
    figure = blank(6.2, 3.4)
    axis = figure.subplots()
    axis.plot(s, (1 - s / steps) ** steps, color="black", label=f"{steps} steps of descent")
    axis.plot(s, 1 / (1 + s), "--", color=BLUE, label="K-aware rule: 1/(1 + αKh)")
    axis.plot(s, np.ones_like(s), ":", color=ORANGE, label="first order")
    axis.plot(s, np.zeros_like(s), "-.", color=GRAY, label="implicit rule")
    axis.set(xlabel="αKh: how far descent has come", ylabel="share of the start that is left")
    axis.legend(frameon=False)
    hide_frame(axis)
    save(figure, path)


def calibration(path: Path) -> None:
    """Two sets of answers of the same accuracy, one of them too sure."""
    generator = torch.Generator().manual_seed(0)
    logits = 1.5 * torch.randn(6000, 5, generator=generator)
    labels = torch.multinomial(logits.softmax(-1), 1, generator=generator)[:, 0]
    keys = np.arange(60)
    curves = {}
    for name, sharper in (("calibrated", 1.0), ("too sure", 2.5)):
        p = (sharper * logits).softmax(-1).view(60, 100, 5).double().numpy()
        scores = ibaml.evaluation.ClassScores.of(keys, p, labels.view(60, 100).numpy())
        curves[name] = scores
    figure = reliability_figure(curves, "Same accuracy, different confidence")
    save(figure, path)


PICTURES: dict[str, Callable[[Path], None]] = {
    "bands": bands,
    "sure": sure,
    "memory": memory,
    "stopping": stopping,
    "calibration": calibration,
}

if __name__ == "__main__":
    draw_all(Path(sys.argv[1]))
