"""Curvature products against dense matrices of plain autograd."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ibaml import Curvature
from ibaml.linalg import dense_matrix
from oracles import F64, relative
from problems import class_batch, conv_model, mlp_model, plain_learner, regression_batch

ACTIVATIONS = [nn.Tanh, nn.ReLU, nn.GELU, nn.Softplus]


def problem(make=mlp_model, batch=None, **options):
    """Energy and a point that is not stationary."""
    batch = class_batch((3,)) if batch is None else batch
    learner = plain_learner("ibaml", make(), init_log_var=-1.0, samples=3, **options)
    support, _ = learner.problem(batch, 5)
    v = learner.belief.start(support.meta.prior, len(batch)).detach()
    rng = torch.Generator().manual_seed(0)
    return support, v + 0.3 * torch.randn(v.shape, generator=rng, dtype=F64)


def per_task(energy, t):
    from dataclasses import replace

    return replace(
        energy, x=energy.x[t : t + 1], y=energy.y[t : t + 1], noise=energy.noise[t : t + 1]
    )


def matrix(kind: str, energy, v, **options) -> torch.Tensor:
    return dense_matrix(Curvature(kind, **options).at(energy, v).product, v)


@pytest.mark.parametrize(
    ("make", "batch"),
    [
        (mlp_model, lambda: class_batch((3,))),
        (lambda: mlp_model(nn.ReLU), lambda: class_batch((3,))),
        (conv_model, lambda: class_batch((1, 6, 6), ways=2)),
    ],
    ids=["mlp", "relu", "conv"],
)
def test_energy_is_the_hessian_of_the_energy(make, batch):
    energy, v = problem(make, batch())
    h = matrix("energy", energy, v)
    for t in range(len(v)):
        one = per_task(energy, t)
        oracle = torch.autograd.functional.hessian(lambda p, e=one: e(p).sum(), v[t : t + 1])
        assert relative(h[t], oracle.reshape(h[t].shape)) <= 1e-10


def test_ggn_is_the_dense_product():
    """JᵀΛJ with J by torch.autograd.functional.jacobian and Λ = (diag p − ppᵀ)/(S·N)."""
    energy, v = problem()
    g = matrix("ggn", energy, v)
    for t in range(len(v)):
        one = per_task(energy, t)
        j = torch.autograd.functional.jacobian(one.outputs, v[t : t + 1])
        outputs = one.outputs(v[t : t + 1])
        s, n, c = outputs.shape[1:]
        j = j.reshape(s * n, c, -1)
        p = outputs.reshape(s * n, c).softmax(-1)
        lam = (torch.diag_embed(p) - p[:, :, None] * p[:, None, :]) / (s * n)
        oracle = torch.einsum("aci,acd,adj->ij", j, lam, j)
        oracle = oracle + torch.diag(energy.precision(v).diagonal[t])
        assert relative(g[t], oracle) <= 1e-10


@given(
    st.sampled_from(ACTIVATIONS),
    st.integers(0, 10**6),
    st.sampled_from(["classes", "regression"]),
    st.floats(0.1, 3.0),
)
def test_ggn_is_positive_semi_definite_on_random_networks(activation, seed, kind, scale):
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(4, 5), activation(), nn.Linear(5, 3 if kind == "classes" else 1))
    for p in net.parameters():
        nn.init.normal_(p, std=scale)
    batch = class_batch((4,)) if kind == "classes" else regression_batch()
    energy, v = problem(lambda: net.to(F64), batch)
    h = Curvature("ggn").at(energy, v)
    g = dense_matrix(h.product, v) - torch.diag_embed(energy.precision(v).diagonal)
    assert (g - g.mT).abs().max() <= 1e-10 * g.abs().max()
    assert torch.linalg.eigvalsh((g + g.mT) / 2).min() >= -1e-10 * g.abs().max()


def test_ggn_and_hessian_differ_by_the_second_derivative_of_the_network():
    """At small variance they are close, at large variance not (why "ggn" is an approximation)."""

    def difference(rho: float) -> float:
        learner = plain_learner("ibaml", mlp_model(), init_log_var=rho, samples=8)
        batch = class_batch((3,))
        support, _ = learner.problem(batch, 5)
        v = learner.belief.start(support.meta.prior, 2).detach()
        h, g = matrix("energy", support, v), matrix("ggn", support, v)
        return relative(g, h)

    assert difference(-9.5) < difference(0.0)


def test_ggn_of_a_custom_loss_uses_its_hessian():
    """A heavy-tailed loss: Λ by autograd. Dense oracle."""

    def cauchy(outputs, y):
        return torch.log1p((outputs - y).square()).sum(-1)

    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1)).to(F64)
    energy, v = problem(lambda: net, regression_batch(), likelihood=cauchy)
    g = matrix("ggn", energy, v)
    one = per_task(energy, 0)
    j = torch.autograd.functional.jacobian(one.outputs, v[:1]).reshape(-1, v.shape[1])
    r = (one.outputs(v[:1]) - one.y[:, None]).reshape(-1).detach()
    lam = (2 - 2 * r**2) / (1 + r**2) ** 2 / len(r)
    oracle = j.T @ torch.diag(lam) @ j + torch.diag(energy.precision(v).diagonal[0])
    assert relative(g[0], oracle) <= 1e-10


def test_lemma_is_the_formula_of_the_paper():
    """H = ∇²ℓ + κ·diag(1/d, ½(1/d + 2∇_d ℓ/κ)²) in (m, d), at any point."""
    energy, v = problem()
    n = energy.layout.size
    h = matrix("lemma", energy, v)
    for t in range(len(v)):
        one = per_task(energy, t)
        w = torch.cat([v[t : t + 1, :n], v[t : t + 1, n:].exp()], -1)

        def loss(w, e=one):
            return e.loss(torch.cat([w[:, :n], w[:, n:].log()], -1)).sum()

        oracle = torch.autograd.functional.hessian(loss, w).reshape(2 * n, 2 * n)
        w.requires_grad_()
        (g,) = torch.autograd.grad(loss(w), w)
        tau = (-energy.meta.prior[1].detach()).exp()
        d_block = (tau + 2 * g[0, n:] / energy.kappa) ** 2 / 2
        oracle = oracle + energy.kappa * torch.diag(torch.cat([tau, d_block]))
        assert relative(h[t], oracle) <= 1e-10


@pytest.mark.parametrize("kind", ["energy", "ggn", "lemma"])
def test_damping_adds_the_priors_precision(kind):
    energy, v = problem()
    plain, damped = matrix(kind, energy, v), matrix(kind, energy, v, damping=0.7)
    diagonal = Curvature(kind).at(energy, v).diagonal
    assert torch.allclose(damped - plain, 0.7 * torch.diag_embed(diagonal), atol=1e-10)


@pytest.mark.parametrize("kind", ["energy", "ggn"])
def test_point_belief_has_an_isotropic_prior(kind):
    learner = plain_learner("imaml", mlp_model(), lam=0.3)
    support, _ = learner.problem(class_batch((3,)), 0)
    v = learner.belief.start(support.meta.prior, 2).detach()
    h = Curvature(kind).at(support, v)
    assert torch.equal(h.diagonal, torch.full_like(v, 0.3))


@pytest.mark.parametrize(
    ("build", "word"),
    [
        (lambda: Curvature("fisher"), "curvature"),
        (lambda: Curvature(damping=-1.0), "damping"),
        (lambda: Curvature(block="rows"), "block"),
    ],
)
def test_wrong_options_are_refused(build, word):
    with pytest.raises(ValueError, match=word):
        build()
