"""Other beliefs than the diagonal Gaussian, and a learned β: gradients against finite differences
of the re-solved problem and dense matrices, and everything a learner does with them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import ibaml
from ibaml import (
    Curvature, Dense, DiagonalGaussian, FirstOrder, Gaussian, GradientDescent, Implicit,
    LowRankGaussian, MetaLearner, Reptile, Unrolled,
)  # fmt: skip
from oracles import (
    F64,
    converged,
    dense_gradients,
    finite_difference_errors,
    gradients,
    relative,
    smallest_eigenvalue,
)
from problems import class_batch, linear_model, mlp_model, regression_batch
from triangular import FullGaussian

BELIEFS = {
    "diagonal": DiagonalGaussian(),
    "rank 1": LowRankGaussian(1),
    "rank 2": LowRankGaussian(2),
    "triangular": FullGaussian(),
}


def learner(belief, model=None, gradient=None, **options):
    options = {"samples": 12, "init_log_var": -1.0, **options}
    gradient = gradient or Implicit(Curvature("energy"), Dense())
    options.setdefault("solver", converged())
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
        model, batch, adapt = linear_model(), regression_batch(), "all"
        likelihood = Gaussian(0.5, learn=True)
    else:
        model, batch = mlp_model(ways=2), class_batch((3,), tasks=1, ways=2)
        adapt, likelihood = "head", None
    made = learner(
        BELIEFS[name], model, adapt=adapt, likelihood=likelihood, beta=0.5, learn_beta=True
    )
    found = gradients(made, batch)
    assert made.diagnostics.record.solution.gradient.norm(dim=-1).max() <= 1e-12
    assert smallest_eigenvalue(made, batch) > 0
    dense = dense_gradients(made, batch)
    for block, g in found.items():
        assert relative(g, dense[block]) <= 1e-9, block
    errors = finite_difference_errors(made, batch)
    assert {"m", "beta"} < set(errors)
    assert max(errors.values()) <= 1e-6, errors
