"""MAML by TorchOpt's differentiable SGD, iMAML by its implicit differentiation with CG."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from contenders.case import Case, Gradients, Step, gradients_of, nll

Weights = tuple[Tensor, ...]


def prepare(case: Case) -> Step:
    import torchopt

    net = case.own_net()
    return partial({"maml": maml, "imaml": imaml}[case.method], torchopt, case, net)


def maml(torchopt: Any, case: Case, net: nn.Module) -> Gradients:
    net.zero_grad()
    optimizer = torchopt.MetaSGD(net, lr=case.lr)
    start = torchopt.extract_state_dict(net, by="reference")
    fresh = torchopt.extract_state_dict(optimizer, by="reference")
    for x, y, query_x, query_y in case.tasks():
        for _ in range(case.steps):
            optimizer.step(nll(net(x), y))
        loss = nll(net(query_x), query_y) / len(case.batch)
        torchopt.recover_state_dict(net, start)
        torchopt.recover_state_dict(optimizer, fresh)
        loss.backward()
    return gradients_of(net)


def imaml(torchopt: Any, case: Case, net: nn.Module) -> Gradients:
    net.zero_grad()
    names = [name for name, _ in net.named_parameters()]
    sgd = torchopt.sgd(lr=case.lr)
    solve = torchopt.linear_solve.solve_cg(maxiter=case.cg_steps, rtol=0.0)

    def outputs(w: Weights, x: Tensor) -> Tensor:
        return functional_call(net, dict(zip(names, w, strict=True)), (x,))

    def energy(w: Weights, theta: Weights, x: Tensor, y: Tensor) -> Tensor:
        squares = sum((a - b).square().sum() for a, b in zip(w, theta, strict=True))
        return nll(outputs(w, x), y) + case.lam / 2 * squares

    @torchopt.diff.implicit.custom_root(torch.func.grad(energy), argnums=1, solve=solve)
    def solved(w: Weights, theta: Weights, x: Tensor, y: Tensor) -> Weights:
        state = sgd.init(w)
        for _ in range(case.steps):
            gradients = torch.func.grad(energy)(w, theta, x, y)
            updates, state = sgd.update(gradients, state, params=w, inplace=True)
            w = torchopt.apply_updates(w, updates, inplace=False)
        return w

    theta = tuple(net.parameters())
    start = tuple(p.detach() for p in theta)
    for x, y, query_x, query_y in case.tasks():
        w = solved(start, theta, x, y)
        (nll(outputs(w, query_x), query_y) / len(case.batch)).backward()
    return gradients_of(net)
