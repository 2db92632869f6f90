"""Second-order MAML by facebookresearch/higher, as in its MAML example."""

from __future__ import annotations

import torch

from contenders.case import Case, Gradients, Step, gradients_of, nll


def prepare(case: Case) -> Step:
    import higher

    net = case.own_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=case.lr)

    def step() -> Gradients:
        net.zero_grad()
        for x, y, query_x, query_y in case.tasks():
            with higher.innerloop_ctx(net, optimizer, copy_initial_weights=False) as (fast, inner):
                for _ in range(case.steps):
                    inner.step(nll(fast(x), y))
                (nll(fast(query_x), query_y) / len(case.batch)).backward()
        return gradients_of(net)

    return step
