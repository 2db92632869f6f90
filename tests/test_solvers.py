"""Every solver: it minimizes, it says what happened, and one ill task harms no other."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import ibaml
from ibaml import (
    Adam,
    ConjugateGradient,
    Curvature,
    GradientDescent,
    NaturalDescent,
    NewtonCG,
    Reason,
    TaskBatch,
)
from oracles import F64, generator, gradients, relative
from problems import class_batch, mlp_model, plain_learner, regression_batch

SOLVERS = {
    "descent": GradientDescent(3000, 0.3, tol=1e-8),
    "adam": Adam(3000, 0.01, tol=1e-8),
    "newton-ggn": NewtonCG(100, tol=1e-8),
    "newton-energy": NewtonCG(100, tol=1e-8, curvature=Curvature("energy")),
}


def problem(**options):
    learner = plain_learner("ibaml", mlp_model(), init_log_var=-1.0, samples=4, beta=0.5, **options)
    support, _ = learner.problem(class_batch((3,)), 0)
    return support, learner.belief.start(support.meta.prior, 2).detach()


@pytest.mark.parametrize("name", list(SOLVERS))
def test_it_converges_and_says_so(name):
    """A point with a proximal term: smooth, with one minimum near the start."""
    learner = plain_learner("imaml", mlp_model(), lam=0.5)
    energy, _ = learner.problem(class_batch((3,)), 0)
    start = learner.belief.start(energy.meta.prior, 2).detach()
    solution = SOLVERS[name].solve(energy, start)
    assert solution.reason.tolist() == [Reason.CONVERGED] * 2
    assert (solution.steps > 0).all()
    assert (solution.steps < SOLVERS[name].steps).all()
    assert solution.gradient.norm(dim=-1).max() <= 1e-8
    assert (solution.energy_after < solution.energy_before).all()
    reference = SOLVERS["newton-energy"].solve(energy, start).value
    assert relative(solution.value, reference) <= 1e-5


@pytest.mark.parametrize(
    "solver",
    [NaturalDescent(4000, 0.2, tol=1e-9, eta=0.1), NewtonCG(500, tol=1e-9)],
    ids=["natural", "newton-ggn"],
)
def test_gaussian_tasks_converge_in_both_blocks(solver):
    energy, start = problem()
    solution = solver.solve(energy, start)
    assert solution.reason.tolist() == [Reason.CONVERGED] * 2
    n = energy.layout.size
    assert solution.gradient[:, :n].norm() <= 1e-8
    assert solution.gradient[:, n:].norm() <= 1e-8


@pytest.mark.parametrize("solver", [GradientDescent(7), NaturalDescent(7), Adam(7), NewtonCG(2)])
def test_exactly_k_steps_without_a_tolerance(solver):
    energy, start = problem()
    solution = solver.solve(energy, start)
    assert solution.steps.tolist() == [solver.steps] * 2
    assert solution.reason.tolist() == [Reason.STEPS] * 2


def test_newton_decreases_the_energy_at_every_step():
    energy, start = problem()
    values = [NewtonCG(k).solve(energy, start).energy_after for k in range(6)]
    assert all((b <= a + 1e-12).all() for a, b in pairwise(values))


def test_newton_respects_the_trust_region_of_the_log_variances():
    energy, start = problem()
    n = energy.layout.size
    moved = NewtonCG(1, radius=0.25).solve(energy, start).value[:, n:] - start[:, n:]
    assert moved.abs().max() <= 0.25 + 1e-12


def test_the_trust_region_does_not_hold_the_means():
    """Their step is the one without a region, however far the log-variances would go."""
    energy, start = problem()
    n = energy.layout.size
    held, free = (
        NewtonCG(1, radius=radius, halvings=0).solve(energy, start).value - start
        for radius in (0.05, 1e9)
    )
    assert free[:, n:].abs().max() > 0.1
    assert torch.allclose(held[:, :n], free[:, :n], rtol=1e-12, atol=0)
    assert torch.allclose(held[:, n:], free[:, n:].clamp(-0.05, 0.05), rtol=1e-12, atol=0)


@pytest.mark.parametrize("log_var", [-5.0, -3.0, -1.0, 1.0])
def test_newton_solves_heads_of_many_features_from_any_prior(log_var):
    """There the means' own step goes too far, and their log-variances' may not hold them."""
    torch.manual_seed(0)
    learner = ibaml.methods.ibaml(
        nn.Linear(400, 5), adapt="all", samples=4, noise="antithetic", beta=0.002,
        init_log_var=log_var,
        solver=NewtonCG(8, linear_solver=ConjugateGradient(10, tol=0.3), halvings=10),
    )  # fmt: skip
    rng = torch.Generator().manual_seed(0)
    x = torch.rand(4, 5, 400, generator=rng)
    y = torch.arange(5).expand(4, -1)
    solution = learner.adapt_all(ibaml.TaskBatch(x, y, x, y)).solution
    assert solution.reason.tolist() == [Reason.STEPS] * 4
    assert (solution.energy_after < 0.3 * solution.energy_before).all()


def test_step_sizes_by_group():
    energy, start = problem()
    by_group = GradientDescent(1, {"0.*": 0.5, "log_var.*": 0.0 + 1e-12, "*": 0.1})
    _, gradient = ibaml.solve.energy_and_gradient(energy, start)
    moved = by_group.solve(energy, start).value - start
    for name, begin, end in energy.slots:
        rate = 0.5 if name.startswith("0.") else 1e-12 if "log_var" in name else 0.1
        assert torch.allclose(moved[:, begin:end], -rate * gradient[:, begin:end], atol=1e-14)


def test_an_energy_that_blows_up_is_divergence_though_finite():
    energy, start = problem()
    solution = GradientDescent(30, 100.0).solve(energy, start)
    assert solution.value.isfinite().all()
    assert solution.diverged.all()
    assert torch.equal(solution.value, start)
    assert (solution.energy_after > 1e3).all()


def wild_batch() -> TaskBatch:
    """Three regression tasks of which the middle one's targets are enormous."""
    batch = regression_batch(tasks=3)
    y = batch.support_y.clone()
    y[1] *= 1e200
    return TaskBatch(batch.support_x, y, batch.query_x, batch.query_y)


def sound_batch() -> TaskBatch:
    batch = regression_batch(tasks=3)
    return TaskBatch(
        batch.support_x, batch.support_y, batch.query_x, batch.query_y, keys=[0, 1, 2]
    ).select([0, 2])


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1)).to(F64)


@pytest.mark.parametrize("execution", ["loop", "vmap"])
@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("maml", {}),
        ("fomaml", {}),
        ("imaml", {}),
        ("imaml", {"adapt": "head"}),
        ("abml", {"init_log_var": -2.0}),
        ("ibaml", {"init_log_var": -2.0}),
        ("ibaml", {"init_log_var": -2.0, "curvature": "energy", "adapt": "head"}),
        ("reptile", {}),
    ],
)
def test_a_diverging_task_is_contained_and_reported(method, options, execution):
    """Its neighbors' gradient is exactly that of the batch without it."""
    options = {"steps": 6, "lr": 0.1, "execution": execution, **options}
    learner = plain_learner(method, network(), **options)
    actual = gradients(learner, wild_batch())
    assert learner.diagnostics.diverged.tolist() == [False, True, False]
    assert learner.diagnostics.reason[1] in (Reason.NONFINITE, Reason.DIVERGED)
    alone = plain_learner(method, network(), **options)
    expected = gradients(alone, sound_batch())
    for block, g in expected.items():
        assert actual[block].isfinite().all()
        assert relative(actual[block], g) <= 1e-12, block


class Whitening(nn.Module):
    """A network whose own arithmetic breaks on a task without spread."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 3)
        self.head = nn.Linear(3, 1)

    def forward(self, x):
        z = self.body(x)
        return self.head((z - z.mean(0)) / z.std(0))


@pytest.mark.parametrize(
    ("method", "options"),
    [("maml", {}), ("fomaml", {}), ("imaml", {"adapt": "head"}), ("ibaml", {"adapt": "head"})],
)
def test_a_task_the_network_breaks_on_harms_no_other(method, options):
    batch = regression_batch(tasks=3)
    x = batch.query_x.clone()
    x[1] = 1.0
    ill = TaskBatch(batch.support_x, batch.support_y, x, batch.query_y)
    actual, expected = (
        gradients(plain_learner(method, whitening(), **options), tasks)
        for tasks in (ill, sound_batch())
    )
    for block, g in expected.items():
        assert relative(actual[block], g) <= 1e-12, block


def whitening() -> nn.Module:
    torch.manual_seed(0)
    return Whitening().to(F64)


def test_diagnosing_does_not_change_what_is_left_out():
    for lr in (0.1, 5.0, 100.0):
        losses = [
            ibaml.methods.fomaml(network(), steps=8, lr=lr, diagnose=diagnose)(regression_batch())
            for diagnose in (True, False)
        ]
        assert torch.equal(*losses) or torch.stack(losses).isnan().all()


def test_fresh_noise_is_used_in_adaptation_too():
    batch = class_batch((3,))
    means = [
        plain_learner(
            "ibaml",
            mlp_model(),
            solver=GradientDescent(3, 0.1, fresh_noise=fresh),
            init_log_var=-1.0,
        )
        .adapt(batch.support_x[0], batch.support_y[0])
        .mean["0.weight"]
        for fresh in (True, False)
    ]
    assert not torch.equal(*means)


@pytest.mark.parametrize("method", ["maml", "ibaml"])
def test_if_all_diverge_the_loss_is_nan_and_the_gradients_are_zero(method):
    learner = plain_learner(method, network(), steps=6, lr=0.01)
    batch = wild_batch().select([1])
    loss = learner(batch, generator())
    assert loss.isnan()
    loss.backward()
    for p in learner.parameters():
        assert p.grad is None or (p.grad == 0).all()
    with pytest.warns(RuntimeWarning, match="prior"):
        learner.adapt(batch.support_x[0], batch.support_y[0])


def test_negative_curvature_is_reported_and_harms_no_other_task():
    """A loss concave in one task's data: H is indefinite there, and only there."""

    def loss(outputs, y):
        return (y * outputs.square()).sum(-1)  # y < 0 bends downwards

    x = torch.ones(2, 3, 1, dtype=F64)
    y = torch.ones(2, 3, 1, dtype=F64)
    y[1] = -5.0
    net = nn.Linear(1, 1, bias=False).to(F64)
    learner = plain_learner("imaml", net, lam=1.0, likelihood=loss, steps=1, lr=0.01)
    batch = TaskBatch(x, y, x, torch.ones_like(y))
    learner(batch).backward()
    assert learner.diagnostics.negative_curvature.tolist() == [False, True]
    assert net.weight.grad.isfinite().all()
    # the ill task adds nothing (its solve stopped at zero), the sound one its exact gradient
    w = learner.diagnostics.record.solution.value[0, 0]
    expected = 2 * w / (1 + 2) / 2  # λ/(H)·∇₁L, averaged over two tasks
    assert net.weight.grad.item() == pytest.approx(float(expected), rel=1e-12)


def test_diagnostics_are_handed_out_without_waiting_for_the_device():
    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func.overloadpacket)
            return func(*args, **(kwargs or {}))

    seen: list[Any] = []
    learner = plain_learner("ibaml", mlp_model())
    learner(class_batch((3,))).backward()
    with Watch():
        held = learner.diagnostics
    waits = {torch.ops.aten._local_scalar_dense, torch.ops.aten.nonzero, torch.ops.aten._to_copy}
    assert not waits & set(seen)
    with Watch():
        assert int(held.steps[0]) == 5
    assert waits & set(seen)


def test_diagnostics_tell_the_story():
    learner = plain_learner("ibaml", mlp_model(), init_log_var=-3.0, cg_steps=5)
    with pytest.raises(RuntimeError, match="call the learner"):
        _ = learner.diagnostics
    batch = class_batch((3,))
    loss = learner(batch, generator())
    before = learner.diagnostics
    assert before.cg_residual is None
    table = str(before)
    loss.backward()
    assert before.cg_residual is None  # what was handed out does not change
    assert before.record.linear is None
    assert str(before) == table
    d = learner.diagnostics
    assert d.energy_after.shape == d.energy_before.shape == (2,)
    assert set(d.gradient_norm) == {"mean", "log_var"}
    assert d.cg_steps.tolist() == [5, 5]
    assert (d.cg_residual < 1).all()
    assert d.steps.tolist() == [5, 5]
    assert not d.diverged.any()
    assert not d.negative_curvature.any()
    text = str(d)
    assert "CG residual" in text
    assert len(text.splitlines()) == 3
    learner(class_batch((3,), seed=3), generator()).backward()
    assert str(d) == text
    assert str(learner.diagnostics) != text
    learner = learner.replace(diagnose=False)
    learner(batch).backward()
    assert learner.diagnostics.gradient_norm is None
    assert str(learner.diagnostics)
