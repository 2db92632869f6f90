"""Is a learned regression head as good as a pooled Gaussian process? Life expectancy by year.

    python benchmarks/gapminder.py gapminder.tsv        (three runs of `ibaml train`'s defaults)

A task is a country. Held-out countries are predicted from 3 random rows, from 6, and, as a
forecast, from their first 4 rows, by a learner trained with as many (random) rows. The Gaussian
process has the countries' mean of every year as its mean, and one kernel for all countries, fitted
by the marginal likelihood of all rows of the training countries; which kernel is chosen on the
validation countries. Both are judged on the same tasks; intervals are bootstraps over countries.
A finished run in --runs is not trained again.
"""

from __future__ import annotations

import argparse
import platform
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from scipy.optimize import minimize
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF, DotProduct, Kernel, Matern, WhiteKernel
from sklearn.gaussian_process.kernels import ConstantKernel as Constant

from ibaml.evaluation import Interval, RegressionScores, paired
from ibaml.evaluation.predict import score_posteriors
from ibaml.learner import MetaLearner
from ibaml.tasks import Table, TableTasks, TaskBatch
from ibaml.training import open_run, resolve, train
from ibaml.training.start import load_run

COLUMNS = {"task": "country", "features": "year", "target": "lifeExp"}
PROTOCOLS = {"3 rows": 3, "6 rows": 6, "first 4 rows": 4}
FORECAST = "first 4 rows"
DRAWS = 520  # 20 a country
QUANTILE = 1.959964


def kernels() -> dict[str, Kernel]:
    """Constant + linear + one or two smooth parts + white noise."""

    def line() -> Kernel:
        slope = Constant(0.1, (1e-6, 1e3)) * DotProduct(1e-5, "fixed")
        return Constant(1.0, (1e-6, 1e3)) + slope + WhiteKernel(1e-2, (1e-8, 10))

    def size() -> Kernel:
        return Constant(0.3, (1e-6, 1e3))

    return {
        "RBF": line() + size() * RBF(1.0, (0.05, 50)),
        "two RBF": line() + size() * RBF(2.0, (0.05, 50)) + size() * RBF(0.3, (0.05, 50)),
        "Matérn 3/2": line() + size() * Matern(1.0, (0.05, 50), nu=1.5),
        "Matérn 5/2": line() + size() * Matern(1.0, (0.05, 50), nu=2.5),
    }


def rows_of(table: Table, split: str) -> tuple[np.ndarray, np.ndarray]:
    """Years (12, 1) and the countries' values (countries, 12) in the order of years."""
    values = []
    for task in table.splits[split]:
        mine = table.labels == task
        order = np.argsort(table.x[mine, 0])
        years = table.x[mine][order]
        values.append(table.y[mine][order])
    return years, np.stack(values)


def pooled_fit(kernel: Kernel, years: np.ndarray, residuals: np.ndarray) -> Kernel:
    """The kernel that makes the residuals of all countries most probable."""
    tasks, rows = residuals.shape

    def loss(theta: np.ndarray) -> tuple[float, np.ndarray]:
        covariance, slopes = kernel.clone_with_theta(theta)(years, eval_gradient=True)
        inverse = np.linalg.inv(covariance + 1e-9 * np.eye(rows))
        dual = residuals @ inverse
        size = np.linalg.slogdet(covariance + 1e-9 * np.eye(rows))[1]
        value = 0.5 * (dual * residuals).sum() + 0.5 * tasks * size
        inner = tasks * inverse - dual.T @ dual
        return value, 0.5 * np.einsum("ij,ijk->k", inner, slopes)

    rng, best = np.random.default_rng(0), None
    for start in range(4):
        theta = kernel.theta + (rng.normal(size=len(kernel.theta)) if start else 0)
        found = minimize(loss, theta, jac=True, method="L-BFGS-B", bounds=kernel.bounds)
        best = found if best is None or found.fun < best.fun else best
    assert best is not None
    return kernel.clone_with_theta(best.x)


@dataclass(frozen=True)
class Process:
    """A pooled Gaussian process: one kernel and one mean for all countries."""

    kernel: Kernel
    years: np.ndarray
    mean: np.ndarray

    def center(self, x: np.ndarray) -> np.ndarray:
        return np.interp(x[:, 0], self.years[:, 0], self.mean)

    def scores(self, batch: TaskBatch) -> RegressionScores:
        """Of every task, as `score_posteriors` has them."""
        found = []
        for t in range(len(batch)):
            x, y, query, target = (
                part[t].numpy()
                for part in (batch.support_x, batch.support_y, batch.query_x, batch.query_y)
            )
            process = GaussianProcessRegressor(self.kernel, alpha=1e-9, optimizer=None)
            mean, deviation = process.fit(x, y - self.center(x)).predict(query, return_std=True)
            error = (target - self.center(query) - mean) / deviation
            nll = 0.5 * error**2 + np.log(deviation) + 0.5 * np.log(2 * np.pi)
            inside = np.abs(error) <= QUANTILE
            found.append([nll.mean(), ((error * deviation) ** 2).mean(), inside.mean()])
        count = np.full(len(batch), batch.query_y.shape[1])
        return RegressionScores(batch.task_keys, count, *np.array(found).T)


def tasks_of(
    table: Table, protocol: str, split: str
) -> Iterator[tuple[TaskBatch, tuple[str, ...]]]:
    """Batches of tasks, and the country of every task."""
    shots = PROTOCOLS[protocol]
    if protocol == FORECAST:
        years, values = rows_of(table, split)
        y = torch.from_numpy(values)
        x = torch.from_numpy(years).expand(len(y), -1, -1)
        keys = range(len(y))
        batch = TaskBatch(x[:, :shots], y[:, :shots], x[:, shots:], y[:, shots:], keys)
        yield batch, tuple(table.tasks[t] for t in table.splits[split])
    else:
        source = TableTasks(table, shots, dtype=torch.float64)
        for batch in source.batches(split, range(DRAWS)):
            yield batch, source.groups(split, batch.task_keys)


def judge(
    table: Table, protocol: str, split: str, score: Callable[[TaskBatch], RegressionScores]
) -> RegressionScores:
    parts = []
    for batch, countries in tasks_of(table, protocol, split):
        scored = score(batch)
        parts.append(RegressionScores(**{**vars(scored), "groups": countries}))
    return RegressionScores.join(parts)


def best_process(table: Table) -> tuple[str, Process]:
    """The kernel with the lowest nll on the validation countries, and the process with it."""
    years, values = rows_of(table, "train")
    mean = values.mean(0)
    found = {}
    for name, kernel in kernels().items():
        process = Process(pooled_fit(kernel, years, values - mean), years, mean)
        nlls = [judge(table, p, "val", process.scores).nll.mean() for p in PROTOCOLS]
        print(f"Gaussian process, {name}: validation nll", *(f"{n:.3f}" for n in nlls), flush=True)
        found[name] = (float(np.mean(nlls)), process)
    name = min(found, key=lambda n: found[n][0])
    return name, found[name][1]


def learned(path: Path, data: Path, shots: int, seed: int) -> MetaLearner:
    """The learner of `ibaml train` with so many rows, with its best weights."""
    given = {"data": str(data), **COLUMNS, "shots": shots, "seed": seed}
    settings = resolve({**given, "tensorboard": False, "threads": 1})
    if (path / "checkpoints" / f"step-{settings.iterations:08d}.safetensors").exists():
        run = open_run(path)
    else:
        shutil.rmtree(path, ignore_errors=True)
        run, _ = train(settings, path)
    learner, _ = load_run(run, "best", torch.device("cpu"))
    return learner.double()


def scored_by(learner: MetaLearner, batch: TaskBatch) -> RegressionScores:
    scores = score_posteriors(learner.adapt_all(batch), batch)
    assert isinstance(scores, RegressionScores)
    return scores


def written(interval: Interval, scale: float = 1.0, digits: int = 3, sign: str = "") -> str:
    ends = (scale * end for end in (interval.value, interval.low, interval.high))
    value, low, high = (f"{end:{sign}.{digits}f}" for end in ends)
    return f"{value} [{low}, {high}]"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path, help="gapminder.tsv")
    parser.add_argument("--split", choices=("val", "test"), default="test")
    parser.add_argument("--seeds", type=int, default=1, help="runs of every protocol")
    parser.add_argument("--rows", type=int, help="train with so many, once, for all protocols")
    parser.add_argument("--runs", type=Path, default=Path("runs/gapminder"))
    parser.add_argument("--out", type=Path, default=None, help="also write the table here")
    given = parser.parse_args()
    torch.set_num_threads(1)
    table = Table.read(given.data, task="country", features=["year"], target="lifeExp")
    name, process = best_process(table)
    countries = len(table.splits[given.split])
    rows = "" if given.rows is None else f" --rows {given.rows}"
    lines = [
        f"$ python benchmarks/gapminder.py gapminder.tsv{rows}"
        f"   # torch {torch.__version__}, Python {platform.python_version()}",
        f"{countries} {given.split} countries; nll of standardized life expectancy; [95 % "
        "interval, a bootstrap over countries].",
        f"Gaussian process: {name}, the best on validation countries. difference: iBaML − process.",
        "",
        f"{'rows':<13}{'seed':<5}{'iBaML nll':<25}{'process nll':<25}{'difference':<27}"
        f"{'inside 95 %: iBaML':<23}{'process':<23}{'RMSE, years':<12}",
    ]
    print("\n".join(lines), flush=True)
    unit = float(table.spread[-1])
    for protocol, shots in PROTOCOLS.items():
        theirs = judge(table, protocol, given.split, process.scores)
        other = theirs.summary()
        for seed in range(given.seeds):
            rows_seen = given.rows or shots
            path = given.runs / f"{rows_seen}-rows-seed-{seed}"
            learner = learned(path, given.data, rows_seen, seed)
            ours = judge(table, protocol, given.split, partial(scored_by, learner))
            own, difference = ours.summary(), paired(theirs, ours)
            lines.append(
                f"{protocol:<13}{seed:<5}{written(own['nll']):<25}{written(other['nll']):<25}"
                f"{written(difference['nll'], sign='+'):<27}"
                f"{written(own['coverage'], 100, 1):<23}{written(other['coverage'], 100, 1):<23}"
                f"{unit * own['rmse'].value:.2f}, {unit * other['rmse'].value:.2f}"
            )
            print(lines[-1], flush=True)
    if given.out is not None:
        given.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
