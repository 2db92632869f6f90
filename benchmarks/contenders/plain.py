"""A plain sequential loop in autograd, the yardstick: one task, one sample after another.

Weights are one flat vector v, of means and log-variances for ABML and iBaML. The graph of ∇E is
built once per task and serves all L products; the mixed derivative is the prior's closed form.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.func import functional_call

from contenders.case import Case, Gradients, Step, nll
from contenders.ours import learner_for
from ibaml.seeding import draw_seed

Function = Callable[[Tensor], Tensor]
HYPER_TASKS, GAMMA_RATE = 80_000, 0.01  # of ABML's hyper-prior, as in ibaml.Abml


def prepare(case: Case) -> Step:
    net = case.own_net()
    if case.method in ("abml", "ibaml"):
        energies = learner_for(case).problem(case.batch, draw_seed(case.generator()))
        noise = [energy.noise for energy in energies]
        return partial({"abml": abml, "ibaml": ibaml}[case.method], case, net, *noise)
    return partial({"maml": maml, "imaml": imaml}[case.method], case, net)


# --- the four methods ----------------------------------------------------------------------------


def maml(case: Case, net: nn.Module) -> Gradients:
    theta = means(net).requires_grad_()
    for x, y, query_x, query_y in case.tasks():
        energy = partial(point_nll, net, x, y)
        v = descend(energy, theta, case, create_graph=True)
        (point_nll(net, query_x, query_y, v) / len(case.batch)).backward()
    return by_name(net, theta.grad)


def imaml(case: Case, net: nn.Module) -> Gradients:
    theta = means(net)
    total = torch.zeros_like(theta)
    for x, y, query_x, query_y in case.tasks():
        loss = partial(point_nll, net, x, y)

        def energy(v: Tensor, loss: Function = loss) -> Tensor:
            return loss(v) + case.lam / 2 * (v - theta).square().sum()

        v = leaf(descend(energy, theta, case))
        (b,) = torch.autograd.grad(point_nll(net, query_x, query_y, v), v)
        diagonal = torch.full_like(v, case.lam)
        total += case.lam * cg(hessian(loss, v), b, diagonal, case.cg_steps)
    return by_name(net, total / len(case.batch))


def abml(case: Case, net: nn.Module, noise: Tensor, query_noise: Tensor) -> Gradients:
    theta = prior(net, case).requires_grad_()
    for t, (x, y, query_x, query_y) in enumerate(case.tasks()):

        def energy(v: Tensor, x: Tensor = x, y: Tensor = y, t: int = t) -> Tensor:
            return expected_nll(net, x, y, noise[t], v) + kl(v, theta) / len(x)

        v = descend(energy, theta, case, create_graph=True)
        both_x, both_y = torch.cat([x, query_x]), torch.cat([y, query_y])
        loss = expected_nll(net, both_x, both_y, query_noise[t], v) + kl(v, theta) / len(x)
        ((loss - log_hyper_prior(theta) / HYPER_TASKS) / len(case.batch)).backward()
    return by_name(net, theta.grad)


def ibaml(case: Case, net: nn.Module, noise: Tensor, query_noise: Tensor) -> Gradients:
    theta = prior(net, case)
    m, rho = theta.chunk(2)
    total = torch.zeros_like(theta)
    for t, (x, y, query_x, query_y) in enumerate(case.tasks()):
        kappa = 1 / len(x)
        loss = partial(expected_nll, net, x, y, noise[t])

        def energy(v: Tensor, loss: Function = loss, kappa: float = kappa) -> Tensor:
            return loss(v) + kappa * kl(v, theta)

        v = leaf(descend(energy, theta, case))
        (b,) = torch.autograd.grad(expected_nll(net, query_x, query_y, query_noise[t], v), v)
        m_t, rho_t = v.detach().chunk(2)
        diagonal = kappa * torch.cat([(-rho).exp(), (rho_t - rho).exp() / 2])
        if case.curvature == "ggn":
            curvature = gauss_newton(partial(sampled_outputs, net, x, noise[t]), v)
        else:
            curvature = hessian(loss, v)
        u_m, u_rho = cg(curvature, b, diagonal, case.cg_steps).chunk(2)
        pull = (-rho).exp() * u_m
        total += kappa * torch.cat([pull, (m_t - m) * pull + (rho_t - rho).exp() * u_rho / 2])
    return by_name(net, total / len(case.batch))


# --- solving and curvature -----------------------------------------------------------------------


def descend(energy: Function, start: Tensor, case: Case, create_graph: bool = False) -> Tensor:
    v = start
    for _ in range(case.steps):
        v = v if create_graph else leaf(v)
        (gradient,) = torch.autograd.grad(energy(v), v, create_graph=create_graph)
        v = v - case.lr * gradient
    return v


def hessian(loss: Function, v: Tensor) -> Function:
    """p -> ∇²loss p, from one graph of the gradient."""
    (gradient,) = torch.autograd.grad(loss(v), v, create_graph=True)
    return lambda p: torch.autograd.grad(gradient, v, p, retain_graph=True)[0]


def gauss_newton(outputs_at: Function, v: Tensor) -> Function:
    """p -> JᵀΛJp for the mean cross-entropy of logits, from one graph of the outputs and of Jᵀ."""
    outputs = outputs_at(v)
    zero = torch.zeros_like(outputs, requires_grad=True)
    (transposed,) = torch.autograd.grad(outputs, v, zero, create_graph=True)
    probability = outputs.detach().softmax(-1)
    count = outputs[..., 0].numel()

    def product(p: Tensor) -> Tensor:
        (moved,) = torch.autograd.grad(transposed, zero, p, retain_graph=True)
        bent = probability * (moved - (probability * moved).sum(-1, keepdim=True)) / count
        return torch.autograd.grad(outputs, v, bent, retain_graph=True)[0]

    return product


def cg(curvature: Function, b: Tensor, diagonal: Tensor, steps: int) -> Tensor:
    """(C + D)u ≈ b in at most so many steps from zero, preconditioned by the diagonal D; it ends
    where the curvature is negative."""
    u, r = torch.zeros_like(b), b
    p = z = r / diagonal
    rz = r @ z
    for _ in range(steps):
        q = curvature(p) + diagonal * p
        bend = p @ q
        if bend <= 0:
            break
        u, r = u + rz / bend * p, r - rz / bend * q
        z = r / diagonal
        rz, before = r @ z, rz
        p = z + rz / before * p
    return u


# --- energies ------------------------------------------------------------------------------------


def point_nll(net: nn.Module, x: Tensor, y: Tensor, v: Tensor) -> Tensor:
    return nll(functional_call(net, by_name(net, v), (x,)), y)


def samples_of(noise: Tensor, v: Tensor) -> list[Tensor]:
    """The drawn weights, sample by sample."""
    m, rho = v.chunk(2)
    scale = (rho / 2).exp()
    return [m + scale * epsilon for epsilon in noise]


def expected_nll(net: nn.Module, x: Tensor, y: Tensor, noise: Tensor, v: Tensor) -> Tensor:
    return torch.stack([point_nll(net, x, y, w) for w in samples_of(noise, v)]).mean()


def sampled_outputs(net: nn.Module, x: Tensor, noise: Tensor, v: Tensor) -> Tensor:
    return torch.stack([functional_call(net, by_name(net, w), (x,)) for w in samples_of(noise, v)])


def kl(v: Tensor, theta: Tensor) -> Tensor:
    m, rho = theta.chunk(2)
    m_t, rho_t = v.chunk(2)
    terms = (rho_t - rho).exp() + (m_t - m).square() * (-rho).exp() - 1 + rho - rho_t
    return terms.sum() / 2


def log_hyper_prior(theta: Tensor) -> Tensor:
    """log N(m; 0, 1)·Gamma(1/d; 1, 0.01)."""
    m, rho = theta.chunk(2)
    normal = -(m.square() + math.log(2 * math.pi)) / 2
    return (normal + math.log(GAMMA_RATE) - GAMMA_RATE * (-rho).exp()).sum()


# --- vectors and names ---------------------------------------------------------------------------


def leaf(v: Tensor) -> Tensor:
    return v.detach().requires_grad_()


def means(net: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in net.parameters()])


def prior(net: nn.Module, case: Case) -> Tensor:
    m = means(net)
    return torch.cat([m, torch.full_like(m, case.log_var)])


def by_name(net: nn.Module, v: Tensor) -> dict[str, Tensor]:
    """A flat vector as tensors by parameter name, and log_var.NAME where it is twice as long."""
    named = list(net.named_parameters())
    sizes = [p.numel() for _, p in named]
    if v.numel() > sum(sizes):
        m, rho = v.chunk(2)
        return by_name(net, m) | {f"log_var.{n}": r for n, r in by_name(net, rho).items()}
    parts = zip(named, v.split(sizes), strict=True)
    return {name: part.view(p.shape) for (name, p), part in parts}
