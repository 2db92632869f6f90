"""HeadNewton against other optimizers, dense matrices and finite differences, all in float64."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import pairwise

import numpy as np
import pytest
import scipy.optimize
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import ibaml
from ibaml import (
    Categorical,
    Curvature,
    DiagonalGaussian,
    Gaussian,
    Implicit,
    MetaLearner,
    NewtonCG,
)
from ibaml.energy import TaskEnergy, detached
from ibaml.heads.by_moments import by_moments, placed, softmax_by_moments
from ibaml.heads.points import axis_points, gaussian_points
from ibaml.linalg import ConjugateGradient, Reason, dense_matrix
from ibaml.objectives import PredictiveNll
from ibaml.solve import HeadNewton, energy_and_gradient
from ibaml.solve import head as module
from oracles import F64, exact_cg, finite_difference_errors
from problems import class_batch, regression_batch

EXACT = HeadNewton(60, tol=1e-13, linear_solver=ConjugateGradient(400, tol=1e-8))


@pytest.fixture(params=["dual", "cg"])
def way(request, monkeypatch):
    """Both ways of solving the Newton equation."""
    if request.param == "cg":
        monkeypatch.setattr(module, "_FEW", 0)
    return request.param


def head_learner(model: nn.Module, **options) -> MetaLearner:
    plain = {
        "solver": EXACT,
        "gradient": Implicit(Curvature("energy"), exact_cg()),
        "objective": PredictiveNll(16),
        "adapt": "head",
        "noise": "outputs",
        "samples": 8,
        "beta": 0.3,
        "init_log_var": -1.0,
    }
    return MetaLearner(model.double(), DiagonalGaussian(), **{**plain, **options})


def classifier(bias: bool = True) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 3, bias=bias))


def regressor() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))


def log_cosh(outputs: Tensor, y: Tensor) -> Tensor:
    """A convex loss that is neither of labels nor of Gaussian noise."""
    z = (outputs - y).abs()
    return (z + (-2 * z).exp().log1p()).sum(-1)


KINDS = {
    "labels": lambda: (head_learner(classifier()), class_batch()),
    "labels, no bias": lambda: (head_learner(classifier(bias=False)), class_batch()),
    "labels, weight alone": lambda: (
        head_learner(classifier(), adapt=["2.weight"]),
        class_batch(),
    ),
    "a weak prior": lambda: (head_learner(classifier(), beta=0.003), class_batch(shots=5)),
    "numbers": lambda: (head_learner(regressor(), likelihood=Gaussian(0.4)), regression_batch()),
    "a callable": lambda: (head_learner(regressor(), likelihood=log_cosh), regression_batch()),
}


def problem(learner: MetaLearner, batch: ibaml.TaskBatch) -> tuple[TaskEnergy, Tensor]:
    energy, _ = learner.problem(batch, 0)
    assert energy.points is not None
    return detached(energy), learner.belief.start(energy.meta.prior, len(batch)).detach()


def one_task(energy: TaskEnergy, t: int) -> TaskEnergy:
    return replace(energy, x=energy.x[t : t + 1], y=energy.y[t : t + 1])


@pytest.mark.parametrize("kind", KINDS)
def test_the_solution_is_that_of_another_optimizer(kind, way):
    """SciPy's trust-region Newton method on the dense energy in (m, log σ), from the start."""
    learner, batch = KINDS[kind]()
    energy, start = problem(learner, batch)
    solution = EXACT.solve(energy, start)
    assert solution.reason.tolist() == [int(Reason.CONVERGED)] * len(batch)
    assert int(solution.steps.max()) <= 20
    for t in range(len(batch)):
        one = one_task(energy, t)

        def value(p, one=one):
            return float(one(torch.from_numpy(p)[None]))

        def slope(p, one=one):
            return energy_and_gradient(one, torch.from_numpy(p)[None])[1][0].numpy()

        def hessian(p, one=one):
            h = torch.autograd.functional.hessian(
                lambda v: one(v[None]).sum(), torch.from_numpy(p.copy())
            )
            return h.numpy()

        found = scipy.optimize.minimize(
            value, start[t].numpy(), jac=slope, hess=hessian, method="trust-exact",
            options={"gtol": 1e-10, "maxiter": 500},
        )  # fmt: skip
        at = found.x - np.linalg.solve(hessian(found.x), slope(found.x))  # to rounding
        assert np.abs(solution.value[t].numpy() - at).max() <= 1e-8


@pytest.mark.parametrize("kind", ["labels", "labels, weight alone", "numbers"])
def test_the_meta_gradient_against_finite_differences(kind, way):
    learner, batch = KINDS[kind]()
    errors = finite_difference_errors(learner, batch)
    assert set(errors) >= {"m", "rho", "shared"}
    assert max(errors.values()) <= 1e-6, errors


def test_the_meta_gradient_in_a_learned_temperature_and_noise():
    learned = head_learner(classifier(), likelihood=Categorical("learned"), learn_beta=True)
    errors = finite_difference_errors(learned, class_batch())
    assert max(errors.values()) <= 1e-6, errors
    noisy = head_learner(regressor(), likelihood=Gaussian(0.4, learn=True))
    errors = finite_difference_errors(noisy, regression_batch())
    assert max(errors.values()) <= 1e-6, errors


@pytest.mark.parametrize("kind", KINDS)
def test_the_newton_equation_is_the_dense_one(kind):
    """(D + JᵀBJ) against a Hessian by autograd in (m, σ), away from the solution."""
    learner, batch = KINDS[kind]()
    energy, start = problem(learner, batch)
    rng = torch.Generator().manual_seed(4)
    v = start + 0.3 * torch.randn(start.shape, generator=rng, dtype=F64)
    heads = module._Heads(energy)
    at = heads.at(v)
    value, slope = energy_and_gradient(energy, v)
    assert torch.allclose(at.value, value, rtol=1e-12)
    assert torch.allclose(at.gradient, slope, atol=1e-12)
    diagonal = heads.diagonal(at)

    def product(u):
        return heads.pulled(at, at.curved(heads.seen(at, u))) + diagonal * u

    found = dense_matrix(product, v)
    n = heads.n
    for t in range(len(v)):
        sigma = (v[t, n:] / 2).exp()

        def in_sigma(p, t=t):
            return one_task(energy, t)(torch.cat([p[:n], 2 * p[n:].log()])[None]).sum()

        h = torch.autograd.functional.hessian(in_sigma, torch.cat([v[t, :n], sigma]))
        scale = torch.cat([torch.ones(n, dtype=F64), sigma])  # δσ = σt
        assert torch.allclose(found[t], scale[:, None] * h * scale, atol=1e-10)
    gradient = heads.in_t(at.gradient)
    exact = -torch.linalg.solve(found, gradient)
    assert torch.allclose(heads.exact_step(at, diagonal, gradient), exact, atol=1e-9)


def test_the_implicit_rules_h_is_definite_at_the_solution():
    learner, batch = KINDS["a weak prior"]()
    energy, start = problem(learner, batch)
    solution = EXACT.solve(energy, start)
    h = dense_matrix(Curvature("energy").at(energy, solution.value).product, start)
    assert torch.linalg.eigvalsh((h + h.mT) / 2).min() > 0


@pytest.mark.parametrize("scale", [3.0, 30.0])
def test_a_prior_that_is_sure_and_wrong_is_left_in_few_steps(scale, way):
    """Where probabilities are 0 and 1 full Newton steps go much too far."""
    model = classifier()
    with torch.no_grad():
        model[2].weight.mul_(scale)
    energy, start = problem(head_learner(model, beta=0.01), class_batch(shots=5))
    solution = HeadNewton(40).solve(energy, start)
    assert solution.reason.tolist() == [int(Reason.CONVERGED)] * 2
    exact = EXACT.solve(energy, start)
    assert torch.allclose(solution.energy_after, exact.energy_after, atol=1e-5)


def test_the_energy_falls_at_every_step(way):
    energy, start = problem(*KINDS["a weak prior"]())
    values = [HeadNewton(k, tol=None).solve(energy, start).energy_after for k in range(8)]
    for before, after in pairwise(values):
        assert (after < before).all()


def test_it_stops_at_its_tolerance_and_says_so():
    energy, start = problem(*KINDS["labels"]())
    first = energy_and_gradient(energy, start)[1].norm(dim=-1)
    for tol in (1e-2, 1e-6):
        solution = HeadNewton(30, tol=tol).solve(energy, start)
        assert (solution.gradient.norm(dim=-1) <= tol * first).all()
        assert solution.reason.tolist() == [int(Reason.CONVERGED)] * 2
        fewer = HeadNewton(int(solution.steps.max()) - 1, tol=tol).solve(energy, start)
        assert int(Reason.STEPS) in fewer.reason.tolist()


def test_single_precision_reaches_rounding():
    model = classifier().float()
    learner = MetaLearner(
        model, DiagonalGaussian(), HeadNewton(30, tol=1e-12), Implicit(), adapt="head",
        noise="outputs", beta=0.3, init_log_var=-1.0, samples=8,
    )  # fmt: skip
    energy, start = problem(learner, class_batch().to(torch.float32))
    solution = learner.solver.solve(energy, start)
    first = energy_and_gradient(energy, start)[1].norm(dim=-1)
    assert (solution.gradient.norm(dim=-1) <= 1e-5 * first).all()
    assert not solution.diverged.any()


def test_the_order_of_examples_and_of_tasks_does_not_matter(way):
    learner, batch = KINDS["labels"]()
    energy, start = problem(learner, batch)
    solution = HeadNewton().solve(energy, start).value
    turned = replace(energy, x=energy.x.flip(1), y=energy.y.flip(1))
    assert torch.allclose(HeadNewton().solve(turned, start).value, solution, atol=1e-10)
    swapped = replace(energy, x=energy.x.flip(0), y=energy.y.flip(0))
    assert torch.allclose(HeadNewton().solve(swapped, start).value.flip(0), solution, atol=1e-10)


@pytest.mark.parametrize("bad", [float("inf"), float("nan"), 1e200])
def test_a_task_of_infinite_features_is_contained(bad, way):
    torch.manual_seed(0)
    learner = head_learner(nn.Linear(3, 3), adapt="all")
    batch = class_batch(tasks=3)
    energy, start = problem(learner, batch)
    x = energy.x.clone()
    x[1, 0, 0] = bad
    healthy = HeadNewton().solve(energy, start)
    solution = HeadNewton().solve(replace(energy, x=x), start)
    assert solution.diverged.tolist() == [False, True, False]
    assert torch.equal(solution.value[1], start[1])
    for t in (0, 2):
        assert torch.allclose(solution.value[t], healthy.value[t], atol=1e-10)


def test_examples_without_features_are_no_problem(way):
    torch.manual_seed(0)
    learner = head_learner(nn.Linear(3, 3, bias=False), adapt="all")
    batch = class_batch()
    x = batch.support_x.clone()
    x[:, 0] = 0
    batch = ibaml.TaskBatch(x, batch.support_y, batch.query_x, batch.query_y)
    energy, start = problem(learner, batch)
    assert HeadNewton().solve(energy, start).reason.tolist() == [int(Reason.CONVERGED)] * 2
    learner(batch).backward()
    assert not learner.diagnostics.diverged.any()
    assert all(p.grad.isfinite().all() for p in learner.parameters())


def test_the_learner_adapts_with_it():
    batch = class_batch()
    learner = head_learner(classifier(), solver=HeadNewton())
    other = learner.replace(solver=NewtonCG(60, tol=1e-10, curvature=Curvature("energy")))
    x, y = batch.support_x[0], batch.support_y[0]
    mine, theirs = (one.adapt(x, y).predict_proba(batch.query_x[0]) for one in (learner, other))
    assert torch.allclose(mine, theirs, atol=1e-4)


def test_a_saved_learner_has_it(tmp_path):
    batch = class_batch()
    model = ibaml.nn.mlp(3, 3, hidden=(6,), activation="tanh")
    learner = head_learner(model, solver=HeadNewton(9, tol=1e-7))
    loaded = ibaml.load(learner.save(tmp_path / "one.ibaml"))
    assert loaded.solver == learner.solver
    x, y = batch.support_x[0], batch.support_y[0]
    mine, theirs = (one.adapt(x, y).predict_proba(batch.query_x[0]) for one in (learner, loaded))
    assert torch.equal(mine, theirs)


def test_what_it_does_not_solve_is_refused_by_name():
    model = classifier()
    with pytest.raises(ValueError, match="HeadNewton needs a diagonal Gaussian"):
        MetaLearner(model, ibaml.LowRankGaussian(), HeadNewton(), Implicit(), noise="outputs")
    with pytest.raises(ValueError, match='noise="outputs"'):
        MetaLearner(model, DiagonalGaussian(), HeadNewton(), Implicit(), adapt="head")
    with (
        pytest.warns(RuntimeWarning, match="antithetic"),
        pytest.raises(ValueError, match="HeadNewton needs noise"),
    ):
        head_learner(classifier(), adapt="all")(class_batch())
    with pytest.raises(ValueError, match="steps"):
        HeadNewton(-1)
    with pytest.raises(ValueError, match="tol"):
        HeadNewton(tol=0.0)
    with pytest.raises(ValueError, match="unrolled"):
        head_learner(classifier(), gradient=ibaml.Unrolled())


# --- the loss by moments of outputs --------------------------------------------------------------


def moments_and_labels(classes: int = 3) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(6)
    mean = 2 * torch.randn(2, 4, classes, generator=rng, dtype=F64)
    variance = torch.randn(2, 4, classes, generator=rng, dtype=F64).exp()
    labels = torch.randint(0, classes, (2, 4), generator=rng)
    return torch.cat([mean, variance], -1), labels


def cross_entropy(outputs: Tensor, labels: Tensor) -> Tensor:
    return -outputs.log_softmax(-1).mean(2).gather(-1, labels[..., None])[..., 0].mean(-1)


@pytest.mark.parametrize("points", [axis_points(3, F64), gaussian_points(16, 3, F64)])
def test_derivatives_by_moments_against_autograd(points):
    moments, labels = moments_and_labels()
    loss = partial(cross_entropy, labels=labels)
    for found in (
        softmax_by_moments(labels, moments, points),
        by_moments(loss, moments, points),
    ):
        for t in range(2):

            def one(x, t=t):
                full = moments.clone()
                full[t] = x
                return loss(placed(full, points))[t]

            value = one(moments[t])
            slope = torch.autograd.functional.jacobian(one, moments[t])
            dense = torch.autograd.functional.hessian(one, moments[t])
            assert torch.allclose(found.value[t], value, rtol=1e-12)
            assert torch.allclose(found.slope[t], slope, atol=1e-12)
            for n in range(4):
                assert torch.allclose(found.curvature[t, n], dense[n, :, n], atol=1e-10)


@settings(max_examples=50)
@given(st.integers(0, 2**31), st.floats(0.05, 0.95), st.floats(-2, 2))
def test_the_energy_is_convex_along_segments_in_mean_and_standard_deviation(seed, part, log_size):
    learner, batch = _CONVEX
    energy, _ = problem(learner, batch)
    n = energy.layout.size
    rng = torch.Generator().manual_seed(seed)
    draw = partial(torch.randn, len(batch), n, generator=rng, dtype=F64)
    size = 10**log_size
    means, sigmas = [size * draw() for _ in range(2)], [draw().exp() for _ in range(2)]

    def at(share: float) -> Tensor:
        mean, sigma = (a + share * (b - a) for a, b in (means, sigmas))
        return energy(torch.cat([mean, 2 * sigma.log()], -1))

    chord = (1 - part) * at(0.0) + part * at(1.0)
    assert (at(part) <= chord + 1e-12 * chord.abs()).all()


_CONVEX = KINDS["labels"]()
