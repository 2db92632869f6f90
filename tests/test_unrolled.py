"""The unrolled rule against a hand-written autograd loop and other people's libraries."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

import ibaml
from ibaml import Adam, GradientDescent, NaturalDescent, PolyakDescent, Unrolled
from ibaml.energy import Stream, draw_noise
from oracles import F64, SEED, generator, gradients, relative, seed
from problems import class_batch, conv_model, mlp_model, plain_learner, regression_batch

LR, STEPS = 0.1, 4


def hand_written_maml(net: nn.Module, batch, adapted=lambda name: True) -> dict[str, torch.Tensor]:
    """Second-order MAML in ten lines of autograd."""
    start = dict(net.named_parameters())
    net.train()  # batch statistics
    total = 0
    for t in range(len(batch)):
        w = dict(start)
        for _ in range(STEPS):
            loss = F.cross_entropy(functional_call(net, w, batch.support_x[t]), batch.support_y[t])
            names = [n for n in w if adapted(n)]
            grads = torch.autograd.grad(loss, [w[n] for n in names], create_graph=True)
            w = {**w, **{n: w[n] - LR * g for n, g in zip(names, grads, strict=True)}}
        total = total + F.cross_entropy(
            functional_call(net, w, batch.query_x[t]), batch.query_y[t]
        ) / len(batch)
    grads = torch.autograd.grad(total, list(start.values()))
    return dict(zip(start, grads, strict=True))


PROBLEMS = {
    "mlp": (mlp_model, lambda: class_batch((3,))),
    "conv": (lambda: conv_model(smooth=False), lambda: class_batch((1, 6, 6), ways=2)),
}


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("adapt", ["all", "head"])
@pytest.mark.parametrize("name", list(PROBLEMS))
def test_maml_equals_the_hand_written_loop(name, adapt, recompute):
    make, make_batch = PROBLEMS[name]
    batch = make_batch()
    head = [n for n, _ in list(make().named_parameters())[-2:]]
    oracle = hand_written_maml(make(), batch, lambda n: adapt == "all" or n in head)
    learner = ibaml.methods.maml(
        make(), steps=STEPS, lr=LR, adapt=adapt, gradient=Unrolled(recompute=recompute)
    )
    learner(batch).backward()
    for block in (head, [n for n in oracle if n not in head]):
        ours = torch.cat([learner.model.get_parameter(n).grad.reshape(-1) for n in block])
        assert relative(ours, torch.cat([oracle[n].reshape(-1) for n in block])) <= 1e-12


@pytest.mark.parametrize("objective", ["query", "abml"])
def test_abml_equals_a_hand_written_loop(objective):
    """Everything written out again: reparameterised samples, KL, descent, ABML's objective."""
    batch, n_task = class_batch((3,)), 50
    net, samples, rho0, beta = mlp_model(), 3, -3.0, 0.5
    names = [n for n, _ in net.named_parameters()]
    mean = dict(net.named_parameters())
    rho = {n: torch.full_like(p, rho0, requires_grad=True) for n, p in mean.items()}
    sizes = [p.numel() for p in mean.values()]
    examples = batch.support_x.shape[1]

    def normal(stream: Stream) -> torch.Tensor:
        return draw_noise(seed(), (0, 1), stream, samples, sum(sizes), dtype=F64)

    def expected_nll(m, r, noise, x, y):
        total = 0
        for s in range(samples):
            parts = dict(zip(names, noise[s].split(sizes), strict=True))
            w = {n: m[n] + torch.exp(r[n] / 2) * parts[n].view_as(m[n]) for n in names}
            total = total + F.cross_entropy(functional_call(net, w, x), y) / samples
        return total

    def kl(m, r):
        return sum(
            torch.distributions.kl_divergence(
                torch.distributions.Normal(m[n], torch.exp(r[n] / 2)),
                torch.distributions.Normal(mean[n], torch.exp(rho[n] / 2)),
            ).sum()
            for n in names
        )

    total = 0
    for t in range(len(batch)):
        m, r = dict(mean), dict(rho)
        for _ in range(STEPS):
            energy = expected_nll(
                m, r, normal(Stream.ADAPT)[t], batch.support_x[t], batch.support_y[t]
            ) + beta / examples * kl(m, r)
            leaves = [m[n] for n in names] + [r[n] for n in names]
            g = torch.autograd.grad(energy, leaves, create_graph=True)
            m = {n: m[n] - LR * g[i] for i, n in enumerate(names)}
            r = {n: r[n] - LR * g[len(names) + i] for i, n in enumerate(names)}
        x, y = batch.query_x[t], batch.query_y[t]
        if objective == "abml":
            x = torch.cat([batch.support_x[t], x])
            y = torch.cat([batch.support_y[t], y])
        loss = expected_nll(m, r, normal(Stream.META)[t], x, y)
        if objective == "abml":
            standard = torch.distributions.Normal(torch.zeros(1, dtype=F64), 1.0)
            gamma = torch.distributions.Gamma(torch.ones(1, dtype=F64), 0.01)
            hyper = sum(
                standard.log_prob(mean[n]).sum() + gamma.log_prob(torch.exp(-rho[n])).sum()
                for n in names
            )
            loss = loss + beta / examples * kl(m, r) - hyper / n_task
        total = total + loss / len(batch)
    oracle = torch.autograd.grad(total, [*mean.values(), *rho.values()])

    learner = plain_learner(
        "abml",
        mlp_model(),
        steps=STEPS,
        lr=LR,
        samples=samples,
        beta=beta,
        init_log_var=rho0,
        objective=ibaml.Abml(tasks=n_task) if objective == "abml" else ibaml.QueryNll(),
    )
    loss = learner(batch, generator())
    assert float(loss.detach()) == pytest.approx(float(total.detach()), rel=1e-13)
    actual = gradients(learner, batch)
    assert relative(actual["m"], torch.cat([g.reshape(-1) for g in oracle[: len(names)]])) <= 1e-12
    assert (
        relative(actual["rho"], torch.cat([g.reshape(-1) for g in oracle[len(names) :]])) <= 1e-12
    )


def test_maml_equals_higher():
    import higher

    batch, net = class_batch((3,)), mlp_model()
    opt = torch.optim.SGD(net.parameters(), lr=LR)
    for t in range(len(batch)):
        with higher.innerloop_ctx(net, opt, copy_initial_weights=False) as (fast, inner):
            for _ in range(STEPS):
                inner.step(F.cross_entropy(fast(batch.support_x[t]), batch.support_y[t]))
            (F.cross_entropy(fast(batch.query_x[t]), batch.query_y[t]) / len(batch)).backward()
    learner = ibaml.methods.maml(mlp_model(), steps=STEPS, lr=LR)
    learner(batch).backward()
    for p, q in zip(learner.model.parameters(), net.parameters(), strict=True):
        assert relative(p.grad, q.grad) <= 1e-8


def test_maml_equals_torchopt():
    import torchopt

    batch, net = class_batch((3,)), mlp_model()
    opt = torchopt.MetaSGD(net, lr=LR)
    params = dict(net.named_parameters())
    init_net, init_opt = torchopt.extract_state_dict(net), torchopt.extract_state_dict(opt)
    total = 0
    for t in range(len(batch)):
        for _ in range(STEPS):
            opt.step(F.cross_entropy(net(batch.support_x[t]), batch.support_y[t]))
        total = total + F.cross_entropy(net(batch.query_x[t]), batch.query_y[t]) / len(batch)
        torchopt.recover_state_dict(net, init_net)
        torchopt.recover_state_dict(opt, init_opt)
    oracle = torch.autograd.grad(total, list(params.values()))
    learner = ibaml.methods.maml(mlp_model(), steps=STEPS, lr=LR)
    learner(batch).backward()
    for p, g in zip(learner.model.parameters(), oracle, strict=True):
        assert relative(p.grad, g) <= 1e-8


SOLVERS = [
    GradientDescent(7, 0.05),
    NaturalDescent(7, 0.05),
    Adam(7, 0.02),
    GradientDescent(7, {"*.weight": 0.05, "*": 0.02}),
    GradientDescent(7, 0.05, fresh_noise=True),
    PolyakDescent(7, 0.8),
    PolyakDescent(7, {"*.weight": 0.8, "*": 0.3}),
]


@pytest.mark.parametrize("solver", SOLVERS, ids=lambda s: type(s).__name__)
@pytest.mark.parametrize("recompute", [False, True])
def test_every_solver_unrolls_exactly(solver, recompute):
    """Finite differences of the whole pipeline, through any solver, with and without recompute."""
    from oracles import blocks, five_point

    batch = regression_batch()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1)).to(F64)
    learner = plain_learner(
        "abml", net, solver=solver, gradient=Unrolled(recompute), init_log_var=-2.0, samples=2
    )
    exact = gradients(learner, batch)
    rng = torch.Generator().manual_seed(0)
    for name, ps in blocks(learner).items():
        d = torch.randn(exact[name].shape, generator=rng, dtype=F64)
        slope = five_point(lambda: float(learner(batch, generator()).detach()), ps, d, 1e-4)
        assert slope == pytest.approx(float(exact[name] @ d), rel=1e-7)


def test_adam_is_torchs_adam():
    batch, net = class_batch((3,), tasks=1), mlp_model()
    opt = torch.optim.Adam(net.parameters(), lr=0.05)
    for _ in range(6):
        opt.zero_grad()
        F.cross_entropy(net(batch.support_x[0]), batch.support_y[0]).backward()
        opt.step()
    learner = ibaml.methods.maml(mlp_model(), solver=Adam(6, 0.05))
    posterior = learner.adapt(batch.support_x[0], batch.support_y[0])
    for name, p in net.named_parameters():
        assert relative(posterior.mean[name], p) <= 1e-12


def test_a_learned_step_size_has_an_exact_gradient():
    batch = class_batch((3,))
    learner = ibaml.methods.maml(mlp_model(), solver=GradientDescent(3, 0.1, learn_lr=True))
    names = [n for n, _ in learner.named_parameters() if n.startswith("log_lr")]
    assert len(names) == 4
    learner(batch).backward()
    for rate in learner.log_lr.values():
        assert rate.item() == pytest.approx(math.log(0.1))
        h = 1e-5
        values = []
        for sign in (1, -1):
            with torch.no_grad():
                rate += sign * h
                values.append(float(learner(batch)))
                rate -= sign * h
        assert rate.grad.item() == pytest.approx((values[0] - values[1]) / (2 * h), rel=1e-6)


def test_recompute_keeps_a_learned_step_size_and_shared_weights_exact():
    batch = class_batch((3,))
    results = []
    for recompute in (False, True):
        learner = ibaml.methods.maml(
            mlp_model(),
            solver=GradientDescent(9, 0.1, learn_lr=True),
            gradient=Unrolled(recompute),
            adapt="head",
        )
        learner(batch, torch.Generator().manual_seed(SEED)).backward()
        results.append({n: p.grad for n, p in learner.named_parameters()})
    for name, g in results[0].items():
        assert relative(results[1][name], g) <= 1e-13, name
