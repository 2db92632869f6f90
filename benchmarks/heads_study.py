"""Which change to a head pays? One at a time, judged on validation classes; docs/studies/heads.md.

    python benchmarks/heads_study.py glyphs OUT
    python benchmarks/heads_study.py pictures OUT --file pictures.zip --splits splits.json

Every arm is one meta-training with a plain loop and differs from its neighbor in one thing. Scores
are kept per task in OUT, so that a second call goes on where the first stopped.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

import ibaml
from ibaml.energy import Categorical
from ibaml.evaluation import ClassScores, score_tasks
from ibaml.evaluation.predict import fit_temperature
from ibaml.recommended import make_solver
from ibaml.solve import DualNewton
from ibaml.tasks import EpisodeTasks


@dataclass(frozen=True)
class Arm:
    """One meta-training. λ = β/(N·d) is the strength of the prior, d = exp ρ."""

    belief: str = "diagonal"  # diagonal, point, laplace, variational
    noise: str = "antithetic"  # or outputs: points on the outputs
    samples: int = 4
    lam: float = 0.06
    log_var: float = -5.0
    objective: str = "query"
    temperature: str | float = 1.0
    log_var_rate: float = 1.0  # times the learning rate, for the prior's log-variances
    steps: int = 8
    scaled: bool = False  # features of a fixed length
    meta_lr: float = 0.01
    iterations: int = 300
    tasks: int = 8
    shots: int = 1
    ways: int = 5  # of training tasks, with as many queries in all
    tied: bool = False  # the prior, over classes; a full posterior's always is
    same_lambda: bool = False  # in tasks of any size; else β is the same
    seed: int = 0


T = Arm(temperature="learned")
P = replace(T, objective="predictive")


def full(lam: float, beta: float, **changes: object) -> Arm:
    """Full covariance, solved in the dual, at this strength of the prior and this temperature of
    the posterior: d = β/(λ·N)."""
    arm = replace(P, belief="laplace", lam=lam, log_var=math.log(beta / (lam * 5)))
    return replace(arm, **changes)  # type: ignore[arg-type]


# arm, the neighbor it is compared with
ARMS: dict[str, tuple[Arm, str | None]] = {
    "shipped": (Arm(), None),
    "temperature learned": (T, "shipped"),
    "temperature fitted": (Arm(temperature="fitted"), "shipped"),
    "temperature both": (Arm(temperature="both"), "temperature learned"),
    "predictive alone": (Arm(objective="predictive"), "shipped"),
    "predictive": (P, "temperature learned"),
    **{
        f"lambda {lam:g}": (replace(P, lam=lam), "predictive")
        for lam in (0.001, 0.003, 0.01, 0.03, 0.1)
    },
    **{
        f"rho {rho:g}": (replace(P, lam=0.01, log_var=rho), "lambda 0.01")
        for rho in (-7.0, -3.0, -1.0, 1.0)
    },
    "rho at 5 times the rate": (replace(P, lam=0.01, log_var_rate=5.0), "lambda 0.01"),
    "solved to convergence": (replace(P, lam=0.01, steps=40), "lambda 0.01"),
    "scaled features": (replace(P, lam=0.01, scaled=True), "lambda 0.01"),
    "noise on outputs": (replace(P, lam=0.01, noise="outputs", samples=64), "lambda 0.01"),
    "noise on outputs, rho -1": (
        replace(P, lam=0.01, noise="outputs", samples=64, log_var=-1.0),
        "rho -1",
    ),
    "point": (replace(P, belief="point", lam=0.01), "lambda 0.01"),
    "point, lambda 0.1": (replace(P, belief="point", lam=0.1), "lambda 0.1"),
    "full, beta 0.01": (full(0.1, 0.01), "lambda 0.1"),
    "full, beta 0.1": (full(0.1, 0.1), "full, beta 0.01"),
    "full, beta 1": (full(0.1, 1.0), "full, beta 0.01"),
    "full, beta 0.001": (full(0.1, 0.001), "full, beta 0.01"),
    "lambda 0.3": (replace(P, lam=0.3), "lambda 0.1"),
    "full, lambda 0.03": (full(0.03, 0.01), "full, beta 0.01"),
    "full, lambda 0.3": (full(0.3, 0.01), "full, beta 0.01"),
    "full, lambda 1": (full(1.0, 0.01), "full, beta 0.01"),
    "lambda 1": (replace(P, lam=1.0), "lambda 0.1"),
    "outputs, lambda 1": (
        replace(P, noise="outputs", samples=64, lam=1.0, log_var=full(1.0, 0.01).log_var),
        "full, lambda 1",
    ),
    "point, lambda 1": (replace(P, belief="point", lam=1.0), "lambda 1"),
    "full, lambda 3": (full(3.0, 0.01), "full, lambda 1"),
    "full, lambda 10": (full(10.0, 0.01), "full, lambda 1"),
    "full, lambda 1, beta 0.1": (full(1.0, 0.1), "full, lambda 1"),
    "full, lambda 1, scaled": (full(1.0, 0.01, scaled=True), "full, lambda 1"),
    "full, lambda 10, beta 1": (full(10.0, 1.0), "full, lambda 1"),
    "fitted, shipped": (Arm(temperature="fitted"), None),
    "fitted, lambda 0.01": (full(0.01, 0.01, temperature="fitted"), "fitted, shipped"),
    "fitted, lambda 0.1": (full(0.1, 0.01, temperature="fitted"), "fitted, lambda 0.01"),
    "fitted, lambda 1": (full(1.0, 0.01, temperature="fitted"), "fitted, lambda 0.01"),
    "fitted, lambda 0.1, beta 0.1": (full(0.1, 0.1, temperature="fitted"), "fitted, lambda 0.1"),
    "five shots, same lambda": (full(1.0, 0.01, temperature="fitted"), None),
    "five shots, same beta": (
        full(0.2, 0.002, temperature="fitted"),
        "five shots, same lambda",
    ),
    "five shots, shipped": (
        replace(P, lam=0.012, objective="query", temperature="fitted"),
        "five shots, same lambda",
    ),
    "full, 10 ways": (replace(full(1.0, 0.01), ways=10), "full, lambda 1"),
    "full, 20 ways": (replace(full(1.0, 0.01), ways=20), "full, lambda 1"),
    "fitted, 20 ways": (full(1.0, 0.01, temperature="fitted", ways=20), "fitted, lambda 1"),
    "five shots, 20 ways": (
        full(1.0, 0.01, temperature="fitted", ways=20),
        "five shots, same lambda",
    ),
    "full, 20 ways, same lambda": (full(1.0, 0.01, ways=20, same_lambda=True), "full, 20 ways"),
    "full, 20 ways, lambda 0.3": (
        full(0.3, 0.01, ways=20, same_lambda=True),
        "full, 20 ways, same lambda",
    ),
    "full, 20 ways, lambda 0.3, beta 0.003": (
        full(0.3, 0.003, ways=20, same_lambda=True),
        "full, 20 ways, same lambda",
    ),
    "point, 20 ways": (
        replace(P, belief="point", lam=1.0, ways=20, tied=True),
        "full, 20 ways",
    ),
    "full, lambda 1, both": (full(1.0, 0.01, temperature="both"), "full, lambda 1"),
    "full, beta 0.1, both": (full(1.0, 0.1, temperature="both"), "full, lambda 1, both"),
    "full, beta 1, both": (full(1.0, 1.0, temperature="both"), "full, lambda 1, both"),
    "full, beta 0.001, both": (full(1.0, 0.001, temperature="both"), "full, lambda 1, both"),
    "full, scaled features": (full(0.1, 0.01, scaled=True), "full, beta 0.01"),
    "full, no temperature": (full(1.0, 0.01, temperature=1.0), "full, lambda 1"),
    "full, query loss": (full(1.0, 0.01, objective="query"), "full, lambda 1"),
    "full, rho at 5 times": (full(1.0, 0.01, log_var_rate=5.0), "full, lambda 1"),
    "full, variational": (full(1.0, 0.01, belief="variational"), "full, lambda 1"),
}


class Scaled(nn.Module):
    """Features of length √F."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.normalize(x, dim=-1) * math.sqrt(x.shape[-1])


def network(arm: Arm, shape: tuple[int, ...]) -> nn.Module:
    torch.manual_seed(arm.seed)
    net = ibaml.nn.conv4(5, 16, shape[0], shape[-1])
    if not arm.scaled:
        return net
    *body, head = net.children()
    return nn.Sequential(*body, nn.Flatten(), Scaled(), head)


def learner_of(arm: Arm, net: nn.Module) -> ibaml.MetaLearner:
    full = arm.belief in ("laplace", "variational")
    belief: ibaml.Belief = ibaml.DiagonalGaussian()
    if full:
        kappa = arm.lam * math.exp(arm.log_var) if arm.same_lambda else None
        belief = ibaml.FullGaussian("laplace" if arm.belief == "laplace" else "variational", kappa)
    elif arm.belief == "point":
        belief = ibaml.Point(lam=arm.lam)
    examples = 5 * arm.shots
    return ibaml.MetaLearner(
        net,
        belief,
        DualNewton() if full else make_solver("newton", arm.steps, None),
        ibaml.Implicit(),
        arm.objective,  # type: ignore[arg-type]
        Categorical(arm.temperature),  # type: ignore[arg-type]
        adapt="head",
        tie_head=full or arm.tied,
        samples=arm.samples,
        noise=arm.noise,  # type: ignore[arg-type]
        beta=arm.lam * examples * math.exp(arm.log_var),
        init_log_var=arm.log_var,
    )


def meta_train(arm: Arm, learner: ibaml.MetaLearner, tasks: EpisodeTasks) -> None:
    variances = {id(p) for n, p in learner.named_parameters() if "log_var" in n}
    optimizer = torch.optim.Adam(
        [
            {"params": [p for p in learner.parameters() if id(p) not in variances], "times": 1.0},
            {
                "params": [p for p in learner.parameters() if id(p) in variances],
                "times": arm.log_var_rate,
            },
        ]
    )
    generator = torch.Generator().manual_seed(arm.seed)
    for step in range(arm.iterations):
        for group in optimizer.param_groups:
            share = 0.5 * (1 + math.cos(math.pi * step / arm.iterations))
            group["lr"] = arm.meta_lr * group["times"] * share
        optimizer.zero_grad()
        keys = range(step * arm.tasks, (step + 1) * arm.tasks)
        for batch in tasks.batches("train", keys):
            learner(batch, generator).backward()
        nn.utils.clip_grad_norm_(learner.parameters(), 10.0)
        optimizer.step()


def run(arm: Arm, tasks: EpisodeTasks, count: int, split: str) -> tuple[ClassScores, dict]:
    learner = learner_of(arm, network(arm, tasks.example_shape))
    start = time.perf_counter()
    learner.train()
    meta_train(arm, learner, tasks)
    seconds = time.perf_counter() - start
    learner.eval()
    if arm.temperature in ("fitted", "both"):  # on other tasks than the scored ones
        fit_temperature(learner, tasks, "val", range(10_000, 10_100))
    scores = score_tasks(learner, tasks, split, range(count))
    assert isinstance(scores, ClassScores)
    return scores, {"seconds": round(seconds), "likelihood": repr(learner.likelihood)}


def interval(gap: np.ndarray) -> str:
    error = 1.96 * gap.std(ddof=1) / math.sqrt(len(gap))
    return f"{gap.mean():+.3f} ± {error:.3f}"


def table(out: Path) -> str:
    lines = [f"{'arm':30} {'acc %':>6} {'nll':>6} {'ECE %':>6}   nll against its neighbor"]
    kept = {name: json.loads(path.read_text()) for name, path in files(out).items()}
    for name, row in kept.items():
        neighbor = ARMS[name][1]
        against = ""
        if neighbor in kept:
            gap = np.array(row["nlls"]) - np.array(kept[neighbor]["nlls"])
            against = f"{interval(gap)}  ({neighbor})"
        figures = f"{100 * row['accuracy']:6.1f} {row['nll']:6.3f} {100 * row['ece']:6.1f}"
        lines.append(f"{name:30} {figures}   {against}")
    return "\n".join(lines)


def files(out: Path) -> dict[str, Path]:
    paths = {name: out / f"{name.replace(' ', '_')}.json" for name in ARMS}
    return {name: path for name, path in paths.items() if path.exists()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", choices=("glyphs", "pictures"))
    parser.add_argument("out", type=Path)
    parser.add_argument("--file", type=Path)
    parser.add_argument("--splits", type=Path)
    parser.add_argument("--shots", type=int, default=1)
    parser.add_argument("--tasks", type=int, default=300, help="that are scored")
    parser.add_argument("--split", choices=("val", "test"), default="val")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--iterations", type=int, default=300)
    parser.add_argument("--only", default="", help="arms whose name contains this")
    given = parser.parse_args()
    torch.set_num_threads(1)
    given.out.mkdir(parents=True, exist_ok=True)
    if given.data == "glyphs":
        data = ibaml.tasks.glyphs()
    else:
        data = ibaml.tasks.open_data(str(given.file), splits=given.splits, image_size=42)
    tasks = EpisodeTasks(data, 5, shots=given.shots)
    for name, (arm, _) in ARMS.items():
        path = given.out / f"{name.replace(' ', '_')}.json"
        if given.only not in name or path.exists():
            continue
        arm = replace(arm, iterations=given.iterations, shots=given.shots, seed=given.seed)
        scores, facts = run(arm, replace(tasks, train_ways=arm.ways), given.tasks, given.split)
        means = {n: i.value for n, i in scores.summary().items()}
        row = {k: means[k] for k in ("accuracy", "nll", "ece")}
        row |= {"arm": asdict(arm), **facts, "nlls": scores.means()["nll"].tolist()}
        path.write_text(json.dumps(row))
        print(name, {k: round(v, 4) for k, v in row.items() if k in means}, facts, flush=True)
    print(table(given.out))


if __name__ == "__main__":
    main()
