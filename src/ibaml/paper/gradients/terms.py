"""What are the errors of one task's meta-gradients, and the terms of their bounds?

In the paper's coordinates (m, d): the errors of the explicit and the implicit gradient, the error
of adaptation ε, the Jacobian's error δ and the linear solve's error δ′, with the constants of the
theorems on the way from v̂ to the optimum.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ibaml import methods, nn
from ibaml.curvature import Curvature
from ibaml.energy import Gaussian, TaskEnergy, detached
from ibaml.fields import require, setting
from ibaml.gradient import Record, Unrolled
from ibaml.linalg import ConjugateGradient, Dense, dense_matrix
from ibaml.paper.gradients.linear import LinearTest
from ibaml.paper.gradients.rules import PRIOR, implicit_gradient, slope_at, start_of
from ibaml.paper.gradients.theorems import Constants, task_constants
from ibaml.paper.study import rising
from ibaml.parts import Numbers
from ibaml.solve import Descent, GradientDescent, NaturalDescent, NewtonCG
from ibaml.tasks import Sinusoids

SOLVED = "solved"  # stands for K at the optimum itself


def _rising_from_0(values: Sequence[int]) -> str | None:
    return None if not rising(values) and 0 in values else "must rise from 0"


@dataclass(frozen=True)
class Settings:
    """Which errors of how many tasks are computed, and how precisely."""

    seed: int = 0
    seeds: int = setting(10, "How many tasks.", least=1)
    steps: tuple[int, ...] = setting(
        (0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096),
        "Steps of adaptation, K, from 0.", least=0, check=_rising_from_0,
    )  # fmt: skip
    jacobian_steps: int = setting(512, "δ is computed up to this K: K·dim products.", least=0)
    solved_steps: tuple[int, ...] = setting(
        (16, 256), "The K after which L is varied; it is at the optimum, too.", least=0
    )
    cg_steps: tuple[int, ...] = setting(
        (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 16, 20, 24, 28, 32, 36, 40, 48, 64),
        "Steps of conjugate gradients, L.", least=1,
    )  # fmt: skip
    dimension: int = setting(32, "Weights of the linear model.", least=1)
    points: int = setting(5, "Between v̂ and the optimum, where constants are computed.", least=2)

    def __post_init__(self) -> None:
        require(self)


@dataclass(frozen=True)
class Problem:
    """One task: its energies, how it is adapted, and the answers.

    Attributes:
        descent: the solver; its number of steps does not matter.
        trajectory: v̂ after every K of the settings, each (1, dim), in (m, ρ).
        optimum: (1, dim), in (m, ρ).
        true: the true meta-gradient (dim,), in (m, d).
    """

    support: TaskEnergy
    query: TaskEnergy
    descent: Descent
    trajectory: dict[int, Tensor]
    optimum: Tensor
    true: Tensor

    @property
    def examples(self) -> int:
        return self.support.x.shape[1]

    def in_variance(self, gradient: Tensor) -> Tensor:
        """A gradient in (m, ρ) as one in (m, d)."""
        return in_variance(self.support, gradient)

    def eps(self, v: Tensor) -> float:
        """ε, the distance from the optimum in (m, d)."""
        return float((paper_point(v) - paper_point(self.optimum)).norm())

    @cached_property
    def at_optimum(self) -> LocalTerms:
        return local_terms_at(self, self.optimum)


def prior_variance(energy: TaskEnergy) -> Tensor:
    return energy.meta.prior[1].detach().exp()


def in_variance(energy: TaskEnergy, gradient: Tensor) -> Tensor:
    """A gradient in (m, ρ) as one in (m, d)."""
    g_m, g_rho = gradient.chunk(2, -1)
    return torch.cat([g_m, g_rho / prior_variance(energy)], -1)


def paper_point(v: Tensor) -> Tensor:
    """(m, ρ) as (m, d)."""
    m, rho = v.chunk(2, -1)
    return torch.cat([m, rho.exp()], -1)


def library_point(w: Tensor) -> Tensor:
    """(m, d) as (m, ρ)."""
    m, d = w.chunk(2, -1)
    return torch.cat([m, d.log()], -1)


def trajectory(support: TaskEnergy, descent: Descent, steps: Sequence[int]) -> dict[int, Tensor]:
    """v̂ after every K; each K continues from the one before."""
    v, at = start_of(support).detach(), 0
    points = {}
    for count in steps:
        rest = replace(descent, steps=count - at)
        v, at = rest.solve(detached(support), v, examine=False).value, count
        points[count] = v
    return points


def linear_problem(settings: Settings, key: int, natural: bool = False) -> Problem:
    """The task of Figure 1, its expectation and true gradient in closed form."""
    test = LinearTest(dimension=settings.dimension, support=settings.dimension)
    batch = test.batch(settings.seed, key)
    support, query = test.energies(batch, settings.seed, exact=True)
    plain = test.descent(0)
    descent = NaturalDescent(0, plain.lr) if natural else plain
    optimum = solved(support, start_of(support).detach())
    path = trajectory(support, descent, settings.steps)
    true = in_variance(support, test.true_gradient(batch))
    return Problem(support, query, descent, path, optimum, true)


def mlp_problem(settings: Settings, key: int) -> Problem:
    """A sinusoid for a small tanh network; the optimum is the one that descent tends to."""
    family = Sinusoids(amplitude=(0.5, 1.5), x_range=(-2.0, 2.0), noise=0.1)
    batch = family.batch(settings.seed, [key], support=10, query=20, dtype=torch.float64)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed + key)
        model = nn.mlp(1, 1, hidden=(5,), activation="tanh").to(torch.float64)
    learner = methods.ibaml(
        model, adapt="all", samples=8, noise="antithetic", beta=1.0, init_log_var=-2.0,
        likelihood=Gaussian(0.5),
    )  # fmt: skip
    support, query = learner.problem(batch, settings.seed)
    descent = GradientDescent(0, 0.1)
    path = trajectory(support, descent, settings.steps)
    optimum = solved(support, path[settings.steps[-1]])
    b = slope_at(support, query, optimum)
    true = implicit_gradient(support, optimum, b, Curvature("energy"), Dense())
    return Problem(support, query, descent, path, optimum, in_variance(support, true))


PROBLEMS: dict[str, Callable[[Settings, int], Problem]] = {
    "linear": linear_problem,
    "linear, natural": partial(linear_problem, natural=True),
    "mlp": mlp_problem,
}


def solved(energy: TaskEnergy, start: Tensor) -> Tensor:
    """The minimum near a point, to rounding."""
    solver = NewtonCG(
        steps=200,
        tol=1e-13,
        curvature=Curvature("energy"),
        linear_solver=ConjugateGradient(steps=300, tol=1e-6),
    )
    solution = solver.solve(detached(energy), start)
    assert solution.gradient is not None
    if not float(solution.gradient.norm()) <= 1e-9:
        raise FloatingPointError(f"no optimum was found (‖∇E‖ = {solution.gradient.norm():.1e})")
    return solution.value


@dataclass(frozen=True)
class LocalTerms:
    """The quantities of the theorems at one point, in the paper's coordinates and scale."""

    slope: Tensor  # ∇L_tr
    hessian: Tensor  # ∇²L_tr
    h: Tensor  # H
    b: Tensor  # ∇₁L_val
    meta_hessian: Tensor  # ∇²L_val


def local_terms_at(problem: Problem, v: Tensor) -> LocalTerms:
    """Lemma 1's matrices at v. The paper's loss is the library's times N, the examples."""
    support, query = detached(problem.support), detached(problem.query)
    lemma, meta = Curvature("lemma").at(support, v), Curvature("lemma").at(query, v)
    assert lemma.diagonal is not None
    assert meta.diagonal is not None
    h = problem.examples * dense_matrix(lemma.product, v)[0]
    meta_h = dense_matrix(meta.product, v)[0]
    return LocalTerms(
        slope=problem.examples * lemma.to_coordinates(lemma.loss_gradient)[0],
        hessian=h - torch.diag(problem.examples * lemma.diagonal[0]),
        h=h,
        b=lemma.to_coordinates(slope_at(support, query, v))[0],
        meta_hessian=meta_h - torch.diag(meta.diagonal[0]),
    )


def mixed_matrix(problem: Problem, v: Tensor) -> Tensor:
    """Lemma 1's G at v, column by column."""
    lemma = Curvature("lemma").at(detached(problem.support), v, PRIOR)
    columns = []
    for unit in torch.eye(v.shape[-1], dtype=v.dtype):
        gradients = [g.detach() for g in lemma.pull_back(unit[None]) if g is not None]
        columns.append(problem.in_variance(torch.cat(gradients)))
    return problem.examples * torch.stack(columns, -1)


def constants_between(problem: Problem, v: Tensor, points: int) -> Constants:
    """The constants on the way from v to the optimum: largest values at points of the segment, and
    the change between its ends. Exact for the linear model, whose Hessians are constant and whose
    gradients are largest at an end; estimates from below for others."""
    start, end = paper_point(v), paper_point(problem.optimum)
    inner = [start + t * (end - start) for t in np.linspace(0, 1, points)[:-1]]
    local_terms = [*(local_terms_at(problem, library_point(p)) for p in inner), problem.at_optimum]
    first, last = local_terms[0], local_terms[-1]
    gap = float((start - end).norm())
    pairs = [*pairwise(local_terms), (first, last)]
    gaps = [gap / (points - 1)] * (points - 1) + [gap]
    variance = prior_variance(problem.support)
    return Constants(
        a=max(float(p.b.norm()) for p in local_terms),
        b=max(*(_size(p.meta_hessian) for p in local_terms), _change(first.b, last.b, gap)),
        c=0.0,  # the query nll does not depend on θ directly
        d=max(*(_size(p.hessian) for p in local_terms), _change(first.slope, last.slope, gap)),
        e=max(
            _change(p.hessian, q.hessian, g) for (p, q), g in zip(pairs, gaps, strict=True)
        ),
        sigma=min(float(torch.linalg.matrix_norm(p.h, -2)) for p in (first, last)),
        rho=max(float(p.slope.abs().max()) for p in (first, last)),
        d_min=float(variance.min()),
        d_max=float(variance.max()),
    )  # fmt: skip


def _size(a: Tensor) -> float:
    """The largest singular value (of a vector: its length)."""
    return float(torch.linalg.norm(a, 2))


def _change(a: Tensor, b: Tensor, distance: float) -> float:
    """‖a − b‖ per distance; 0 where the two differ by rounding."""
    change = _size(a - b)
    return change / distance if change > 1e-12 * _size(a) else 0.0


def explicit_jacobian(problem: Problem, steps: int) -> Tensor:
    """The Jacobian in θ of v̂ after K steps, in (m, d), with the paper's rows (θ) and columns."""
    support = problem.support
    solver = replace(problem.descent, steps=steps)
    v = Unrolled()(support, start_of(support), solver, Record(), examine=False)
    units = torch.eye(v.shape[-1], dtype=v.dtype)[:, None]
    gradients = torch.autograd.grad(v, support.meta.prior, units, is_grads_batched=True)
    rows = problem.in_variance(torch.cat(gradients, -1))  # ∂v_i/∂θ, in θ = (m, d)
    rho = v.detach()[0].chunk(2)[1]
    scale = torch.cat([torch.ones_like(rho), rho.exp()])
    return (rows * scale[:, None]).T.detach()


def cell(problem: Problem, settings: Settings) -> Numbers:
    """All results of one task: a row per K and a row per (K, L)."""
    rows = [_after(problem, steps, settings) for steps in settings.steps]
    task = task_constants(Constants(**row["constants"]) for row in rows)
    for row in rows:
        local = Constants(**row["constants"])
        for name, constants in (("", local), (", Remark 3", task)):
            row[f"implicit bound{name}"] = constants.implicit(row["eps"], 0.0)
            if row["delta"] is not None:
                row[f"explicit bound{name}"] = constants.explicit(row["eps"], row["delta"])
    solves = []
    for steps in settings.solved_steps:
        if steps in problem.trajectory:
            solves += _solves(problem, steps, problem.trajectory[steps], settings)
    solves += _solves(problem, SOLVED, problem.optimum, settings)
    return {"size": float(problem.true.norm()), "rows": rows, "solves": solves}


def _after(problem: Problem, steps: int, settings: Settings) -> Numbers:
    """Errors and terms after K steps, with an exact solve."""
    row: Numbers = {"K": steps, "delta": None, "explicit error": None}
    v = problem.trajectory[steps]
    if steps <= settings.jacobian_steps:
        jacobian = explicit_jacobian(problem, steps)
        local = local_terms_at(problem, v)
        lemma = torch.linalg.solve(local.h.T, mixed_matrix(problem, v).T).T  # G·H⁻¹
        row["delta"] = float(torch.linalg.matrix_norm(jacobian - lemma, 2))
        row["explicit error"] = float((jacobian @ local.b - problem.true).norm())
    row["eps"] = problem.eps(v)
    b = slope_at(problem.support, problem.query, v)
    g = implicit_gradient(problem.support, v, b, Curvature("lemma"), Dense())
    row["implicit error"] = float((problem.in_variance(g) - problem.true).norm())
    row["constants"] = asdict(constants_between(problem, v, settings.points))
    return row


def _solves(
    problem: Problem, steps: int | str, v: Tensor, settings: Settings
) -> list[Numbers]:  # fmt: skip
    """Errors and terms with L steps of plain CG at one point."""
    constants = constants_between(problem, v, settings.points)
    b = slope_at(problem.support, problem.query, v)
    eps = problem.eps(v)

    def solve(solver: Any) -> tuple[Tensor, Tensor]:
        record = Record()
        g = implicit_gradient(problem.support, v, b, Curvature("lemma"), solver, record)
        assert record.linear is not None
        return problem.in_variance(g), record.linear.value / problem.examples

    _, exact = solve(Dense())
    rows = []
    for count in settings.cg_steps:
        g, u = solve(ConjugateGradient(count, precondition=False))
        delta = float((u - exact).norm())
        rows.append(
            {
                "K": str(steps),
                "L": count,
                "eps": eps,
                "delta'": delta,
                "implicit error": float((g - problem.true).norm()),
                "implicit bound": constants.implicit(eps, delta),
            }
        )
    return rows
