"""What is the meta-gradient of one task, by the explicit rule and by the implicit one?

The steps of the learner one by one, so that a study can use what lies between them. The meta-loss
is the query nll, which does not depend on θ directly (∇₂L = 0).
"""

from __future__ import annotations

import torch
from torch import Tensor

from ibaml.curvature import Curvature
from ibaml.energy import TaskEnergy, detached
from ibaml.gradient import Implicit, Record, Unrolled
from ibaml.linalg import LinearSolver
from ibaml.objectives import QueryNll
from ibaml.solve import Descent

PRIOR = [0, 1]  # the prior's mean and log-variance, by position in an energy's theta


def start_of(support: TaskEnergy) -> Tensor:
    """The prior as the first solution, differentiable in θ."""
    return support.belief.start(support.meta.prior, 1)


def explicit_gradient(
    support: TaskEnergy, query: TaskEnergy, solver: Descent
) -> tuple[Tensor, Tensor]:
    """The solution v̂ (1, dim) and the gradient (dim,) through the steps that led to it."""
    v = Unrolled(recompute=solver.steps > 50)(
        support, start_of(support), solver, Record(), examine=False
    )
    loss = QueryNll()(v, support, query).sum()
    gradient = torch.cat(torch.autograd.grad(loss, support.meta.prior))
    return v.detach(), gradient


def slope_at(support: TaskEnergy, query: TaskEnergy, v: Tensor) -> Tensor:
    """b = ∇₁L, the meta-loss's gradient at a solution."""
    point = v.detach().requires_grad_()
    (b,) = torch.autograd.grad(QueryNll()(point, support, query).sum(), point)
    return b


def implicit_gradient(
    support: TaskEnergy,
    v: Tensor,
    b: Tensor,
    curvature: Curvature,
    linear_solver: LinearSolver,
    record: Record | None = None,
) -> Tensor:
    """The implicit gradient (dim,) at v, whether v is a solution or not."""
    rule = Implicit(curvature, linear_solver)
    gradients = rule.pull_back(detached(support), v, b, PRIOR, record or Record())
    return torch.cat([g.detach() for g in gradients if g is not None])
