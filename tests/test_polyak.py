"""Descent whose steps are never longer than Polyak's: the length, what it guarantees, and that the
implicit rule knows how far it came."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import ibaml
from ibaml import (
    ConjugateGradient,
    Curvature,
    Gaussian,
    GradientDescent,
    Implicit,
    PolyakDescent,
    Record,
    implicit_solve,
)
from ibaml.energy import PlainEnergy, Structure
from ibaml.solve import energy_and_gradient
from oracles import F64, gradients, relative
from problems import class_batch, mlp_model, plain_learner, regression_batch


def plain(function, start: torch.Tensor) -> PlainEnergy:
    """An energy of T problems, of start's shape (T, n)."""
    from torch.utils._pytree import tree_flatten

    leaves, spec = tree_flatten(torch.zeros(1))
    return PlainEnergy(lambda v, _: function(v), Structure.of(start, len(start)), tuple(leaves),
                       spec, ())  # fmt: skip


@settings(deadline=None, max_examples=40)
@given(
    size=st.integers(1, 5),
    spread=st.floats(0, 4),
    lr=st.floats(1e-3, 1e4),
    lowest=st.floats(-3, 3),
    number=st.integers(0, 10_000),
)
def test_every_step_comes_nearer_to_the_minimum_of_a_convex_energy(
    size, spread, lr, lowest, number
):
    """However long α is, if the lowest value is known."""
    rng = torch.Generator().manual_seed(number)
    basis = torch.linalg.qr(torch.randn(size, size, generator=rng, dtype=F64)).Q
    h = basis @ torch.diag(torch.logspace(-spread, spread, size, dtype=F64)) @ basis.mT
    minimum = torch.randn(2, size, generator=rng, dtype=F64)
    start = torch.randn(2, size, generator=rng, dtype=F64)
    energy = plain(lambda v: lowest + 0.5 * ((v - minimum) @ h * (v - minimum)).sum(-1), start)
    distance = (start - minimum).norm(dim=-1)
    v = start
    for _ in range(4):
        v = PolyakDescent(1, lr, lowest=lowest).solve(energy, v).value
        nearer = (v - minimum).norm(dim=-1)
        assert (nearer <= distance * (1 + 1e-9) + 1e-9).all()
        distance = nearer


def test_a_step_is_polyaks_or_the_given_one():
    """By hand, for every task on its own, with one step size or one for each weight."""
    batch = class_batch((3,))
    for lr in (1e-3, 100.0, {"*.weight": 50.0, "*": 0.5}):
        learner = plain_learner("ibaml", mlp_model(), solver=PolyakDescent(1, lr), samples=2)
        energy, _ = learner.problem(batch, 0)
        start = learner.belief.start(energy.meta.prior, len(batch)).detach()
        value, slope = energy_and_gradient(energy, start)
        rate = torch.empty_like(start[0])
        for name, begin, end in energy.slots:
            whole = isinstance(lr, float)
            rate[begin:end] = lr if whole else lr["*.weight" if name.endswith(".weight") else "*"]
        share = (value / (slope * rate * slope).sum(-1)).clamp(max=1)
        solution = learner.solver.solve(energy, start)
        assert relative(solution.value, start - share[:, None] * rate * slope) <= 1e-12
        assert relative(solution.path, share) <= 1e-12
        assert (share == 1).all() if lr == 1e-3 else (share < 1).all()


def test_a_step_size_that_is_too_long_does_no_harm():
    """Where plain descent climbs, it goes down."""
    batch = class_batch((3,), shots=4)
    batch = replace(batch, support_x=20 * batch.support_x, query_x=20 * batch.query_x)
    net = nn.Linear(3, 3).to(F64)
    ends = {}
    for solver in (GradientDescent(20, 1.0), PolyakDescent(20, 1.0)):
        learner = plain_learner("imaml", net, solver=solver, lam=0.01)
        learner(batch)
        diagnostics = learner.diagnostics
        ends[type(solver)] = diagnostics.energy_after / diagnostics.energy_before
    assert ends[GradientDescent].max() > 1
    assert (ends[PolyakDescent] < 0.3).all()
    assert (ends[PolyakDescent] < ends[GradientDescent]).all()


@pytest.mark.parametrize("lowest", [-1e6, -1.0])
def test_a_task_whose_energy_rose_halves_its_step_size(lowest):
    """By hand: where the bound says nothing (E₀ is far below), α = 0.3 is too long for a curvature
    of 10 (αh = 3), and 0.15 is not; a curvature of 5 (αh = 1.5) keeps 0.3."""
    h = torch.tensor([[10.0], [5.0]], dtype=F64)
    start = torch.ones(2, 1, dtype=F64)
    energy = plain(lambda v: 0.5 * (h * v * v).sum(-1), start)
    found = PolyakDescent(8, 0.3, lowest=lowest).solve(energy, start)
    longest = torch.full((2, 1), 0.3, dtype=F64)
    v, before = start, torch.full((2, 1), torch.inf, dtype=F64)
    path = torch.zeros(2, 1, dtype=F64)
    for _ in range(8):
        value, slope = 0.5 * h * v * v, h * v
        longest = torch.where(value > before, longest / 2, longest)
        step = torch.minimum(longest, (value - lowest) / slope.square())
        v, before, path = v - step * slope, value, path + step / 0.3
    assert relative(found.value, v) <= 1e-12
    assert relative(found.path, path[:, 0]) <= 1e-12
    assert (found.energy_after < found.energy_before).all()
    unbounded = GradientDescent(8, 0.3).solve(energy, start)
    assert bool(unbounded.diverged[0])
    assert not bool(unbounded.diverged[1])


def test_the_lowest_value_of_gaussian_noise_is_that_of_a_perfect_fit():
    batch = regression_batch()
    likelihood = Gaussian(0.3, learn=True).to(F64)
    net = nn.Linear(4, 1).to(F64)
    learner = plain_learner("ibaml", net, likelihood=likelihood)
    energy, _ = learner.problem(batch, 0)
    perfect = likelihood(batch.support_y[0], batch.support_y[0])
    lowest = float(energy.lowest.detach())
    assert lowest == pytest.approx(float(perfect[0].detach()), rel=1e-12)
    assert lowest == pytest.approx(math.log(0.3 * math.sqrt(2 * math.pi)))


def test_an_energy_whose_lowest_value_nobody_knows_is_refused():
    def absolute(outputs, y):
        return (outputs - y).abs().sum(-1)

    net = nn.Linear(4, 1).to(F64)
    for solver, fits in ((PolyakDescent(2, 0.1), False), (PolyakDescent(2, 0.1, lowest=0.0), True)):
        learner = plain_learner("imaml", net, solver=solver, likelihood=absolute)
        if fits:
            learner(regression_batch())
        else:
            with pytest.raises(ValueError, match=r"does not say one: give it, PolyakDescent\(low"):
                learner(regression_batch())


@pytest.mark.parametrize("kind", ["ggn", "energy"])
def test_the_implicit_rule_adds_up_the_steps_that_were_taken(kind):
    """δ of every task is one over the sum of its own step sizes."""
    batch = class_batch((3,), tasks=2)
    solver, cg = PolyakDescent(6, 30.0), ConjugateGradient(60, tol=1e-13)
    learner = plain_learner(
        "ibaml", mlp_model(), samples=2, solver=solver,
        gradient=Implicit(Curvature(kind, block="mean"), cg, stopping="auto"),
    )  # fmt: skip
    together = gradients(learner, batch)
    path = learner.diagnostics.record.solution.path
    assert ((path > 0) & (path < 6)).all()
    assert path[0] != path[1]
    summed = {name: torch.zeros_like(g) for name, g in together.items()}
    for t in range(2):
        own = Implicit(Curvature(kind, block="mean"), cg, stopping=float(1 / (30.0 * path[t])))
        one = replace(
            batch, **{n: getattr(batch, n)[t : t + 1] for n in
                      ("support_x", "support_y", "query_x", "query_y")}, keys=(t,)
        )  # fmt: skip
        for name, g in gradients(learner.replace(gradient=own), one).items():
            summed[name] += g / 2
    for name, g in together.items():
        assert relative(g, summed[name]) <= 1e-8, name


def test_the_rule_is_near_the_steps_own_derivative():
    """One weight, E = h·(v − m)²/2 with E₀ = 0: each step halves the way at least, so the start is
    soon forgotten, and the rule says so."""
    start = torch.tensor([3.0], dtype=F64, requires_grad=True)
    m = torch.tensor(1.0, dtype=F64, requires_grad=True)
    record = Record()
    solver = PolyakDescent(8, 5.0, lowest=0.0)
    v = implicit_solve(
        lambda v, m: 2.0 * ((v - m) ** 2).sum(), start, m, solver=solver, stopping="auto",
        record=record,
    )  # fmt: skip
    v.sum().backward()
    assert float(v.detach()) == pytest.approx(
        1 + 2 * 0.5**8, rel=1e-12
    )  # every step half of the way
    path = 5.0 * float(record.solution.path)
    assert path == pytest.approx(8 / 8)  # steps of 1/(2h), h = 4
    assert float(start.grad) == pytest.approx((1 / path) / (4 + 1 / path))
    assert float(m.grad + start.grad) == pytest.approx(1)


def test_it_is_saved_with_the_learner(tmp_path):
    learner = ibaml.methods.ibaml(
        ibaml.nn.mlp(3, 2), adapt="all", solver=PolyakDescent(4, {"*": 0.3}, lowest=-1.0)
    )
    loaded = ibaml.load(learner.save(tmp_path / "learner.ibaml"))
    assert loaded.solver == learner.solver
