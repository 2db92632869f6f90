"""How good is `ibaml train --data embeddings.npz` with its defaults, against simple baselines?

    python benchmarks/embeddings.py caltech101-84.zip embeddings.npz --side 84
    python benchmarks/embeddings_heads.py embeddings.npz --splits splits.json

One run, untouched, answers tasks of 1, 2, 5 and 10 shots from new classes. The baselines choose
what they choose (strength, shrinkage, whether features are standardized as the run standardizes
them, and one temperature) for every number of shots, on tasks of the validation classes; the run
has none of that. Differences are paired over tasks.
"""

from __future__ import annotations

import argparse
import math
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

import ibaml
from ibaml.evaluation import ClassScores, paired
from ibaml.evaluation.temperature import fit_log_temperature
from ibaml.heads.baselines import logistic_regression, nearest_centroid
from ibaml.heads.from_data import ClassStatistics, class_statistics, lda
from ibaml.tasks import EpisodeTasks, Inputs, TaskBatch
from ibaml.tasks.catalog import open_data
from ibaml.training import resolve, train

SHOTS = (1, 2, 5, 10)
AT_ONCE = 10
Baseline = Callable[[Tensor, Tensor, Tensor], Tensor]  # support, labels and query to logits


class Base:
    """The training classes, raw or standardized, and the baselines made from them."""

    def __init__(self, data: ibaml.tasks.Dataset, standardized: bool, ways: int) -> None:
        prepare = Inputs.of(data)
        assert prepare is not None
        self.ways = ways
        self.mean, self.deviation = torch.tensor(prepare.mean), torch.tensor(prepare.deviation)
        self.standardized = standardized
        rows = torch.isin(torch.as_tensor(data.labels), torch.tensor(data.members("train")))
        x = self.read(prepare(data.examples[rows.numpy()]))
        self.center = x.mean(0)
        labels = torch.as_tensor(data.labels)[rows].long()
        self.statistics: ClassStatistics = class_statistics(x.double(), labels)

    def read(self, x: Tensor) -> Tensor:
        return x if self.standardized else x * self.deviation.float() + self.mean.float()

    def arms(self) -> Iterator[tuple[str, str, Baseline]]:
        """Name, choice and answer of every baseline."""
        yield (
            "nearest centroid",
            "",
            lambda s, y, q: nearest_centroid(self.read(s), y, self.read(q), self.ways, self.center),
        )
        for shrinkage in (0.3, 0.6, 0.9, 0.99):
            yield "LDA + centroid", f"shrinkage {shrinkage}", self._lda(shrinkage)
        unit = torch.nn.functional.normalize
        for strength in (10.0, 100.0, 1000.0, 10000.0):
            yield "logistic regression", f"C {strength:g}", lambda s, y, q, c=strength: (
                logistic_regression(
                    unit(self.read(s) - self.center, dim=-1), y,
                    unit(self.read(q) - self.center, dim=-1), self.ways, c,
                )
            )  # fmt: skip

    def _lda(self, shrinkage: float) -> Baseline:
        model = lda(self.statistics, shrinkage, width=len(self.statistics.counts) - 1)
        center, map = model.center.float(), model.map.float()
        return lambda s, y, q: nearest_centroid(
            (self.read(s) - center) @ map, y, (self.read(q) - center) @ map, self.ways
        )


def batches(tasks: EpisodeTasks, split: str, count: int) -> Iterator[tuple[range, TaskBatch]]:
    for begin in range(0, count, AT_ONCE):
        keys = range(begin, min(begin + AT_ONCE, count))
        yield keys, tasks.batches(split, keys)[0]


def logits(tasks: EpisodeTasks, split: str, count: int, answer: Baseline) -> tuple[Tensor, Tensor]:
    parts = [
        (answer(b.support_x, b.support_y, b.query_x), b.query_y)
        for _, b in batches(tasks, split, count)
    ]
    return torch.cat([z for z, _ in parts]), torch.cat([y for _, y in parts])


def scored(z: Tensor, y: Tensor, log_t: float = 0.0) -> ClassScores:
    return ClassScores.of(list(range(len(z))), (math.exp(log_t) * z.double()).softmax(-1), y)


def line(name: str, scores: ClassScores) -> str:
    s = scores.summary()
    return (
        f"{name:44s} {100 * s['accuracy'].value:6.2f} {s['nll'].value:8.4f} "
        f"{100 * s['ece'].value:6.2f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("features", type=Path, help=".npz of x and y")
    parser.add_argument("--splits", type=Path)
    parser.add_argument("--ways", type=int, default=10)
    parser.add_argument("--tasks", type=int, default=500)
    parser.add_argument("--val-tasks", type=int, default=40)
    parser.add_argument("--split", default="test")
    parser.add_argument("--seeds", type=int, default=0, help="also train so many runs")
    given = parser.parse_args()
    torch.set_num_threads(1)
    options = {"data": str(given.features), "ways": given.ways, "tensorboard": False, "threads": 1}
    if given.splits:
        options["splits"] = str(given.splits)
    data = open_data(str(given.features), splits=given.splits and str(given.splits))
    with tempfile.TemporaryDirectory() as folder:
        begin, processor = time.perf_counter(), time.process_time()
        run, _ = train(resolve({**options, "val_every": 0}), Path(folder) / "run")
        learner = ibaml.load(run.path)
        print(
            f"trained in {time.process_time() - processor:.1f} s of one core "
            f"({time.perf_counter() - begin:.0f} s on this machine)"
        )
        of_run = run.settings
        print(f"t {of_run.temperature}, beta {of_run.beta:.3g}, {learner.belief}", flush=True)
        bases = [Base(data, standardized, given.ways) for standardized in (False, True)]
        for shots in SHOTS:
            tasks = EpisodeTasks(data, given.ways, shots)
            begin = time.process_time()
            ours = ClassScores.join(
                [
                    ClassScores.of(keys, learner.adapt_all(b).predict_proba(b.query_x), b.query_y)
                    for keys, b in batches(tasks, given.split, given.tasks)
                ]
            )
            seconds = time.process_time() - begin
            print(f"\n{shots} shots: accuracy %, nll, ECE %; then nll of the default less this one")
            print(f"{line('ibaml, defaults', ours)}  {1000 * seconds / given.tasks:.0f} ms a task")
            compare(tasks, bases, ours, given)
        for seed in range(given.seeds):
            run, _ = train(resolve({**options, "seed": seed}), Path(folder) / str(seed))
            tasks = EpisodeTasks(data, given.ways, 1)
            s = run.settings
            _, b = next(batches(tasks, given.split, AT_ONCE))
            nll = -ibaml.load(run.path).adapt_all(b).predict_proba(b.query_x).log()
            nll = nll.gather(-1, b.query_y[..., None]).mean()
            print(f"seed {seed}: t {s.temperature}, beta {s.beta:.3g}, nll {nll:.4f}", flush=True)


def compare(
    tasks: EpisodeTasks, bases: list[Base], ours: ClassScores, given: argparse.Namespace
) -> None:
    """Print every baseline at its best choices for validation tasks, plain and with t."""
    plain: dict[str, tuple[float, str, Baseline]] = {}
    warm: dict[str, tuple[float, str, Baseline, float]] = {}
    for base in bases:
        for name, choice, answer in base.arms():
            z, y = logits(tasks, "val", given.val_tasks, answer)
            log_t = fit_log_temperature([z[:, None]], [y])
            what = ", ".join(part for part in (choice, base.standardized * "standardized") if part)
            for best, score, extra in (
                (plain, scored(z, y), ()),
                (warm, scored(z, y, log_t), (log_t,)),
            ):
                nll = score.summary()["nll"].value
                if name not in best or nll < best[name][0]:
                    best[name] = (nll, what, answer, *extra)  # type: ignore[assignment,index]
    for name in plain:
        _, what, answer, log_t = warm[name]
        _, plain_what, plain_answer = plain[name]
        for title, which, t in (
            (f"{name} ({plain_what})" if plain_what else name, plain_answer, 0.0),
            (f"{name}, t {math.exp(log_t):.1f} ({what})", answer, log_t),
        ):
            other = scored(*logits(tasks, given.split, given.tasks, which), t)
            gap = paired(other, ours)["nll"]
            print(
                f"{line(title, other)}  {gap.value:+.4f} ({gap.low:+.4f} to {gap.high:+.4f})",
                flush=True,
            )


if __name__ == "__main__":
    main()
