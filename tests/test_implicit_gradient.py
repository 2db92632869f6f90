"""The implicit meta-gradient against finite differences of the re-solved problem, a dense solve of
plain autograd, and the paper's Lemma 1."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import ibaml
from ibaml import Curvature, Dense, Gaussian, GradientDescent, Implicit
from oracles import (
    converged,
    dense_gradients,
    exact_cg,
    finite_difference_errors,
    gradients,
    relative,
    smallest_eigenvalue,
)
from problems import (
    class_batch,
    conv_model,
    linear_model,
    mlp_model,
    plain_learner,
    regression_batch,
)

MODELS = {
    "linear": (linear_model, lambda: regression_batch()),
    "mlp": (mlp_model, lambda: class_batch((3,))),
    "conv": (conv_model, lambda: class_batch((1, 6, 6), ways=2)),
}


def build(name: str, beta: float, init_log_var: float, adapt: str, kind: str = "energy", **options):
    make, batch = MODELS[name]
    learner = ibaml.methods.ibaml(
        make(),
        solver=converged(),
        gradient=Implicit(Curvature(kind), exact_cg()),
        samples=4,
        noise="antithetic",
        beta=beta,
        init_log_var=init_log_var,
        adapt=adapt,
        likelihood=Gaussian(0.5, learn=True) if name == "linear" else None,
        **options,
    )
    return learner, batch()


CASES = [
    (name, beta, rho, adapt)
    for name in MODELS
    for beta in (1.0, 0.01)
    for rho in (0.0, -9.5)
    for adapt in ("all", "head")
    if not (name == "linear" and adapt == "head")
]


@pytest.mark.parametrize(("name", "beta", "rho", "adapt"), CASES)
def test_equals_finite_differences_of_the_resolved_problem(name, beta, rho, adapt):
    learner, batch = build(name, beta, rho, adapt)
    gradients(learner, batch)
    sizes = learner.diagnostics.record.solution.gradient.norm(dim=-1)
    assert sizes.max() <= 1e-12
    assert smallest_eigenvalue(learner, batch) > 0
    errors = finite_difference_errors(learner, batch)
    assert set(errors) >= ({"m", "rho", "shared"} if adapt == "head" else {"m", "rho"})
    assert max(errors.values()) <= 1e-5, errors


@pytest.mark.parametrize(("name", "beta", "rho", "adapt"), CASES)
def test_equals_the_dense_solve_and_lemma_agrees(name, beta, rho, adapt):
    learner, batch = build(name, beta, rho, adapt)
    cg = gradients(learner, batch)
    dense = dense_gradients(learner, batch)
    for block, g in cg.items():
        assert relative(g, dense[block]) <= 1e-9, block
    learner = learner.replace(gradient=Implicit(Curvature("lemma"), Dense()))
    for block, g in gradients(learner, batch).items():
        assert relative(g, dense[block]) <= 1e-8, block


@pytest.mark.parametrize("adapt", ["all", "head"])
@pytest.mark.parametrize("model", ["mlp", "conv"])
def test_relu_and_max_pool_equal_the_dense_solve(model, adapt):
    """Kinks: no finite differences, but the same matrices, at an unconverged point."""
    if model == "mlp":
        net, batch = mlp_model(nn.ReLU), class_batch((3,))
    else:
        net, batch = conv_model(smooth=False), class_batch((1, 6, 6), ways=2)
    learner = plain_learner(
        "ibaml",
        net,
        solver=GradientDescent(steps=20, lr=0.05),
        gradient=Implicit(Curvature("energy"), Dense()),
        init_log_var=-3.0,
        samples=3,
        adapt=adapt,
    )
    dense = dense_gradients(learner, batch)
    for block, g in gradients(learner, batch).items():
        assert relative(g, dense[block]) <= 1e-9, block


@pytest.mark.parametrize("objective", [ibaml.PredictiveNll(), ibaml.Abml(tasks=10)])
def test_other_objectives_have_exact_gradients_too(objective):
    learner, batch = build("mlp", 1.0, -3.0, "all", objective=objective)
    errors = finite_difference_errors(learner, batch)
    assert max(errors.values()) <= 1e-5, errors


def test_tied_head_has_an_exact_gradient_for_any_number_of_classes():
    torch.manual_seed(0)
    net = mlp_model(ways=3)
    learner = plain_learner(
        "ibaml",
        net,
        solver=converged(),
        gradient=Implicit(Curvature("energy"), exact_cg()),
        adapt="head",
        tie_head=True,
        init_log_var=-1.0,
        samples=2,
        noise="antithetic",
    )
    for ways in (3, 5):
        batch = class_batch((3,), ways=ways)
        errors = finite_difference_errors(learner, batch)
        # a vector added to every row moves all logits alike: softmax does not see the tied mean
        assert gradients(learner, batch)["m"].norm() <= 1e-14
        assert max(errors["rho"], errors["shared"]) <= 1e-5, (ways, errors)


def test_closed_form_for_the_prior_equals_autograd():
    """The fast path against −∇_θ⟨∇_v E(v̂, θ), u⟩ at an arbitrary point and vector."""
    learner, batch = build("mlp", 0.3, -2.0, "all")
    support, _ = learner.problem(batch, 1)
    torch.manual_seed(0)
    n = learner.layout.size
    v = torch.randn(2, 2 * n, dtype=torch.float64).requires_grad_()
    u = torch.randn(2, 2 * n, dtype=torch.float64)
    theta = tuple(t.detach().clone().requires_grad_() for t in support.theta)
    energy = support.bind(theta)
    (slope,) = torch.autograd.grad(energy(v).sum(), v, create_graph=True)
    oracle = torch.autograd.grad(-(slope * u).sum(), theta[:2])
    closed = energy.penalty_gradient(v.detach(), u, (0, 1))
    for i in (0, 1):
        assert relative(closed[i], oracle[i]) <= 1e-12


@pytest.mark.parametrize("kind", ["energy", "ggn"])
def test_strong_damping_is_first_order_in_the_mean(kind):
    _, batch = build("mlp", 1.0, -3.0, "all")
    options = {"steps": 3, "lr": 0.1, "init_log_var": -3.0}
    damped = plain_learner(
        "ibaml",
        mlp_model(),
        gradient=Implicit(Curvature(kind, damping=1e9), Dense()),
        solver=GradientDescent(3, 0.1),
        init_log_var=-3.0,
    )
    first = plain_learner("ibaml", mlp_model(), gradient=ibaml.FirstOrder(), **options)
    a, b = gradients(damped, batch), gradients(first, batch)
    assert relative(a["m"], b["m"]) <= 1e-7


def test_the_preconditioner_is_used_in_the_backward_solve():
    """Peer defect: a preconditioner forgotten there. Prior variances over eight orders of
    magnitude: five steps with it are good, five without are not."""
    from ibaml import ConjugateGradient

    def learner(solver):
        made = plain_learner(
            "ibaml",
            mlp_model(),
            solver=GradientDescent(0),
            gradient=Implicit(Curvature("ggn"), solver),
            beta=10.0,
        )
        with torch.no_grad():
            for p in made.log_var.values():
                p.copy_(torch.linspace(-9, 9, p.numel(), dtype=torch.float64).view_as(p))
        return made

    batch = class_batch((3,))
    exact = gradients(learner(Dense()), batch)
    good = gradients(learner(ConjugateGradient(5)), batch)
    poor = gradients(learner(ConjugateGradient(5, precondition=False)), batch)
    assert relative(good["m"], exact["m"]) < 0.1 * relative(poor["m"], exact["m"])


def test_mean_block_leaves_the_log_variance_block_to_the_prior():
    learner, batch = build("mlp", 1.0, -2.0, "all")
    support, _ = learner.problem(batch, 1)
    v = learner.belief.start(support.meta.prior, 2).detach()
    n = learner.layout.size
    from ibaml.linalg import dense_matrix

    full = Curvature("energy").at(support, v)
    mean = Curvature("energy", block="mean").at(support, v)
    h, g = dense_matrix(full.product, v), dense_matrix(mean.product, v)
    assert torch.allclose(h[:, :n, :n], g[:, :n, :n], atol=1e-14)
    assert g[:, :n, n:].abs().max() == 0
    assert torch.allclose(
        g[:, n:, n:], torch.diag_embed(support.precision(v).diagonal[:, n:]), atol=1e-16
    )
