"""The whole story in about a minute: learn a prior from sinusoids, then fit a new one."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ibaml import nn
from ibaml.energy import Gaussian
from ibaml.learner import MetaLearner
from ibaml.linalg import ConjugateGradient
from ibaml.methods import ibaml, maml
from ibaml.report import Fit, draw_fits
from ibaml.solve import NewtonCG
from ibaml.tasks import Sinusoids, TaskBatch

SHOTS = (0, 1, 5, 10)
TASKS = 16  # tasks in a meta-step
_TRAIN, _TEST = 1, 2  # seeds of the task families: test tasks are new

Progress = Callable[[float], None]  # called after every step with the loss


@dataclass(frozen=True)
class Score:
    """Test figures of one learner after a number of examples."""

    shots: int
    rmse: float
    nll: float | None
    coverage: float | None  # share of the queries inside the 95 % interval


def build() -> dict[str, MetaLearner]:
    """The two learners of the demo, on the same network."""
    torch.manual_seed(0)
    bayes = ibaml(
        nn.mlp(1, 1, hidden=(40, 40), activation="tanh"),
        adapt="head",
        solver=NewtonCG(steps=3, linear_solver=ConjugateGradient(8)),
        samples=8,
        noise="antithetic",
        beta=0.1,
        init_log_var=-1.0,
        likelihood=Gaussian(0.3),
    )
    torch.manual_seed(0)
    point = maml(nn.mlp(1, 1, hidden=(40, 40), activation="tanh"), steps=5, lr=0.05)
    return {"iBaML": bayes, "MAML": point}


def train(learner: MetaLearner, iterations: int, progress: Progress, lr: float = 4e-3) -> None:
    """Meta-train on sinusoids with 1 to 10 examples; an ordinary PyTorch loop."""
    family = Sinusoids()
    generator = torch.Generator().manual_seed(0)
    optimiser = torch.optim.Adam(learner.parameters(), lr=lr)
    schedule = torch.optim.lr_scheduler.LinearLR(optimiser, 1.0, 0.01, iterations)
    for step in range(iterations):
        shots = int(torch.randint(1, 11, (), generator=generator))
        keys = range(step * TASKS, (step + 1) * TASKS)
        batch = family.batch(_TRAIN, keys, support=shots, query=20)
        optimiser.zero_grad()
        loss = learner(batch, generator)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(learner.parameters(), 10.0)
        optimiser.step()
        schedule.step()
        progress(float(loss.detach()))


def score(learner: MetaLearner, tasks: int = 100) -> list[Score]:
    """Root-mean-square error on new sinusoids, and, for a posterior, its nll and coverage."""
    scores = []
    for shots in SHOTS[1:]:
        batch = Sinusoids().batch(_TEST, range(tasks), support=shots, query=50)
        errors, nlls, inside = [], [], []
        for t in range(tasks):
            mean, variance = _predict(learner, batch, t, shots, batch.query_x[t])
            residual = (mean - batch.query_y[t]).square()
            errors.append(residual.mean())
            normal = torch.distributions.Normal(mean, variance.sqrt())
            nlls.append(-normal.log_prob(batch.query_y[t]).mean())
            inside.append((residual <= 1.96**2 * variance).double().mean())
        bayes = learner.belief.stochastic
        scores.append(
            Score(
                shots=shots,
                rmse=float(torch.stack(errors).mean().sqrt()),
                nll=float(torch.stack(nlls).mean()) if bayes else None,
                coverage=float(torch.stack(inside).mean()) if bayes else None,
            )
        )
    return scores


def fits(learner: MetaLearner, key: int) -> list[Fit]:
    """The panels of one new sinusoid after 0, 1, 5 and 10 examples."""
    family = Sinusoids()
    batch = family.batch(_TEST, [key], support=max(SHOTS), query=1)
    amplitude, phase, _ = family.task(_TEST, key)
    x = torch.linspace(*family.x_range, 200)[:, None]
    panels = []
    for shots in SHOTS:
        mean, variance = _predict(learner, batch, 0, shots, x)
        panels.append(
            Fit(
                title=f"{shots} example{'' if shots == 1 else 's'}",
                x=x,
                truth=amplitude * torch.sin(x + phase),
                mean=mean,
                deviation=variance.sqrt() if learner.belief.stochastic else None,
                examples_x=batch.support_x[0, :shots],
                examples_y=batch.support_y[0, :shots],
            )
        )
    return panels


def _predict(
    learner: MetaLearner, batch: TaskBatch, t: int, shots: int, x: Tensor
) -> tuple[Tensor, Tensor]:
    posterior = learner.adapt(batch.support_x[t, :shots], batch.support_y[t, :shots])
    return posterior.predict(x, samples=50)


def save(learners: dict[str, MetaLearner], scores: dict[str, list[Score]], out: Path) -> list[Path]:
    """The picture and the figures of the demo."""
    rows = [(name, fits(learner, key=3)) for name, learner in learners.items()]
    picture = draw_fits(
        rows,
        out / "sinusoid.png",
        "A new sinusoid: iBaML's posterior predictive, MAML's point fit",
    )
    figures = out / "scores.json"
    figures.write_text(
        json.dumps({n: [vars(s) for s in rows] for n, rows in scores.items()}, indent=2) + "\n"
    )
    return [picture, figures]
