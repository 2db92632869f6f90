"""Does the README's loop learn what `ibaml train` learns, with as many tasks?

    python benchmarks/readme.py --steps 300

The snippet is executed as it is printed but for the number of steps; both are tested on the same
tasks of glyphs, 5-way 1-shot, running statistics.
"""

from __future__ import annotations

import argparse
import re
import tempfile
from pathlib import Path
from typing import Any

import torch

import ibaml
from ibaml.evaluation import mean_interval, paired
from ibaml.evaluation.predict import score_tasks
from ibaml.training import resolve, train


def snippet(steps: int) -> str:
    text = (Path(__file__).parent.parent / "README.md").read_text()
    match = re.search(r"## In Python\n\n```python\n(.*?)```", text, re.DOTALL)
    assert match is not None
    loop = match[1].split("\nnew = ")[0]  # the training of it
    return re.sub(r"steps = \d+", f"steps = {steps}", loop)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--test-tasks", type=int, default=200)
    given = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    names: dict[str, Any] = {}
    exec(snippet(given.steps), names)  # our own README
    settings = resolve(
        {"data": "glyphs", "channels": 16, "iterations": given.steps, "val_every": given.steps,
         "val_tasks": 10, "tensorboard": False, "threads": 1}
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        run, _ = train(settings, Path(folder) / "run")
        trained = ibaml.load(run.path, which="last")
    tasks = ibaml.tasks.EpisodeTasks(names["data"])
    keys = range(given.test_tasks)
    scores = {
        "README": score_tasks(names["learner"].eval(), tasks, "test", keys),
        "ibaml train": score_tasks(trained, tasks, "test", keys),
    }
    for name, one in scores.items():
        figures = {metric: mean_interval(values) for metric, values in one.means().items()}
        ece = one.summary()["ece"].value
        accuracy, nll = figures["accuracy"], figures["nll"]
        print(f"{name:12} {100 * accuracy.value:.1f} % nll {nll.value:.3f} ECE {100 * ece:.1f} %")
    lead = paired(scores["ibaml train"], scores["README"])["accuracy"]
    half = (lead.high - lead.low) / 2
    print(f"README minus ibaml train: {100 * lead.value:+.1f} ± {100 * half:.1f} points")


if __name__ == "__main__":
    main()
