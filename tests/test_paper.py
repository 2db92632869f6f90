"""What is right in the paper's mathematics, what is right under a condition, and what is not.

Everything here is in float64 and against something that shares no code with what is tested: plain
autograd on the formulas as they are printed. See docs/paper.md for the derivations.
"""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from ibaml import (
    ConjugateGradient,
    Curvature,
    Dense,
    GradientDescent,
    Implicit,
    NewtonCG,
    Reason,
    TaskBatch,
)
from ibaml.energy import detached
from ibaml.linalg import dense_matrix
from ibaml.paper.gradients import terms
from ibaml.paper.gradients.linear import LinearTest, optimum
from ibaml.paper.gradients.rules import implicit_gradient, slope_at, start_of
from ibaml.paper.gradients.theorems import Constants
from ibaml.tasks import LinearRegression
from oracles import F64, gradients, relative
from problems import plain_learner


def elbo(v: Tensor, m: Tensor, rho: Tensor, x: Tensor, y: Tensor, sigma: float) -> Tensor:
    """The paper's task loss, L_tr + KL, for the linear model, as printed."""
    m_t, d_t = v[: len(m)], v[len(m) :].exp()
    nll = ((y - x @ m_t).square().sum() + (x.square() @ d_t).sum()) / (2 * sigma**2)
    d = rho.exp()
    return nll + ((d_t / d - 1 + (m - m_t).square() / d + rho - v[len(m) :]) / 2).sum()


def minimized(m: Tensor, rho: Tensor, x: Tensor, y: Tensor, sigma: float) -> Tensor:
    """The minimum of the ELBO by Newton's method, from dense Hessians."""
    v = torch.cat([m, torch.full_like(rho, -3.0)])
    for _ in range(50):
        v = v.detach().requires_grad_()
        (g,) = torch.autograd.grad(elbo(v, m, rho, x, y, sigma), v)
        h = torch.autograd.functional.hessian(lambda p: elbo(p, m, rho, x, y, sigma), v)
        step = torch.linalg.solve(h, g)
        v = v.detach() - step / max(1.0, float(step.abs().max()))
    assert g.norm() <= 1e-6  # of terms as large as 1e4
    return v


def linear_task(seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor, float]:
    """A prior of several means and variances, and the support set of Figure 1."""
    test = LinearTest()
    batch = test.batch(0, seed)
    rng = torch.Generator().manual_seed(seed)
    m, rho = torch.randn(2, test.dimension, generator=rng, dtype=F64)
    return m, rho, batch.support_x[0], batch.support_y[0, :, 0], test.noise


@pytest.mark.parametrize("seed", [0, 1])
def test_the_variance_of_the_linear_optimum_has_no_one_half(seed):
    """The mean's formula is right; the variance's prints 1/(2σ²) where 1/σ² is."""
    m, rho, x, y, sigma = linear_task(seed)
    solution = minimized(m, rho, x, y, sigma)
    m_t, d_t = optimum(x, y, sigma, m, rho)
    assert relative(solution[:32], m_t) <= 1e-9
    assert relative(solution[32:].exp(), d_t) <= 1e-9
    printed = 1 / ((x.T @ x).diagonal() / (2 * sigma**2) + (-rho).exp())
    assert 0.8 < relative(printed, d_t) < 1.0
    # the mean-field optimum of a Gaussian posterior is the inverse of its precision's diagonal
    precision = x.T @ x / sigma**2 + torch.diag((-rho).exp())
    assert relative(1 / precision.diagonal(), d_t) <= 1e-14


def lemma_problem(steps: tuple[int, ...] = (0, 3)) -> terms.Problem:
    return terms.linear_problem(terms.Settings(dimension=6, steps=steps), 0)


def lemma_jacobian(problem: terms.Problem, v: Tensor) -> Tensor:
    """G·H⁻¹ in (m, d), rows θ and columns v_t as in the paper."""
    h = terms.local_terms_at(problem, v).h
    return terms.mixed_matrix(problem, v) @ torch.linalg.inv(h)


def test_lemma_1_is_the_jacobian_at_the_optimum():
    problem = lemma_problem()
    batch = LinearTest(dimension=6, support=6).batch(0, 0)
    x, y = batch.support_x[0], batch.support_y[0, :, 0]

    def solution(theta: Tensor) -> Tensor:  # in (m, d)
        m, d = theta.chunk(2)
        return torch.cat(optimum(x, y, 0.01, m, d.log()))

    theta = torch.cat([torch.zeros(6, dtype=F64), torch.ones(6, dtype=F64)])
    oracle = torch.autograd.functional.jacobian(solution, theta).T
    assert relative(lemma_jacobian(problem, problem.optimum), oracle) <= 1e-10


def test_lemma_1_away_from_the_optimum_differs_from_the_energy_in_one_block():
    """Its G has −∇_m ℓ/d where the energy has κ(m_t − m)/d²; the two agree where ∇E = 0."""
    problem = lemma_problem()
    for v, stationary in ((problem.trajectory[3], False), (problem.optimum, True)):
        support = detached(problem.support)
        energy = Curvature("energy").at(support, v, [0, 1])
        columns = []
        for unit in torch.eye(12, dtype=F64):
            u = unit.clone()
            u[6:] /= v[0, 6:].exp()  # ∂/∂d is ∂/∂ρ over d_t
            gradient = torch.cat([g.detach() for g in energy.pull_back(u[None])])
            columns.append(problem.in_variance(gradient))
        g_energy = 6 * torch.stack(columns, -1)
        gap = terms.mixed_matrix(problem, v) - g_energy
        m_t = v[0, :6]  # the prior mean is 0 and its variance 1
        expected = torch.zeros(12, 12, dtype=F64)
        expected[6:, :6] = torch.diag(-terms.local_terms_at(problem, v).slope[:6] - m_t)
        assert (gap - expected).abs().max() <= 1e-9 * g_energy.abs().max()
        size = float(expected.abs().max())
        assert size <= 1e-9 if stationary else size > 1


def test_the_linear_lemma_gradient_does_not_feel_the_tasks_variances():
    """Why its error falls faster than ε: H, G and b are free of d_t where L_tr is linear in it."""
    problem = lemma_problem()
    v = problem.trajectory[3]
    moved = torch.cat([v[:, :6], v[:, 6:] + 0.7], -1)

    def gradient(kind: str, at: Tensor) -> Tensor:
        b = slope_at(problem.support, problem.query, at)
        return implicit_gradient(problem.support, at, b, Curvature(kind), Dense())

    assert relative(gradient("lemma", moved), gradient("lemma", v)) <= 1e-10
    assert relative(gradient("energy", moved), gradient("energy", v)) > 1e-3


def test_the_hessian_in_log_variances_has_a_first_order_term():
    """H_ρ = d·H_d·d + diag(d·∇_d): the paper's remark on log d is of first order only."""
    problem = lemma_problem()
    v = problem.trajectory[3]
    local = terms.local_terms_at(problem, v)
    support = detached(problem.support)
    h = Curvature("energy").at(support, v)
    in_rho = 6 * (dense_matrix(h.product, v)[0] - torch.diag(h.diagonal[0]))[6:, 6:]
    d = v[0, 6:].exp()
    scaled = d[:, None] * local.hessian[6:, 6:] * d
    assert relative(in_rho, scaled + torch.diag(d * local.slope[6:])) <= 1e-9
    assert relative(in_rho, scaled) > 0.5


def quartic(outputs: Tensor, y: Tensor) -> Tensor:
    """w⁴/4 − w²/2 on the support set (y = 0), w itself on the query set (y = 1)."""
    w = outputs[:, 0]
    return torch.where(y[:, 0] > 0, w, w**4 / 4 - w**2 / 2)


class TestSingular:
    """One weight w, its prior mean θ, prior precision 1: E = w⁴/4 − w²/2 + (w − θ)²/2 has the
    minimum w = θ^(1/3), and E″ = 0 at θ = 0."""

    def learner(self, theta: float, solver, linear_solver=None) -> tuple:
        model = nn.Linear(1, 1, bias=False).to(F64)
        nn.init.constant_(model.weight, theta)
        one, zero = torch.ones(1, 1, 1, dtype=F64), torch.zeros(1, 1, 1, dtype=F64)
        rule = Implicit(Curvature("energy"), linear_solver or Dense())
        learner = plain_learner(
            "imaml", model, lam=1.0, solver=solver, gradient=rule, likelihood=quartic
        )
        return learner, TaskBatch(one, zero, one, one)

    def solution(self, theta: float) -> float:
        newton = NewtonCG(steps=100, tol=1e-14, curvature=Curvature("energy"))
        learner, batch = self.learner(theta, newton)
        return float(learner.adapt(batch.support_x[0], batch.support_y[0]).mean["weight"])

    def test_the_solution_has_no_derivative(self):
        """The difference quotient grows as h^(−2/3): there is no gradient, nor a set of them."""
        quotients = []
        for h in (1e-2, 1e-4, 1e-6):
            w = self.solution(h)
            assert w == pytest.approx(h ** (1 / 3), rel=1e-6)
            quotients.append(w / h)
        for before, after in pairwise(quotients):
            assert after / before == pytest.approx(100 ** (2 / 3), rel=1e-3)

    @pytest.mark.parametrize("linear_solver", [Dense(), ConjugateGradient(5)])
    def test_it_is_reported_and_the_gradient_is_the_minimum_norm_one(self, linear_solver):
        """Remark 1's set {G(H†b + u)} is all of ℝ here; H†b is its smallest element."""
        learner, batch = self.learner(0.0, GradientDescent(3), linear_solver)
        assert gradients(learner, batch)["m"].tolist() == [0.0]
        linear = learner.diagnostics.record.linear
        assert int(linear.reason[0]) == Reason.SINGULAR
        assert float(linear.residual[0]) == 1.0

    def test_next_to_it_the_gradient_is_right_and_large(self):
        newton = NewtonCG(steps=100, tol=1e-14, curvature=Curvature("energy"))
        learner, batch = self.learner(1e-3, newton)
        assert float(gradients(learner, batch)["m"]) == pytest.approx(100 / 3, rel=1e-6)


def test_remark_2_a_fixed_variance_gives_imamls_jacobian():
    """D = I/λ and D_t = 0: the mean block of Lemma 1 is (∇²L/λ + I)⁻¹. (The limit of the whole
    learner: test_facts.py, test_imaml_is_a_limit_of_ibaml.)"""
    lam = 3.0
    problem = lemma_problem()
    prior = (problem.support.meta.prior[0], torch.full((6,), 1 / lam, dtype=F64).log())
    support = problem.support.bind(prior)
    batch = LinearTest(dimension=6, support=6).batch(0, 0)
    m_t = torch.linspace(-1, 1, 6, dtype=F64)[None]
    v = torch.cat([m_t, torch.full((1, 6), -40.0, dtype=F64)], -1)
    h = Curvature("lemma").at(support, v, [0, 1])
    matrix = torch.linalg.inv(dense_matrix(h.product, v)[0])[:6, :6]
    jacobian = lam / 6 * matrix  # κ/d, with κ = 1/N
    x = batch.support_x[0]
    oracle = torch.linalg.inv(x.T @ x / 0.01**2 / lam + torch.eye(6, dtype=F64))
    assert relative(jacobian, oracle) <= 1e-10


@pytest.mark.parametrize(("scale", "diverges"), [(0.139, False), (0.16, True), (1.0, True)])
def test_the_synthetic_set_up_diverges_as_printed(scale, diverges):
    """α = 0.01 and 1/σ² = 1e4: descent needs σ_max(X) < 0.141, and the paper does not say it."""
    batch = LinearRegression(scale=scale).batch(0, [0])
    support, _ = LinearTest().energies(batch, 0, exact=True)
    solution = LinearTest().descent(100).solve(detached(support), start_of(support))
    assert bool(solution.diverged[0]) == diverges


def test_the_constants_of_theorem_2_depend_on_rho():
    """The theorem says so, its restatement in the appendix says the opposite."""
    options = {"a": 1.0, "b": 1.0, "c": 0.0, "d": 1.0, "e": 1.0, "sigma": 1.0}
    near, far = (Constants(**options, rho=rho, d_min=1.0, d_max=1.0) for rho in (0.0, 1.0))
    assert far.weight == 2 * near.weight
    assert far.factor > 2 * near.factor
