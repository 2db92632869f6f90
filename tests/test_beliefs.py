"""Other beliefs than the diagonal Gaussian, and a learned β: gradients against finite differences
of the re-solved problem and dense matrices, and everything a learner does with them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import ibaml
from ibaml import (
    Curvature,
    Dense,
    DiagonalGaussian,
    FirstOrder,
    Gaussian,
    GradientDescent,
    Implicit,
    LowRankGaussian,
    MetaLearner,
    NaturalDescent,
    NewtonCG,
    Point,
    Reptile,
    Unrolled,
)
from ibaml.linalg import dense_matrix
from oracles import (
    F64,
    converged,
    dense_gradients,
    finite_difference_errors,
    five_point,
    generator,
    gradients,
    relative,
    seed,
    smallest_eigenvalue,
)
from problems import class_batch, linear_model, mlp_model, regression_batch
from triangular import FullGaussian

EXACT = NewtonCG(100, tol=1e-13, curvature=Curvature("energy"), linear_solver=Dense())
BELIEFS = {
    "diagonal": DiagonalGaussian(),
    "rank 1": LowRankGaussian(1),
    "rank 2": LowRankGaussian(2),
    "triangular": FullGaussian(),
}


def learner(belief, model=None, gradient=None, **options):
    options = {"samples": 12, "init_log_var": 0.0, **options}
    gradient = gradient or Implicit(Curvature("energy"), Dense())
    options.setdefault("solver", replace(converged(), tol=1e-13))
    made = MetaLearner(
        linear_model() if model is None else model, belief, gradient=gradient, **options
    )
    rng = torch.Generator().manual_seed(4)
    with torch.no_grad():  # a prior like any other: correlated, and of different scales
        for name, group in made.named_children():
            if isinstance(group, nn.ParameterDict) and name != "tied_mean":
                for p in group.values():
                    p.add_(0.4 * torch.randn(p.shape, generator=rng, dtype=p.dtype))
    return made


CASES = [*((name, "linear") for name in BELIEFS), ("diagonal", "head"), ("rank 1", "head")]


@pytest.mark.parametrize(("name", "problem"), CASES)
def test_implicit_gradients_equal_finite_differences_of_the_resolved_problem(name, problem):
    if problem == "linear":
        model, batch, adapt = linear_model(), regression_batch().select([1]), "all"
        likelihood = Gaussian(0.5, learn=True)
    else:
        model, batch = mlp_model(ways=2), class_batch((3,), tasks=1, ways=2)
        adapt, likelihood = "head", None
    made = learner(
        BELIEFS[name], model, adapt=adapt, likelihood=likelihood, beta=2.0, learn_beta=True
    )
    found = gradients(made, batch)
    assert made.diagnostics.record.solution.gradient.norm(dim=-1).max() <= 1e-12
    assert smallest_eigenvalue(made, batch) > 0
    dense = dense_gradients(made, batch)
    for block, g in found.items():
        assert relative(g, dense[block]) <= 1e-9, block
    errors = finite_difference_errors(made, batch, solver=EXACT)
    assert {"m", "beta"} < set(errors)
    assert max(errors.values()) <= 1e-6, errors


@pytest.mark.parametrize("kind", ["ggn", "energy"])
def test_damping_enters_the_gradient_of_beta_and_of_every_prior(kind):
    """u solves (C + (1+μ)P)u = b, and both take (1+μ) times the penalty's product with u."""
    made = learner(
        LowRankGaussian(1), solver=GradientDescent(3, 0.01), learn_beta=True,
        gradient=Implicit(Curvature(kind, damping=0.7), Dense()),
    )  # fmt: skip
    batch = regression_batch(tasks=1)
    found = gradients(made, batch)
    support, query = made.problem(batch, seed())
    v = made.diagnostics.record.solution.value.requires_grad_()
    theta = tuple(t.detach().requires_grad_() for t in support.theta)
    (b,) = torch.autograd.grad(query.loss(v).sum(), v)
    bare = dense_matrix(Curvature(kind).at(support, v.detach()).product, v)
    penalty = dense_matrix(support.precision(v).product, v)
    u = torch.linalg.solve(bare + 0.7 * penalty, b[..., None])[..., 0]
    energy = support.bind(theta)
    (slope,) = torch.autograd.grad(energy.penalty(v).sum(), v, create_graph=True)
    oracle = torch.autograd.grad(slope, theta, -1.7 * u, allow_unused=True)
    assert relative(found["beta"], oracle[-1]) <= 1e-9
    assert relative(found["factor_1"], oracle[2]) <= 1e-9
    assert relative(found["rho"], oracle[1]) <= 1e-9


def test_lemma_has_the_gradient_of_beta_too():
    options = {"beta": 0.5, "learn_beta": True, "samples": 4}
    exact = learner(DiagonalGaussian(), **options)
    lemma = learner(DiagonalGaussian(), gradient=Implicit(Curvature("lemma"), Dense()), **options)
    batch = regression_batch(tasks=1)
    for block, g in gradients(exact, batch).items():
        assert relative(gradients(lemma, batch)[block], g) <= 1e-8, block


def test_a_learned_beta_has_its_gradient_unrolled():
    made = learner(
        DiagonalGaussian(), solver=GradientDescent(3, 0.02), gradient=Unrolled(), learn_beta=True
    )
    batch = regression_batch(tasks=1)
    found = gradients(made, batch)["beta"]
    slope = five_point(
        lambda: float(made(batch, generator()).detach()),
        [made.log_beta], torch.ones(1, dtype=F64), 1e-3,
    )  # fmt: skip
    assert float(found) == pytest.approx(slope, rel=1e-8)


@pytest.mark.parametrize(
    ("belief", "gradient", "words"),
    [
        (DiagonalGaussian(), FirstOrder(), "learn_beta: beta has gradient zero under FirstOrder"),
        (DiagonalGaussian(), Reptile(), "learn_beta: beta has gradient zero under Reptile"),
        (Point(lam=1.0), Unrolled(), "learn_beta: the energy of Point.* does not depend on beta"),
    ],
)
def test_a_learned_beta_is_refused_where_its_gradient_is_zero(belief, gradient, words):
    with pytest.raises(ValueError, match=words):
        learner(belief, gradient=gradient, solver=GradientDescent(2), learn_beta=True)


def test_a_learned_beta_is_not_replaced():
    made = learner(DiagonalGaussian(), learn_beta=True)
    with pytest.raises(ValueError, match="beta is learned here"):
        made.replace(beta=0.1)
    with pytest.raises(ValueError, match="learn_beta"):
        made.replace(gradient=FirstOrder())
    assert made.replace(samples=2).log_beta is made.log_beta


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"gradient": Implicit(Curvature("lemma"))}, "diagonal Gaussian"),
        ({"solver": NaturalDescent()}, "diagonal Gaussian"),
        ({"objective": ibaml.Abml()}, "diagonal Gaussian"),
    ],
)
def test_what_only_a_diagonal_gaussian_can_do_is_refused(options, words):
    with pytest.raises(ValueError, match=words):
        learner(LowRankGaussian(1), **options)


def test_a_belief_without_rows_is_refused_for_a_tied_head():
    with pytest.raises(ValueError, match="tie_head: factor of FullGaussian"):
        learner(FullGaussian(), mlp_model(), adapt="head", tie_head=True)


def test_the_mean_block_is_the_mean_of_any_belief():
    made = learner(LowRankGaussian(2))
    support, _ = made.problem(regression_batch(tasks=1), 1)
    v = made.belief.start(support.meta.prior, 1).detach()
    h = Curvature("energy", block="mean").at(support, v)
    c = dense_matrix(h.product, v) - dense_matrix(support.precision(v).product, v)
    assert c[:, :4, :4].abs().max() > 0
    c[:, :4, :4] = 0
    assert c.abs().max() <= 1e-12


def test_low_rank_files_and_tied_heads(tmp_path):
    """Any number of classes, and the same predictions from files."""
    made = ibaml.methods.ibaml(
        ibaml.nn.mlp(3, 3, hidden=(4,)), belief=LowRankGaussian(2), adapt="head", tie_head=True,
        learn_beta=True, samples=4, solver=NewtonCG(3),
    )  # fmt: skip
    batch = class_batch((3,), ways=5).to(torch.float32)
    made(batch).backward()
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in made.parameters())
    names = {n.split(".")[0] for n, _ in made.named_parameters()}
    assert {"tied_mean", "log_var", "factor_1", "factor_2", "log_beta"} <= names
    norms = made.diagnostics.gradient_norm
    assert set(norms) == {"mean", "log_var", "factor_1", "factor_2"}
    posterior = made.adapt(batch.support_x[0], batch.support_y[0])
    expected = posterior.predict_proba(batch.query_x[0])
    posterior.save(tmp_path / "posterior.ibaml")
    again = ibaml.load_posterior(tmp_path / "posterior.ibaml")
    torch.testing.assert_close(again.predict_proba(batch.query_x[0]), expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(again.log_var, posterior.log_var)
    made.save(tmp_path / "learner.ibaml")
    loaded = ibaml.load(tmp_path / "learner.ibaml")
    assert loaded.belief == LowRankGaussian(2)
    torch.testing.assert_close(loaded.state_dict(), made.state_dict(), rtol=0, atol=0)


def test_log_var_is_the_variance_of_draws():
    made = learner(LowRankGaussian(1))
    batch = regression_batch(tasks=1)
    posterior = made.adapt(batch.support_x[0], batch.support_y[0])
    (log_var,) = posterior.log_var.values()
    (draws,) = posterior.sample(20_000).values()
    torch.testing.assert_close(draws.var(0), log_var.exp(), rtol=0.05, atol=0)
