"""Everything adapted by K steps of descent: which change pays? docs/studies/paper-setting.md.

    python benchmarks/paper_setting.py glyphs OUT
    python benchmarks/paper_setting.py pictures OUT --file pictures.zip --splits splits.json

Every arm is one meta-training with a plain loop and differs from its neighbor in one thing. It is
scored on validation tasks with batch norm's statistics of the batch, as in the paper, with t = 1
and with a temperature fitted on other validation tasks. Scores and learners are kept in OUT, so
that a second call goes on where the first stopped.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import ibaml
from ibaml import Curvature, FirstOrder, Implicit, MetaLearner, Unrolled
from ibaml.energy import Categorical
from ibaml.evaluation import ClassScores
from ibaml.tasks import EpisodeTasks

FITTED_ON = range(10_000, 10_100)  # validation tasks


@dataclass(frozen=True)
class Arm:
    """One meta-training. λ = β/(N·exp ρ) is the strength of the prior, N the number of examples."""

    rule: str = "K-aware"  # unrolled, first order, implicit, K-aware
    curvature: str = "exact"  # on the means; or ggn
    damping: float = 0.0
    steps: int = 15
    lr: float = 0.1
    body_lr: float | None = None  # of all but the head, if other than lr
    lam: float = 0.11
    log_var: float = -7.0
    point: bool = False
    objective: str = "query"
    times_delta: float = 1.0  # of K-aware's δ = 1/(αK)
    temperature: str = "auto"  # learned, or 1 and fitted after training
    adapt: tuple[str, ...] = ("*",)
    execution: str = "auto"
    meta_lr: float = 0.003
    samples: int = 2
    iterations: int = 150
    tasks: int = 8
    shots: int = 1
    seed: int = 0


A = Arm()
MAML = Arm(rule="maml", steps=5)
ABML = Arm(rule="unrolled", steps=5, objective="abml")
LAST = replace(A, adapt=("blocks.3", "head"), execution="fold")

# arm, the neighbor it is compared with
ARMS: dict[str, tuple[Arm, str | None]] = {
    "MAML, K 5": (MAML, None),
    "MAML, K 15": (replace(MAML, steps=15), "MAML, K 5"),
    "MAML, alpha 0.03": (replace(MAML, lr=0.03), "MAML, K 5"),
    "MAML, alpha 0.3": (replace(MAML, lr=0.3), "MAML, K 5"),
    "K-aware": (A, "MAML, K 5"),
    "ABML, K 5": (ABML, "MAML, K 5"),
    "first order": (replace(A, rule="first order"), "K-aware"),
    "unrolled": (replace(A, rule="unrolled"), "K-aware"),
    "unrolled, K 5": (replace(A, rule="unrolled", steps=5), "ABML, K 5"),
    "K-aware, K 5": (replace(A, steps=5), "K-aware"),
    "K-aware, K 50": (replace(A, steps=50), "K-aware"),
    "point": (replace(A, point=True), "K-aware"),
    "lambda 1.1": (replace(A, lam=1.1), "K-aware"),
    "lambda 0.011": (replace(A, lam=0.011), "K-aware"),
    "rho -9": (replace(A, log_var=-9.0), "K-aware"),
    "rho -9, lambda 1.6": (replace(A, log_var=-9.0, lam=1.6), "rho -9"),
    "4 samples": (replace(A, samples=4), "K-aware"),
    "implicit, exact": (replace(A, rule="implicit"), "K-aware"),
    "implicit, Gauss-Newton": (replace(A, rule="implicit", curvature="ggn"), "K-aware"),
    "K-aware, Gauss-Newton": (replace(A, curvature="ggn"), "K-aware"),
    "implicit, exact, mu 1": (replace(A, rule="implicit", damping=1.0), "K-aware"),
    "body alpha 0.01": (replace(A, body_lr=0.01), "K-aware"),
    "body alpha 0.01, point": (replace(A, body_lr=0.01, point=True), "point"),
    "body alpha 0.03, point": (replace(A, body_lr=0.03, point=True), "point"),
    "point, K 50": (replace(A, point=True, steps=50), "point"),
    "point, first order": (replace(A, point=True, rule="first order"), "point"),
    "point, unrolled": (replace(A, point=True, rule="unrolled"), "point"),
    "point, alpha 0.03": (replace(A, point=True, lr=0.03), "point"),
    "last block": (LAST, "K-aware"),
    "last block, first order": (replace(LAST, rule="first order"), "last block"),
    "last block, unrolled": (replace(LAST, rule="unrolled"), "last block"),
    "last block, K 50": (replace(LAST, steps=50), "last block"),
    "last two blocks": (replace(LAST, adapt=("blocks.2", *LAST.adapt)), "last block"),
    "head": (replace(LAST, adapt=("head",), execution="auto"), "last block"),
    "last block, plain implicit": (replace(LAST, rule="implicit"), "last block"),
    "last block, Gauss-Newton": (replace(LAST, curvature="ggn"), "last block"),
    "last block, alpha 0.3": (replace(LAST, lr=0.3), "last block"),
    "last block, alpha 0.03": (replace(LAST, lr=0.03), "last block"),
    "last block, lambda 1.1": (replace(LAST, lam=1.1), "last block"),
    "last block, lambda 0.011": (replace(LAST, lam=0.011), "last block"),
    "last block, rho -9": (replace(LAST, log_var=-9.0), "last block"),
    "last block, rho -5": (replace(LAST, log_var=-5.0), "last block"),
    "last block, point": (replace(LAST, point=True), "last block"),
    "last block, predictive": (replace(LAST, objective="predictive"), "last block"),
    "last block, meta-lr 0.01": (replace(LAST, meta_lr=0.01), "last block"),
    "last block, 10 delta": (replace(LAST, times_delta=10.0), "last block"),
    "last block, 0.1 delta": (replace(LAST, times_delta=0.1), "last block"),
    "last block, K 5": (replace(LAST, steps=5), "last block"),
    "last block, K 5, unrolled": (replace(LAST, steps=5, rule="unrolled"), "last block, K 5"),
    "alpha 0.03": (replace(A, lr=0.03), "K-aware"),
    "alpha 0.3": (replace(A, lr=0.3), "K-aware"),
    "predictive": (replace(A, objective="predictive"), "K-aware"),
    "10 delta": (replace(A, times_delta=10.0), "K-aware"),
    "0.1 delta": (replace(A, times_delta=0.1), "K-aware"),
    "meta-lr 0.001": (replace(A, meta_lr=0.001), "K-aware"),
    "meta-lr 0.01": (replace(A, meta_lr=0.01), "K-aware"),
}


def learner_of(arm: Arm, tasks: EpisodeTasks, temperature: str) -> MetaLearner:
    torch.manual_seed(arm.seed)
    shape = tasks.example_shape
    net = ibaml.nn.conv4(5, 16, shape[0], shape[-1])
    likelihood = Categorical("learned" if temperature == "learned" else 1.0)
    shared: dict[str, Any] = {"steps": arm.steps, "lr": arm.lr, "likelihood": likelihood}
    if arm.rule == "maml":
        return ibaml.methods.maml(net, objective=arm.objective, **shared)
    if arm.point:
        belief: ibaml.Belief = ibaml.Point(lam=arm.lam)
    else:
        belief = ibaml.DiagonalGaussian(kappa=arm.lam * math.exp(arm.log_var))
    del shared["steps"], shared["lr"]
    return MetaLearner(
        net,
        belief,
        ibaml.GradientDescent(arm.steps, rate_of(arm)),
        rule_of(arm),
        arm.objective,  # type: ignore[arg-type]
        likelihood,
        adapt=arm.adapt,
        execution=arm.execution,  # type: ignore[arg-type]
        samples=arm.samples,
        noise="antithetic",
        init_log_var=arm.log_var,
    )


def rate_of(arm: Arm) -> float | dict[str, float]:
    if arm.body_lr is None:
        return arm.lr
    return {"*head.*": arm.lr, "*": arm.body_lr}


def rule_of(arm: Arm) -> ibaml.GradientRule:
    if arm.rule == "unrolled":
        return Unrolled()
    if arm.rule == "first order":
        return FirstOrder()
    exact = Curvature("energy", arm.damping, "all" if arm.point else "mean")
    curvature = exact if arm.curvature == "exact" else Curvature("ggn", arm.damping)
    if arm.rule == "implicit":
        return Implicit(curvature, ibaml.ConjugateGradient(50, tol=1e-2))
    stopping: Any = "auto"
    if arm.times_delta != 1:
        stopping = arm.times_delta / (arm.lr * arm.steps)
    return Implicit(curvature, ibaml.ConjugateGradient(10, tol=1e-2), stopping=stopping)


def meta_train(arm: Arm, learner: MetaLearner, tasks: EpisodeTasks) -> float:
    """The mean residual of the linear systems in the last tenth of training (nan: none)."""
    optimizer = torch.optim.Adam(learner.parameters())
    generator = torch.Generator().manual_seed(arm.seed)
    residuals = [math.nan]
    for step in range(arm.iterations):
        share = 0.5 * (1 + math.cos(math.pi * step / arm.iterations))
        optimizer.param_groups[0]["lr"] = arm.meta_lr * share
        optimizer.zero_grad()
        for batch in tasks.batches("train", range(step * arm.tasks, (step + 1) * arm.tasks)):
            learner(batch, generator).backward()
        linear = learner.diagnostics.record.linear
        if linear is not None and step > 0.9 * arm.iterations:
            residuals.append(float(linear.residual.median()))
        nn.utils.clip_grad_norm_(learner.parameters(), 10.0)
        optimizer.step()
    return float(np.nanmean(residuals)) if len(residuals) > 1 else math.nan


@torch.no_grad()
def logits_of(
    learner: MetaLearner, tasks: EpisodeTasks, split: str, keys: Sequence[int]
) -> Iterator[tuple[Sequence[int], Tensor, Tensor]]:
    """Keys, outputs (tasks, samples, queries, classes) with the learner's temperature, labels."""
    for begin in range(0, len(keys), 10):
        for batch in tasks.batches(split, keys[begin : begin + 10]):
            posteriors = learner.adapt_all(batch, norm_stats="batch")
            outputs = posteriors.outputs(batch.query_x, 10)
            assert isinstance(learner.likelihood, Categorical)
            yield batch.task_keys, outputs * learner.likelihood.log_temperature.exp(), batch.query_y


def nll(outputs: Tensor, labels: Tensor, t: float) -> float:
    probabilities = (t * outputs).softmax(-1).mean(1)
    return float(-probabilities.gather(-1, labels[..., None]).clamp(min=1e-30).log().mean())


def fitted(pairs: list[tuple[Sequence[int], Tensor, Tensor]]) -> float:
    """The temperature of the smallest nll, by golden section in its logarithm."""
    low, high, ratio = -3.0, 3.0, (math.sqrt(5) - 1) / 2
    outputs, labels = torch.cat([o for _, o, _ in pairs]), torch.cat([y for *_, y in pairs])
    for _ in range(25):
        a, b = high - ratio * (high - low), low + ratio * (high - low)
        smaller = nll(outputs, labels, math.exp(a)) < nll(outputs, labels, math.exp(b))
        low, high = (low, b) if smaller else (a, high)
    return math.exp((low + high) / 2)


def figures(pairs: list[tuple[Sequence[int], Tensor, Tensor]], t: float) -> dict[str, Any]:
    parts = [ClassScores.of(k, (t * o).softmax(-1).mean(1), y) for k, o, y in pairs]
    scores = ClassScores.join(parts)
    values = {name: i.value for name, i in scores.summary().items()}
    row: dict[str, Any] = {name: values[name] for name in ("accuracy", "nll", "ece")}
    return row | {"nlls": scores.means()["nll"].tolist()}


def judge(learner: MetaLearner, tasks: EpisodeTasks, split: str, count: int) -> dict[str, Any]:
    learner.eval()
    t = fitted(list(logits_of(learner, tasks, "val", FITTED_ON)))
    scored = list(logits_of(learner, tasks, split, range(count)))
    return {"as trained": figures(scored, 1.0), "fitted": figures(scored, t), "t": t}


def interval(gap: np.ndarray) -> str:
    error = 1.96 * gap.std(ddof=1) / math.sqrt(len(gap))
    return f"{gap.mean():+.3f} ± {error:.3f}"


def table(out: Path, temperature: str) -> str:
    """A row per arm, at the better of the ways to a temperature for this data."""
    kept = {name: json.loads(path.read_text()) for name, path in files(out).items()}
    way = "as trained" if temperature == "learned" else "fitted"
    lines = [
        f"{'arm':24} {'acc %':>6} {'nll':>6} {'ECE %':>6} {'other t':>8} {'t':>5} {'resid.':>7} "
        f"{'ms/task':>7}   nll against its neighbor"
    ]
    for name, row in kept.items():
        neighbor, mine = ARMS[name][1], row[way]
        other = row["fitted" if way == "as trained" else "as trained"]["nll"]
        against = ""
        if neighbor in kept:
            gap = np.array(mine["nlls"]) - np.array(kept[neighbor][way]["nlls"])
            against = f"{interval(gap)}  ({neighbor})"
        lines.append(
            f"{name:24} {100 * mine['accuracy']:6.1f} {mine['nll']:6.3f} {100 * mine['ece']:6.1f} "
            f"{other:8.3f} {row['t']:5.2f} {row['residual']:7.0e} {row['ms a task']:7.0f}   "
            f"{against}"
        )
    return "\n".join(lines)


def files(out: Path) -> dict[str, Path]:
    paths = {name: path_of(out, name) for name in ARMS}
    return {name: path for name, path in paths.items() if path.exists()}


def path_of(out: Path, name: str) -> Path:
    return out / f"{name.replace(' ', '_')}.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", choices=("glyphs", "pictures"))
    parser.add_argument("out", type=Path)
    parser.add_argument("--file", type=Path)
    parser.add_argument("--splits", type=Path)
    parser.add_argument("--shots", type=int, default=1)
    parser.add_argument("--scored", type=int, default=200, help="tasks")
    parser.add_argument("--split", choices=("val", "test"), default="val")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--iterations", type=int, default=150)
    parser.add_argument("--arms", nargs="+", choices=tuple(ARMS), default=tuple(ARMS))
    given = parser.parse_args()
    torch.set_num_threads(1)
    given.out.mkdir(parents=True, exist_ok=True)
    if given.data == "glyphs":
        data, temperature = ibaml.tasks.glyphs(), "learned"
    else:
        data = ibaml.tasks.open_data(str(given.file), splits=given.splits, image_size=42)
        temperature = "fitted"
    tasks = EpisodeTasks(data, 5, shots=given.shots)
    for name in given.arms:
        path = path_of(given.out, name)
        if path.exists():
            continue
        arm = replace(
            ARMS[name][0], iterations=given.iterations, shots=given.shots, seed=given.seed
        )
        learner = learner_of(arm, tasks, temperature)
        start = time.perf_counter()
        learner.train()
        residual = meta_train(arm, learner, tasks)
        seconds = time.perf_counter() - start
        row = judge(learner, tasks, given.split, given.scored)
        learner.save(path.with_suffix(".ibaml"))
        facts = {
            "arm": asdict(arm),
            "residual": residual,
            "ms a task": 1000 * seconds / (arm.iterations * arm.tasks),
            "likelihood": repr(learner.likelihood),
        }
        path.write_text(json.dumps(row | facts))
        print(table(given.out, temperature), flush=True)


if __name__ == "__main__":
    main()
