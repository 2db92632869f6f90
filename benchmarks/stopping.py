"""How near is every gradient rule to the unrolled gradient, where descent is stopped early?

    python benchmarks/stopping.py

Glyphs, 5-way 1-shot, everything adapted. A prior is trained by the unrolled rule for a while; then
the meta-gradient of every task is taken by each rule and compared with the unrolled one of the same
task, noise and steps: the cosine in the means, the ratio of norms in the means, and the cosine in
the log-variances, as medians over the tasks.
"""

from __future__ import annotations

import argparse
import time

import torch
from torch import Tensor

import ibaml
from ibaml import Curvature, FirstOrder, GradientDescent, Implicit, MetaLearner, Unrolled
from ibaml.tasks import EpisodeTasks


def rules(delta: float) -> dict[str, ibaml.GradientRule]:
    """The rules by name; δ = 1/(αK)."""
    # CG from (P + δI)⁻¹b: where it stops at once it leaves the first-order gradient, not zero
    warm = ibaml.ConjugateGradient(64, tol=1e-3, start="preconditioned")
    ggn, mean = Curvature("ggn"), Curvature("energy", block="mean")
    return {
        "first order": FirstOrder(),
        "implicit, Gauss–Newton": Implicit(ggn),
        "implicit, exact on the means": Implicit(mean),
        "implicit, exact on the means, μ = 1": Implicit(Curvature("energy", 1.0, "mean")),
        "K-aware, Gauss–Newton": Implicit(ggn, stopping="auto"),
        "K-aware, exact on the means": Implicit(mean, stopping="auto"),
        "K-aware, exact on the means, L = 5": Implicit(
            mean, ibaml.ConjugateGradient(5), stopping="auto"
        ),
        "K-aware, exact on the means, warm": Implicit(mean, warm, stopping="auto"),
        "K-aware, exact": Implicit(Curvature("energy"), stopping="auto"),
        **{
            f"{factor:g}·δ, exact on the means": Implicit(mean, stopping=factor * delta)
            for factor in (0.1, 0.5, 2.0, 10.0)
        },
    }


def gradient(learner: MetaLearner, batch: ibaml.TaskBatch) -> tuple[Tensor, Tensor]:
    """The meta-gradient of one task in the means and in the log-variances."""
    learner.zero_grad()
    learner(batch, torch.Generator().manual_seed(0)).backward()
    parts = list(learner.model.parameters()), list(learner.log_var.values())
    means, log_vars = (torch.cat([p.grad.reshape(-1) for p in part]) for part in parts)
    return means.clone(), log_vars.clone()


def cosine(a: Tensor, b: Tensor) -> float:
    return float(torch.nn.functional.cosine_similarity(a, b, dim=0))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--iterations", type=int, default=100, help="of training, 8 tasks each")
    parser.add_argument("--tasks", type=int, default=20, help="on which gradients are compared")
    parser.add_argument("--steps", type=int, nargs="+", default=[5, 15, 50])
    parser.add_argument("--lr", type=float, default=0.1)
    given = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    tasks = EpisodeTasks(ibaml.tasks.glyphs(), 5, 1, queries=15)
    learner = ibaml.methods.abml(
        ibaml.nn.conv4(5, 16, 1, 28), data=tasks, steps=5, lr=given.lr, objective="query",
        beta=5e-4, init_log_var=-7.0,
    )  # fmt: skip
    optimizer = torch.optim.Adam(learner.parameters(), lr=0.003)
    begun = time.monotonic()
    for step in range(given.iterations):
        (batch,) = tasks.batches("train", range(8 * step, 8 * step + 8))
        optimizer.zero_grad()
        loss = learner(batch, torch.Generator().manual_seed(step))
        loss.backward()
        optimizer.step()
        if step % 20 == 19:
            print(f"iteration {step + 1}: loss {float(loss):.3f}", flush=True)
    print(f"trained {8 * given.iterations} tasks in {time.monotonic() - begun:.0f} s")
    print(f"α = {given.lr:g}; columns: means: cosine, ratio of norms (largest); log-variances:")
    print("cosine; residual of CG, tasks where it met negative curvature; time of a meta-step")
    for steps in given.steps:
        compare(learner, tasks, steps, given.lr, given.tasks)


def compare(learner: MetaLearner, tasks: EpisodeTasks, steps: int, lr: float, count: int) -> None:
    learner = learner.replace(solver=GradientDescent(steps, lr))
    arms = {name: learner.replace(gradient=rule) for name, rule in rules(1 / (lr * steps)).items()}
    exact = learner.replace(gradient=Unrolled(recompute=steps > 20))
    rows: dict[str, list[tuple[float, float, float, float, bool]]] = {name: [] for name in arms}
    seconds = dict.fromkeys(["unrolled", *arms], 0.0)
    for key in range(count):
        (batch,) = tasks.batches("val", [key])
        begun = time.monotonic()
        means, log_vars = gradient(exact, batch)
        seconds["unrolled"] += time.monotonic() - begun
        for name, arm in arms.items():
            begun = time.monotonic()
            m, rho = gradient(arm, batch)
            seconds[name] += time.monotonic() - begun
            linear = arm.diagnostics.record.linear
            residual = float("nan") if linear is None else float(linear.residual)
            negative = linear is not None and int(linear.reason) == ibaml.Reason.NEGATIVE_CURVATURE
            ratio = float(m.norm() / means.norm())
            rows[name].append((cosine(m, means), ratio, cosine(rho, log_vars), residual, negative))
    print(f"\nK = {steps} (unrolled {1000 * seconds['unrolled'] / count:.0f} ms a task)")
    for name, values in rows.items():
        middle = torch.tensor(values, dtype=torch.float64)
        cos, ratio, cos_rho, residual, _ = middle.median(0).values.tolist()
        print(
            f"{name:36s} {cos:5.2f} {ratio:5.2f} ({middle[:, 1].max():6.2f})   {cos_rho:5.2f}   "
            f"{residual:7.1e} {int(middle[:, 4].sum()):3d} of {count}   "
            f"{1000 * seconds[name] / count:5.0f} ms",
            flush=True,
        )


if __name__ == "__main__":
    main()
