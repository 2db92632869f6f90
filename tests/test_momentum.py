"""Descent with momentum: torch's own steps, and what the implicit rule takes for their length."""

from __future__ import annotations

import pytest
import torch

import ibaml
from ibaml import GradientDescent, Implicit, PolyakDescent, Unrolled
from ibaml.energy import PlainEnergy, Structure, detached
from oracles import F64, gradients, relative
from problems import class_batch, mlp_model, plain_learner


def test_steps_are_those_of_torch():
    learner = plain_learner("imaml", mlp_model(), lam=0.3)
    energy = detached(learner.problem(class_batch((3,)), 0)[0])
    start = learner.belief.start(energy.meta.prior, 2).detach()
    v = start.clone().requires_grad_()
    optimizer = torch.optim.SGD([v], lr=0.2, momentum=0.7, nesterov=True)
    for _ in range(12):
        optimizer.zero_grad()
        energy(v).sum().backward()
        optimizer.step()
    solution = GradientDescent(12, 0.2, momentum=0.7).solve(energy, start)
    assert relative(solution.value, v.detach()) <= 1e-13
    assert solution.steps.tolist() == [12, 12]


def plain(function, start: torch.Tensor) -> PlainEnergy:
    from torch.utils._pytree import tree_flatten

    leaves, spec = tree_flatten(torch.zeros(1))
    return PlainEnergy(lambda v, _: function(v), Structure.of(start, len(start)), tuple(leaves),
                       spec, ())  # fmt: skip


@pytest.mark.parametrize("steps", [1, 2, 7, 50])
@pytest.mark.parametrize("mu", [0.0, 0.5, 0.9])
def test_step_sizes_add_up_to_the_way_under_a_constant_gradient(steps, mu):
    slope = torch.tensor([[1.0, -2.0]], dtype=F64)
    start = torch.zeros(1, 2, dtype=F64)
    energy = plain(lambda v: (slope * v).sum(-1), start)
    solver = GradientDescent(steps, 0.1, momentum=mu)
    moved = solver.solve(energy, start).value
    sizes = solver.step_sizes(energy, start)
    assert relative(moved, -steps * sizes * slope) <= 1e-13


@pytest.mark.parametrize(("steps", "most"), [(1, 0.5), (5, 0.44), (15, 0.3), (50, 0.23)])
def test_what_the_implicit_rule_puts_for_the_steps_is_bounded(steps, most):
    """On ½hv² the steps keep p(h) of the start, and the K-aware rule puts δ/(h + δ) for it: equal
    to first order at h = 0, and, for α(1 + μ)h ≤ 1, never too small and hardly worse than without
    momentum."""
    mu, lr = 0.7, 0.1
    h = torch.cat([torch.tensor([1e-6]), torch.logspace(-4, 0, 400) / (lr * (1 + mu))]).to(F64)
    start = torch.ones(len(h), 1, dtype=F64)
    energy = plain(lambda v: 0.5 * h * v[:, 0] ** 2, start)
    solver = GradientDescent(steps, lr, momentum=mu)
    kept = solver.solve(energy, start).value[:, 0]
    way = steps * solver.step_sizes(energy, start)
    assert abs(float((1 - kept[0]) / h[0]) / way - 1) <= 1e-3
    error = 1 / (1 + h * way) - kept
    assert error.min() >= -1e-12
    assert error.max() <= most


def test_the_k_aware_rule_is_nearer_to_unrolling_than_first_order():
    """Everything of a small network adapted, few steps."""
    distance = {}
    exact = None
    for name, rule in {
        "unrolled": Unrolled(),
        "first order": ibaml.FirstOrder(),
        "K-aware": Implicit(ibaml.Curvature("energy"), ibaml.Dense(), stopping="auto"),
    }.items():
        learner = plain_learner(
            "imaml", mlp_model(), lam=0.3, gradient=rule,
            solver=GradientDescent(8, 0.2, momentum=0.7),
        )  # fmt: skip
        got = torch.cat(list(gradients(learner, class_batch((3,))).values()))
        exact = got if exact is None else exact
        distance[name] = relative(got, exact)
    assert distance["K-aware"] < 0.8 * distance["first order"]


def test_polyaks_bound_shortens_it_too():
    start = torch.full((1, 1), 10.0, dtype=F64)
    energy = plain(lambda v: v.square().sum(-1), start)
    solution = PolyakDescent(1, 100.0, momentum=0.5, lowest=0.0).solve(energy, start)
    # Polyak's step is 10²/20² = 1/4 of ∇E; momentum adds half of it at once
    assert float(solution.value) == pytest.approx(10 - 1.5 * 0.25 * 20)


@pytest.mark.parametrize("momentum", [1.0, -0.1, "0.5"])
def test_momentum_is_below_one(momentum):
    with pytest.raises((ValueError, TypeError), match="momentum"):
        GradientDescent(5, 0.1, momentum=momentum)
