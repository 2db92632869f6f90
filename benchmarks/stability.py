"""Does a run that goes wrong report it? Many seeds of `ibaml train` on one dataset, a line each.

    ibaml embed caltech101-84.zip --backbone efficientnet_lite0 --out embeddings.npz
    python benchmarks/stability.py embeddings.npz --splits splits.json --seeds 20

Other settings of the run are given as NAME=VALUE. A run ends worse than its best if its last
validation nll is above the lowest by more than 0.02; a sentence in its log must report that.
"""

from __future__ import annotations

import argparse
import tempfile
import tomllib
from pathlib import Path
from typing import Any

from ibaml.training import Run, Step, TrainingError, Watcher, resolve, train

_WORSE = 0.02
_SAYS = ("continuing from the best weights", "the best weights are from", "stopped")


class Ear:
    """Keeps the sentences of a run."""

    def __init__(self) -> None:
        self.nll: dict[int, float] = {}
        self.sentences: list[str] = []
        self.unsolved: list[float] = []
        self.worst = 0.0

    def started(self, first: int, total: int) -> None: ...

    def stepped(self, step: Step) -> None:
        self.worst = max(self.worst, step.loss)
        if step.unsolved is not None:
            self.unsolved.append(step.unsolved)

    def validated(self, step: int, scores: dict[str, float], best: bool) -> None:
        self.nll[step] = scores["nll"]

    def message(self, text: str) -> None:
        self.sentences.append(text)

    def ended(self) -> None: ...


def one(settings: dict[str, Any], seed: int) -> tuple[Ear, str]:
    """Train in a temporary folder; returns its sentences and how it ended."""
    ear = Ear()

    def watchers(run: Run, learner: object) -> list[Watcher]:
        return [ear]

    with tempfile.TemporaryDirectory() as folder:
        try:
            train(resolve({**settings, "seed": seed}), Path(folder) / "run", watchers=watchers)
        except TrainingError as error:
            ear.sentences.append(str(error))
            return ear, "stopped"
    return ear, "done"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data")
    parser.add_argument("--splits")
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("settings", nargs="*", metavar="NAME=VALUE")
    given = parser.parse_intermixed_args()
    settings: dict[str, Any] = {
        "data": given.data, "splits": given.splits, "ways": 5, "shots": 5, "val_every": 50,
        "tensorboard": False, "threads": 1, **tomllib.loads("\n".join(given.settings)),
    }  # fmt: skip
    silent = 0
    print("seed  best nll (after)  last nll  largest loss  unsolved  returns  end")
    for seed in range(given.seeds):
        ear, end = one(settings, seed)
        best = min(ear.nll, key=ear.nll.__getitem__)
        last = ear.nll[max(ear.nll)]
        said = any(words in text for text in ear.sentences for words in _SAYS)
        worse = last > ear.nll[best] + _WORSE or end != "done"
        silent += worse and not said
        returns = sum("continuing from the best" in text for text in ear.sentences)
        unsolved = sum(ear.unsolved) / max(1, len(ear.unsolved))
        print(
            f"{seed:4}  {ear.nll[best]:8.3f} ({best:5})  {last:8.3f}  {ear.worst:12.3g}  "
            f"{100 * unsolved:6.0f} %  {returns:7}  {end}"
            f"{', worse than its best' if worse else ''}{'' if said or not worse else ', SILENT'}",
            flush=True,
        )
    print(f"{silent} of {given.seeds} runs ended worse than their best without saying so")


if __name__ == "__main__":
    main()
