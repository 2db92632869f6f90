"""The facts of the mathematics: closed forms and limits that every change has to keep."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import ibaml
from ibaml import (
    ConjugateGradient,
    Curvature,
    Dense,
    FirstOrder,
    Gaussian,
    GradientDescent,
    Implicit,
    NaturalDescent,
    NewtonCG,
    TaskBatch,
    Unrolled,
)
from ibaml.linalg import dense_matrix
from oracles import F64, converged, dense_gradients, generator, gradients, relative, seed
from problems import class_batch, linear_model, mlp_model, plain_learner, regression_batch


def moment_exact(n: int, tasks: int) -> torch.Tensor:
    """The 2n points ±√n·e_i: mean zero and covariance I exactly, like a Gaussian's."""
    points = math.sqrt(n) * torch.eye(n, dtype=F64)
    return torch.cat([points, -points])[None].expand(tasks, -1, -1)


def linear_learner(beta: float, sigma: float, rho: float, n: int) -> ibaml.MetaLearner:
    learner = plain_learner(
        "ibaml", linear_model(n), beta=beta, init_log_var=rho, likelihood=Gaussian(sigma)
    )
    rng = torch.Generator().manual_seed(5)
    with torch.no_grad():
        (log_var,) = learner.log_var.values()
        log_var += torch.randn(log_var.shape, generator=rng, dtype=F64)
    return learner


def closed_form(learner, batch, t: int, sigma: float):
    """m_t and d_t of the linear-Gaussian model; X has the examples as columns."""
    m, rho = (p.detach() for p in learner.meta_parameters().prior)
    x, y = batch.support_x[t].T, batch.support_y[t][:, 0]
    beta = learner.beta
    precision = (-rho).exp()
    d_t = 1 / ((x @ x.T).diagonal() / (beta * sigma**2) + precision)
    left = x @ x.T / sigma**2 + beta * torch.diag(precision)
    m_t = torch.linalg.solve(left, beta * precision * m + x @ y / sigma**2)
    return m_t, d_t


@given(
    st.sampled_from([1.0, 0.1, 0.01]),
    st.floats(0.1, 2.0),
    st.floats(-4, 1),
    st.integers(1, 5),
)
def test_linear_gaussian_closed_form_with_moment_exact_noise(beta, sigma, rho, n):
    learner = linear_learner(beta, sigma, rho, n)
    batch = regression_batch(tasks=2, features=n)
    energy = learner.energy(batch.support_x, batch.support_y, moment_exact(n, 2))
    start = learner.belief.start(energy.meta.prior, 2).detach()
    solution = converged().solve(energy, start)
    for t in range(2):
        m_t, d_t = closed_form(learner, batch, t, sigma)
        assert relative(solution.value[t, :n], m_t) <= 1e-11
        assert relative(solution.value[t, n:].exp(), d_t) <= 1e-11


def test_four_random_samples_do_not_give_the_closed_form():
    """Why the facts are tested with moment-exact noise: Monte Carlo is far off in the variances."""
    learner = linear_learner(1.0, 0.5, 0.0, 4)
    batch = regression_batch()
    noise = torch.randn(2, 4, 4, generator=torch.Generator().manual_seed(0), dtype=F64)
    energy = learner.energy(batch.support_x, batch.support_y, noise)
    start = learner.belief.start(energy.meta.prior, 2).detach()
    v = converged().solve(energy, start).value
    errors = [relative(v[t, 4:].exp(), closed_form(learner, batch, t, 0.5)[1]) for t in range(2)]
    assert max(errors) > 0.2


def test_natural_descent_reaches_the_closed_form_and_plain_descent_does_not():
    learner = linear_learner(1.0, 0.5, 0.0, 4)
    batch = regression_batch()
    energy = learner.energy(batch.support_x, batch.support_y, moment_exact(4, 2))
    start = learner.belief.start(energy.meta.prior, 2).detach()
    natural = NaturalDescent(steps=500, lr=0.05).solve(energy, start).value
    plain = GradientDescent(steps=500, lr=0.05).solve(energy, start).value
    for t in range(2):
        m_t, d_t = closed_form(learner, batch, t, 0.5)
        assert relative(natural[t, :4], m_t) <= 1e-8
        assert relative(natural[t, 4:].exp(), d_t) <= 1e-8
        assert relative(plain[t, 4:].exp(), d_t) > 1e-4


def test_one_natural_step_is_the_rule_as_printed():
    """1/d_t ← (1−η)/d_t + η·(1/d + 2∇_d ℓ/κ), with ∇_d ℓ by autograd in d."""
    learner = linear_learner(0.5, 0.5, -1.0, 4)
    batch = regression_batch()
    energy = learner.energy(batch.support_x, batch.support_y, moment_exact(4, 2))
    v = learner.belief.start(energy.meta.prior, 2).detach() + 0.3
    eta = 0.4
    stepped = NaturalDescent(steps=1, lr=0.01, eta=eta).solve(energy, v).value
    d = v[:, 4:].exp().requires_grad_()
    loss = energy.loss(torch.cat([v[:, :4], d.log()], -1)).sum()
    (grad_d,) = torch.autograd.grad(loss, d)
    tau = (-energy.meta.prior[1].detach()).exp()
    target = (1 - eta) / d.detach() + eta * (tau + 2 * grad_d / energy.kappa)
    assert relative((-stepped[:, 4:]).exp(), target) <= 1e-12


def test_ggn_equals_the_hessian_but_for_the_log_variance_diagonal():
    """Linear-Gaussian: Hessian − GGN = ½·diag(∇_ρ ℓ) in the ρ block, zero elsewhere."""
    learner = linear_learner(1.0, 0.7, -0.5, 4)
    batch = regression_batch()
    noise = torch.randn(2, 6, 4, generator=torch.Generator().manual_seed(0), dtype=F64)
    energy = learner.energy(batch.support_x, batch.support_y, noise)
    v = learner.belief.start(energy.meta.prior, 2).detach() + 0.2
    hessian, ggn = (Curvature(kind).at(energy, v) for kind in ("energy", "ggn"))
    difference = dense_matrix(hessian.product, v) - dense_matrix(ggn.product, v)
    expected = torch.zeros_like(difference)
    expected[:, 4:, 4:] = torch.diag_embed(hessian.loss_gradient[:, 4:] / 2)
    assert (difference - expected).abs().max() <= 1e-12 * difference.abs().max()


def test_imaml_is_a_limit_of_ibaml():
    """ρ = log(κ/λ), ρ_t frozen at −20, antithetic noise, m_t solved, the mean block alone."""
    lam, batch = 0.7, class_batch((3,))
    kappa = 1.0 / batch.support_x.shape[1]
    point = plain_learner(
        "imaml",
        mlp_model(),
        lam=lam,
        solver=converged(),
        gradient=Implicit(Curvature("energy"), Dense()),
    )
    target = gradients(point, batch)["m"]
    w = point.diagnostics.record.solution.value
    bayes = plain_learner(
        "ibaml",
        mlp_model(),
        init_log_var=math.log(kappa / lam),
        samples=2,
        noise="antithetic",
        gradient=Implicit(Curvature("energy", block="mean"), Dense()),
        solver=MeanSolved(w),
    )
    assert relative(gradients(bayes, batch)["m"], target) <= 1e-6


class MeanSolved:
    """Solves the mean block of a Gaussian task with its log-variances held at −20."""

    steps = 1

    def __init__(self, start: torch.Tensor) -> None:
        self.start = start

    def solve(self, energy, start, *, rate=None, examine=True):
        n = energy.layout.size
        m, rho = self.start, torch.full_like(self.start, -20.0)
        for _ in range(20):
            v = torch.cat([m, rho], -1)
            h = Curvature("energy", block="mean").at(energy, v)
            slope = h.loss_gradient + energy.kappa * torch.cat(
                [(m - energy.meta.prior[0]) * (-energy.meta.prior[1]).exp(), 0 * m], -1
            )
            slope[:, n:] = 0
            m = m - Dense()(h.product, slope).value[:, :n]
        assert slope.norm() <= 1e-11
        return NewtonCG(steps=0).solve(energy, torch.cat([m, rho], -1))


class TestWithoutSteps:
    """K = 0: the solution is the prior."""

    def learner(self, gradient, beta: float = 1.0):
        return plain_learner(
            "ibaml",
            mlp_model(),
            solver=GradientDescent(0),
            gradient=gradient,
            beta=beta,
            init_log_var=-2.0,
        )

    def test_unrolled_equals_first_order(self):
        batch = class_batch((3,))
        a = gradients(self.learner(Unrolled()), batch)
        b = gradients(self.learner(FirstOrder()), batch)
        for block in a:
            assert relative(a[block], b[block]) <= 1e-14

    def test_implicit_is_the_formula(self):
        """∇₂L + κΛ(∇²ℓ + κΛ)⁻¹∇₁L with Λ = diag(e^{−ρ}, ½)."""
        batch = class_batch((3,), tasks=1)
        learner = self.learner(Implicit(Curvature("energy"), Dense()))
        ours = torch.cat(list(gradients(learner, batch).values()))
        support, query = learner.problem(batch, seed())
        v = learner.belief.start(support.meta.prior, 1).detach().requires_grad_()
        (b,) = torch.autograd.grad(learner.objective(v, support, query).sum(), v)
        h = torch.autograd.functional.hessian(lambda p: support.loss(p).sum(), v)
        h = h.reshape(v.numel(), v.numel()).detach()
        rho = support.meta.prior[1].detach()
        lam = support.kappa * torch.cat([(-rho).exp(), torch.full_like(rho, 0.5)])
        oracle = lam * torch.linalg.solve(h + torch.diag(lam), b[0])
        assert relative(ours, oracle) <= 1e-10

    def test_a_strong_prior_or_the_warm_start_without_cg_is_first_order(self):
        batch = class_batch((3,))
        first = gradients(self.learner(FirstOrder()), batch)
        strong = self.learner(Implicit(Curvature("energy"), Dense()), beta=1e9)
        assert relative(gradients(strong, batch)["m"], first["m"]) <= 1e-7
        warm = Implicit(Curvature("energy"), ConjugateGradient(steps=0, start="preconditioned"))
        g = gradients(self.learner(warm), batch)
        for block in g:
            assert relative(g[block], first[block]) <= 1e-13


def test_the_point_method_as_the_variance_vanishes():
    """ρ_t → −∞: loss and gradient of the Gaussian method become the point method's."""
    batch = class_batch((3,))
    options = {"steps": 3, "lr": 0.1}
    point = ibaml.methods.maml(mlp_model(), **options)
    target, g = point(batch, generator()), gradients(point, batch)["m"]
    for rho, bound in ((-20.0, 1e-3), (-40.0, 1e-7), (-60.0, 1e-11)):
        # β so small that the prior's pull is nothing even at this precision
        bayes = plain_learner(
            "abml", mlp_model(), init_log_var=rho, beta=1e-40, objective=ibaml.QueryNll(), **options
        )
        loss = bayes(batch, generator())
        assert abs(float(loss.detach() - target.detach())) <= bound
        assert relative(gradients(bayes, batch)["m"], g) <= bound


def test_a_singular_hessian_is_reported_and_gets_the_minimum_norm_solution():
    """E = (v² − θ)²/4 at θ = 0 has a degenerate minimum: the solution is not differentiable."""
    from ibaml import Reason, Record, implicit_solve

    theta = torch.zeros(1, dtype=F64, requires_grad=True)
    record = Record()
    v = implicit_solve(
        lambda v, p: ((v**2 - p) ** 2).sum() / 4,
        torch.zeros(1, dtype=F64),
        theta,
        linear_solver=Dense(),
        record=record,
    )
    with pytest.warns(RuntimeWarning, match="singular"):
        v.sum().backward()
    assert int(record.linear.reason[0]) == Reason.SINGULAR
    assert theta.grad.isfinite().all()


def test_lemma_away_from_the_solution_is_not_the_energys_gradient():
    """The paper's substitution is exact at a stationary point only."""
    batch = class_batch((3,))

    def learner(kind):
        return plain_learner(
            "ibaml",
            mlp_model(),
            solver=GradientDescent(3, 0.1),
            gradient=Implicit(Curvature(kind), Dense()),
            init_log_var=-2.0,
        )

    energy, lemma = (gradients(learner(kind), batch) for kind in ("energy", "lemma"))
    assert relative(energy["m"], dense_gradients(learner("energy"), batch)["m"]) <= 1e-9
    assert relative(lemma["rho"], energy["rho"]) > 1e-2


def test_unequal_numbers_of_examples_change_kappa():
    learner = plain_learner("ibaml", mlp_model())
    small, large = class_batch((3,), shots=1), class_batch((3,), shots=4)
    assert learner.problem(small, 0)[0].kappa == pytest.approx(1 / 3)
    assert learner.problem(large, 0)[0].kappa == pytest.approx(1 / 12)


def test_reptile_and_first_order_equal_a_plain_loop():
    batch = class_batch((3,))
    lr, steps = 0.1, 4
    reptile, total = mlp_model(), {}
    fomaml_total: dict[str, torch.Tensor] = {}
    for t in range(len(batch)):
        net = mlp_model()
        opt = torch.optim.SGD(net.parameters(), lr=lr)
        for _ in range(steps):
            opt.zero_grad()
            nn.functional.cross_entropy(net(batch.support_x[t]), batch.support_y[t]).backward()
            opt.step()
        opt.zero_grad()
        nn.functional.cross_entropy(net(batch.query_x[t]), batch.query_y[t]).backward()
        for (name, p), start in zip(net.named_parameters(), reptile.parameters(), strict=True):
            total[name] = total.get(name, 0) + (start - p).detach() / len(batch)
            fomaml_total[name] = fomaml_total.get(name, 0) + p.grad / len(batch)
    for method, oracle in ((ibaml.methods.reptile, total), (ibaml.methods.fomaml, fomaml_total)):
        learner = method(mlp_model(), steps=steps, lr=lr)
        learner(batch).backward()
        for name, p in learner.model.named_parameters():
            assert relative(p.grad, oracle[name]) <= 1e-12


def test_a_batch_is_the_mean_of_its_tasks_whatever_the_batching():
    batch = TaskBatch(
        *(
            getattr(class_batch((3,), tasks=4), f)
            for f in ("support_x", "support_y", "query_x", "query_y")
        ),
        keys=[11, 5, 8, 2],
    )
    learner = plain_learner("ibaml", mlp_model(), init_log_var=-2.0)
    whole = gradients(learner, batch)
    parts = [gradients(learner, batch.select([t])) for t in (3, 1, 0, 2)]
    for block, g in whole.items():
        assert relative(sum(p[block] for p in parts) / 4, g) <= 1e-12
