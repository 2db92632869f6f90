"""Are the heads of the literature, to compare with, what their papers say, and do they train?"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import ibaml
from ibaml.heads.dual import laplace
from ibaml.heads.prior import HeadPrior
from ibaml.heads.simple import simple_head
from ibaml.words import SIMPLE_HEADS

LABELS = torch.tensor([[0, 1, 2, 1, 0, 2], [2, 2, 1, 0, 1, 0]])


def task(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Support and query features in float64, a constant 1 last."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(2, 6, 4, dtype=torch.float64, generator=generator)
    q = torch.randn(2, 3, 4, dtype=torch.float64, generator=generator)
    return nn.functional.pad(x, (0, 1), value=1.0), nn.functional.pad(q, (0, 1), value=1.0)


def prior() -> HeadPrior:
    mean = torch.linspace(-0.2, 0.3, 5, dtype=torch.float64)
    return HeadPrior(mean, torch.linspace(-1, 0.5, 5, dtype=torch.float64))


def outputs(kind: str, x: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    return simple_head(kind, prior(), x, LABELS, 3, 0.7, tol=1e-12).moments(q)[0]  # type: ignore[arg-type]


def test_prototypes_are_the_squared_distances():
    x, q = task()
    found = outputs("prototypes", x, q).log_softmax(-1)
    for t in range(2):
        centers = torch.stack([x[t][LABELS[t] == c].mean(0) for c in range(3)])
        expected = -torch.cdist(q[t], centers).square()
        torch.testing.assert_close(found[t], expected.log_softmax(-1), rtol=0, atol=1e-12)


def test_ridge_is_the_minimum_of_its_least_squares():
    x, _ = task()
    rows = simple_head("ridge", prior(), x, LABELS, 3, 0.7).mean_weights()
    m, precision = prior().mean, (-prior().log_var).exp()
    for t in range(2):
        target = nn.functional.one_hot(LABELS[t], 3).double()
        normal = x[t].mT @ x[t] + 0.7 * torch.diag(precision)
        expected = m + torch.linalg.solve(normal, x[t].mT @ (target - x[t] @ m[:, None])).mT
        torch.testing.assert_close(rows[t], expected, rtol=0, atol=1e-11)


def test_gp_agrees_with_scikit_learn():
    sklearn = pytest.importorskip("sklearn.gaussian_process")
    x, q = task()
    flat = HeadPrior(torch.zeros(5, dtype=torch.float64), torch.zeros(5, dtype=torch.float64))
    mean, variance = simple_head("gp", flat, x, LABELS, 3, 0.7).moments(q)
    kernel = sklearn.kernels.DotProduct(sigma_0=0.0, sigma_0_bounds="fixed")
    for c in range(3):
        gp = sklearn.GaussianProcessRegressor(kernel, alpha=0.7, optimizer=None)
        gp.fit(x[0].numpy(), np.where(LABELS[0].numpy() == c, 1.0, -1.0))
        expected, deviation = gp.predict(q[0].numpy(), return_std=True)
        np.testing.assert_allclose(mean[0, :, c], expected, atol=1e-10)
        np.testing.assert_allclose(variance[0, :, c], deviation**2, atol=1e-10)


def test_point_is_the_mean_of_the_full_posterior():
    x, q = task()
    full = laplace(prior(), x, LABELS, 3, 0.7, tol=1e-12)
    torch.testing.assert_close(outputs("point", x, q), full.mean_logits(q), rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", SIMPLE_HEADS)
def test_the_meta_gradient_agrees_with_finite_differences(kind):
    x, q = task()
    x = x[..., :-1]  # the network adds the constant itself
    batch = ibaml.TaskBatch(x, LABELS, q[..., :-1], LABELS[:, :3])
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 3)).double()
    learner = ibaml.methods.ibaml(
        model,
        posterior=kind,
        likelihood=ibaml.Categorical("learned"),
        solver=ibaml.DualNewton(tol=1e-13),
    ).double()
    learner(batch).backward()
    for name, parameter in learner.named_parameters():
        if kind == "prototypes" and not name.startswith(("model", "likelihood")):
            assert parameter.grad is None  # there is no prior
            continue
        direction = torch.randn_like(parameter)
        values = []
        for step in (1e-5, -1e-5):
            with torch.no_grad():
                parameter.add_(step * direction)
            values.append(float(learner(batch).detach()))
            with torch.no_grad():
                parameter.sub_(step * direction)
        expected = (values[0] - values[1]) / 2e-5
        assert parameter.grad is not None
        assert float((parameter.grad * direction).sum()) == pytest.approx(expected, abs=1e-8)


@pytest.mark.parametrize("kind", SIMPLE_HEADS)
def test_a_learner_and_its_posterior_are_saved(kind, tmp_path):
    model = ibaml.nn.mlp(4, 3)
    learner = ibaml.methods.ibaml(model, posterior=kind, likelihood=ibaml.Categorical("learned"))
    learner.save(tmp_path / "learner.ibaml")
    again = ibaml.load(tmp_path / "learner.ibaml")
    x, q = (part[0, :, :-1].float() for part in task())
    posterior = learner.adapt(x, LABELS[0])
    posterior.save(tmp_path / "posterior.ibaml")
    expected = posterior.predict_proba(q)
    torch.testing.assert_close(again.adapt(x, LABELS[0]).predict_proba(q), expected)
    loaded = ibaml.load_posterior(tmp_path / "posterior.ibaml")
    torch.testing.assert_close(loaded.predict_proba(q), expected)
    torch.testing.assert_close(posterior.module()(q), expected, rtol=0, atol=1e-5)


def test_prototypes_without_a_bias_are_refused():
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 3, bias=False))
    learner = ibaml.methods.ibaml(
        model, posterior="prototypes", likelihood=ibaml.Categorical("learned")
    )
    with pytest.raises(ValueError, match="prototypes need a head with a bias"):
        learner.adapt(torch.randn(6, 4), LABELS[0])
