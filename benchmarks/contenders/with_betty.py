"""iMAML by betty-ml: an inner and an outer `ImplicitProblem`, hypergradient of type "cg".

Betty's CG makes the next direction from the residual before the last one, so that it is CG for one
step and something else from the second on (betty/hypergradient/cg.py, version 0.2.1): its gradient
is checked with L = 1, and timed with the L of the others, the same number of products.
"""

from __future__ import annotations

import copy
import logging
from itertools import cycle
from typing import Any

import torch
from torch import Tensor

from contenders.case import Case, Gradients, Step, nll


def prepare(case: Case) -> Step:
    from betty.configs import Config, EngineConfig
    from betty.engine import Engine
    from betty.logging.logger_base import get_logger
    from betty.problems import ImplicitProblem

    get_logger().setLevel(logging.WARNING)
    tasks = list(case.tasks())
    gradients: Gradients = {}

    class Outer(ImplicitProblem):
        def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
            return nll(self.inner(batch[0]), batch[1])

        def custom_optimizer_step(self) -> None:
            named = self.module.named_parameters()
            gradients.update({n: p.grad.detach() for n, p in named if p.grad is not None})

    class Inner(ImplicitProblem):
        def on_inner_loop_start(self) -> None:
            self.module.load_state_dict(self.outer.module.state_dict())

        def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
            pairs = zip(self.module.parameters(), self.outer.module.parameters(), strict=True)
            squares = sum((w - theta).square().sum() for w, theta in pairs)
            return nll(self.module(batch[0]), batch[1]) + case.lam / 2 * squares

    def problem(kind: Any, name: str, config: Any, batches: list[Any]) -> Any:
        net = copy.deepcopy(case.own_net())
        optimizer = torch.optim.SGD(net.parameters(), lr=case.lr)
        # an iterable that never ends, since every loader is asked for its iterator once
        loader = cycle(batches)
        return kind(name, config, module=net, optimizer=optimizer, train_data_loader=loader)

    cg = Config(type="cg", unroll_steps=case.steps, cg_iterations=case.cg_steps, cg_alpha=1.0)
    every = Config(gradient_accumulation=len(tasks), retain_graph=True)
    inner_batches = [(x, y) for x, y, _, _ in tasks for _ in range(case.steps)]
    inner = problem(Inner, "inner", cg, inner_batches)
    outer = problem(Outer, "outer", every, [(x, y) for _, _, x, y in tasks])
    strategy = "gpu" if case.batch.support_x.is_cuda else "cpu"
    engine = Engine(
        [outer, inner],
        EngineConfig(train_iters=len(tasks) * case.steps, strategy=strategy),
        {"u2l": {outer: [inner]}, "l2u": {inner: [outer]}},
    )

    def step() -> Gradients:
        engine.run()
        return dict(gradients)

    return step
