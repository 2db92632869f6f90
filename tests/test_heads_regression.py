"""Heads for numbers in closed form: dense solutions, another library, finite differences."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import DotProduct
from torch import nn

import ibaml
from ibaml import MetaLearner, TaskBatch
from ibaml.gradient import Implicit
from ibaml.heads.gaussian import BeforeExamples
from ibaml.heads.prior import HeadPrior
from ibaml.heads.regression import RegressionPosterior, regression
from ibaml.solve.dual import DualNewton
from ibaml.weights import FullGaussian
from oracles import five_point


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def prior(kind: str, outputs: int, width: int) -> HeadPrior:
    low_rank = draw(width, 2) if "low rank" in kind else None
    rows = () if "tied" in kind else (outputs,)
    return HeadPrior(draw(*rows, width), 0.5 * draw(*rows, width, seed=1), low_rank)


KINDS = ["tied", "per output", "tied, low rank", "per output, low rank"]
SIZES = [(3, 7), (9, 4), (5, 5), (1, 3)]  # N < F, N > F, N = F, one example


def dense(belief: HeadPrior, features, targets, noise, beta, output):
    """Mean (F,) and covariance (F, F) of one output's weights in one task, in the primal; and what
    they were before."""
    start, log_var = (
        part if part.dim() == 1 else part[output] for part in (belief.mean, belief.log_var)
    )
    spread = torch.diag(log_var.exp())
    if belief.low_rank is not None:
        spread = spread + belief.low_rank @ belief.low_rank.T
    precision = torch.linalg.inv(spread)
    hessian = features.T @ features / (beta * noise) + precision
    right = features.T @ targets / (beta * noise) + precision @ start
    return torch.linalg.solve(hessian, right), torch.linalg.inv(hessian), start, spread


def gaussian_nll(y: torch.Tensor, mean: torch.Tensor, covariance: torch.Tensor) -> torch.Tensor:
    """−log N(y; mean, covariance), densely."""
    normal = torch.distributions.MultivariateNormal(mean, covariance)
    return -normal.log_prob(y)


def near(a: torch.Tensor, b: torch.Tensor, tol: float = 1e-8) -> bool:
    return bool(torch.allclose(a, b, atol=tol, rtol=tol))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("examples", "width"), SIZES)
@pytest.mark.parametrize("beta", [1.0, 0.1])
def test_the_dense_solution(kind, examples, width, beta):
    outputs, noise = 3, torch.tensor([0.3, 1.0, 0.05], dtype=torch.float64)
    belief = prior(kind, outputs, width)
    features, targets = draw(2, examples, width), draw(2, examples, outputs)
    query = draw(2, 6, width, seed=5)
    posterior = regression(belief, features, targets, noise, beta)
    mean, variance = posterior.moments(query)
    # a draw is linear in its noise, so unit noise gives a factor of the covariance
    unit = torch.eye(sum(posterior.noise_sizes()), dtype=torch.float64).expand(2, -1, -1)
    factor = posterior.sample(unit) - posterior.mean_weights()[:, None]
    for t in range(2):
        for c in range(outputs):
            weights, covariance, start, spread = dense(
                belief, features[t], targets[t, :, c], noise[c], beta, c
            )
            assert near(posterior.mean_weights()[t, c], weights)
            assert near(posterior.weight_variances()[t, c], covariance.diagonal())
            assert near(mean[t, :, c], query[t] @ weights)
            assert near(variance[t, :, c], ((query[t] @ covariance) * query[t]).sum(-1))
            assert near(factor[t, :, c].T @ factor[t, :, c], covariance)
            marginal = features[t] @ spread @ features[t].T
            marginal = marginal + beta * noise[c] * torch.eye(examples, dtype=torch.float64)
            nll = gaussian_nll(targets[t, :, c], features[t] @ start, marginal)
            assert near(posterior.log_evidence[t, c], -nll)


@pytest.mark.parametrize(("examples", "width"), SIZES)
def test_scikit_learns_gaussian_process_with_the_same_kernel(examples, width):
    belief, noise = prior("tied", 1, width), 0.2
    features, targets = draw(1, examples, width), draw(1, examples)
    query = draw(1, 8, width, seed=3)
    posterior = regression(belief, features, targets, noise)
    mean, variance = posterior.moments(query)

    scale = (0.5 * belief.log_var).exp()
    x, y = (features[0] * scale).numpy(), (targets[0] - features[0] @ belief.mean).numpy()
    kernel = DotProduct(sigma_0=0.0, sigma_0_bounds="fixed")
    process = GaussianProcessRegressor(kernel, alpha=noise, optimizer=None).fit(x, y)
    theirs, deviation = process.predict((query[0] * scale).numpy(), return_std=True)
    theirs = theirs + (query[0] @ belief.mean).numpy()
    np.testing.assert_allclose(mean[0, :, 0], theirs, rtol=1e-8, atol=1e-8)
    np.testing.assert_allclose(variance[0, :, 0], deviation**2, rtol=1e-8, atol=1e-8)
    evidence = process.log_marginal_likelihood_value_
    np.testing.assert_allclose(posterior.log_evidence[0, 0], evidence, rtol=1e-8)


@pytest.mark.parametrize(("examples", "width"), SIZES)
@pytest.mark.parametrize("outputs", [1, 2])
def test_gradients_are_finite_differences(examples, width, outputs):
    belief = prior("per output, low rank", outputs, width)
    names = ["mean", "log_var", "low_rank", "features", "targets", "query", "log_noise", "log_beta"]
    start = [
        belief.mean, belief.log_var, belief.low_rank,
        draw(1, examples, width), draw(1, examples, outputs), draw(1, 4, width, seed=2),
        0.3 * draw(outputs), torch.tensor(-0.4, dtype=torch.float64),
    ]  # fmt: skip
    y = draw(1, 4, outputs, seed=8)

    def loss(mean, log_var, low_rank, features, targets, query, log_noise, log_beta):
        noise = (2 * log_noise).exp()
        head = HeadPrior(mean, log_var, low_rank)
        found = regression(head, features, targets, noise, log_beta.exp())
        center, variance = found.moments(query)
        spread = variance + noise
        predictive = ((y - center).square() / spread + spread.log()).sum()
        return predictive - found.log_evidence.sum() + found.weight_variances().sum()

    assert len(names) == len(start)
    leaves = [value.clone().requires_grad_() for value in start]
    gradients = torch.autograd.grad(loss(*leaves), leaves)
    for i, (name, gradient) in enumerate(zip(names, gradients, strict=True)):
        direction = draw(*gradient.shape, seed=4) if gradient.dim() else torch.ones_like(gradient)

        def at(h: float, i=i, direction=direction) -> float:
            moved = [v + h * direction if j == i else v for j, v in enumerate(start)]
            return float(loss(*moved))

        h = 1e-3
        slope = (8 * (at(h) - at(-h)) - (at(2 * h) - at(-2 * h))) / (12 * h)
        exact = float((gradient * direction).sum())
        assert math.isclose(slope, exact, rel_tol=1e-6, abs_tol=1e-6), name


@pytest.mark.parametrize("outputs", [1, 2])
@pytest.mark.parametrize("examples", [3, 12])  # fewer and more than the features
def test_the_meta_gradient_is_that_of_finite_differences(outputs, examples):
    learner, batch = _learner(outputs), _batch(outputs, examples)
    learner(batch).backward()
    named = dict(learner.named_parameters())
    assert {"likelihood.log_noise", "log_var.3/weight", "model.1.weight"} <= set(named)
    for name, parameter in named.items():
        gradient = parameter.grad.clone().reshape(-1)
        direction = draw(len(gradient), seed=6)
        direction = direction / direction.norm()
        slope = five_point(lambda: float(learner(batch).detach()), [parameter], direction, 1e-3)
        error = abs(slope - float(gradient @ direction))
        assert error <= 1e-6 * max(1.0, float(gradient.norm())), name


@pytest.mark.parametrize("outputs", [1, 2])
def test_the_meta_loss_is_the_density_of_a_dense_gaussian_process(outputs):
    """Independent outputs given the features: one Gaussian process an output, densely."""
    learner, batch = _learner(outputs), _batch(outputs, 5)
    noise = float(learner.likelihood.noise_variance().detach())
    head = learner.model[3]
    with torch.no_grad():
        phi = []
        for x in (batch.support_x, batch.query_x):
            hidden = learner.model[:3](x.flatten(0, 1)).unflatten(0, x.shape[:2])
            phi.append(nn.functional.pad(hidden, (0, 1), value=1.0))
        log_var = torch.cat([p.flatten() for n, p in learner.named_parameters() if "log_var" in n])
        rows = torch.cat([head.weight, head.bias[:, None]], -1)
        total = 0.0
        for t in range(len(batch)):
            for q in range(batch.query_x.shape[1]):
                f = torch.cat([phi[0][t], phi[1][t, q : q + 1]])
                joint = f @ torch.diag(log_var.exp()) @ f.T + noise * torch.eye(6).double()
                for c in range(outputs):
                    center = f @ rows[c]
                    asked = _column(batch.query_y[t], c)[q : q + 1]
                    y = torch.cat([_column(batch.support_y[t], c), asked])
                    total += float(gaussian_nll(y, center, joint))
                    total -= float(gaussian_nll(y[:5], center[:5], joint[:5, :5]))
        expected = total / (len(batch) * batch.query_x.shape[1])
        assert math.isclose(float(learner(batch)), expected, rel_tol=1e-9)
        found = learner.adapt_all(batch).nll(batch.query_x, batch.query_y)
        assert math.isclose(float(found.mean()), expected, rel_tol=1e-9)


def test_prediction_is_mean_and_variance_with_noise():
    learner, batch = _learner(1), _batch(1, 5)
    posteriors = learner.adapt_all(batch)
    mean, variance = posteriors.predict(batch.query_x)
    assert mean.shape == variance.shape == batch.query_y.shape
    noise = learner.likelihood.noise_variance()
    drawn = posteriors.outputs(batch.query_x, 20_000, torch.Generator().manual_seed(0))[..., 0]
    assert torch.allclose(drawn.mean(1), mean, atol=0.05)
    assert torch.allclose(drawn.var(1), variance - noise, rtol=0.05)
    density = torch.distributions.Normal(mean, variance.sqrt()).log_prob(batch.query_y)
    assert near(posteriors.nll(batch.query_x, batch.query_y), -density)


@pytest.mark.parametrize("kind", KINDS)
def test_without_examples_the_prior_is_the_posterior(kind):
    belief, query = prior(kind, 2, 4), draw(3, 5, 4)
    posterior = regression(belief, draw(3, 0, 4), draw(3, 0, 2), 0.1)
    before = BeforeExamples(belief, 3, 2)
    for one, other in zip(posterior.moments(query), before.moments(query), strict=True):
        assert near(one, other)
    assert near(posterior.mean_weights(), before.mean_weights().expand(3, -1, -1))
    assert near(posterior.weight_variances(), before.weight_variances())
    assert (posterior.log_evidence == 0).all()


def test_a_learner_without_examples_predicts_by_its_prior():
    learner, query = _learner(1), draw(6, 2, seed=1)
    posterior = learner.adapt(torch.empty(0, 2, dtype=torch.float64), torch.empty(0).double())
    mean, variance = posterior.predict(query)
    with torch.no_grad():
        assert near(mean, learner.model(query)[:, 0])
        features = nn.functional.pad(learner.model[:3](query), (0, 1), value=1.0)
        log_var = torch.cat([p.flatten() for n, p in learner.named_parameters() if "log_var" in n])
        noise = learner.likelihood.noise_variance()
        assert near(variance, features.square() @ log_var.exp() + noise)


def test_one_task_that_cannot_be_solved_leaves_the_others_alone():
    belief = HeadPrior(torch.zeros(2).double(), torch.zeros(2).double())
    features, targets = draw(2, 3, 2), draw(2, 3)
    features[0, 0] = math.inf
    posterior = regression(belief, features, targets, 0.1)
    alone = regression(belief, features[1:], targets[1:], 0.1)
    assert not posterior.mean_weights()[0].isfinite().any()
    assert near(posterior.mean_weights()[1:], alone.mean_weights())


@pytest.mark.parametrize(
    ("features", "targets", "noise", "message"),
    [
        ((3, 2), (3,), 1.0, r"features must be \(T, N, F\)"),
        ((1, 3, 2), (1, 4), 1.0, r"got \(1, 3, 2\) and \(1, 4, 1\)"),
        ((1, 3, 2), (1, 3, 2), [1.0, 1.0, 1.0], r"noise_variance must be a number or \(2,\)"),
    ],
)
def test_wrong_shapes_are_refused_by_name(features, targets, noise, message):
    belief = HeadPrior(torch.zeros(2), torch.zeros(2))
    with pytest.raises(ValueError, match=message):
        regression(belief, torch.zeros(features), torch.zeros(targets), torch.tensor(noise))


# --- what must hold for all numbers ---------------------------------------------------------------

NUMBERS = st.tuples(
    st.integers(0, 10_000),
    st.integers(1, 8),  # examples
    st.integers(1, 6),  # features
    st.floats(-3.0, 1.0),  # log σ
)
HYPOTHESIS = settings(max_examples=40, deadline=None)


def _problem(numbers) -> tuple[HeadPrior, torch.Tensor, torch.Tensor, float, RegressionPosterior]:
    seed, examples, width, log_noise = numbers
    belief = HeadPrior(draw(width, seed=seed), draw(width, seed=seed + 1))
    features = draw(1, examples, width, seed=seed + 2)
    targets = draw(1, examples, 1, seed=seed + 3)
    noise = math.exp(2 * log_noise)
    return belief, features, targets, noise, regression(belief, features, targets, noise)


@HYPOTHESIS
@given(NUMBERS)
def test_examples_only_make_surer(numbers):
    belief, features, targets, noise, posterior = _problem(numbers)
    query = draw(1, 5, features.shape[-1], seed=3)
    fewer = regression(belief, features[:, :-1], targets[:, :-1], noise)
    before = belief.gram_diagonal(query).mT
    variances = [before, fewer.moments(query)[1], posterior.moments(query)[1]]
    for more, less in pairwise(variances):
        assert (less >= 0).all()
        assert (less <= more + 1e-9 * (1 + more)).all()


@HYPOTHESIS
@given(NUMBERS)
def test_the_order_of_examples_does_not_matter(numbers):
    belief, features, targets, noise, posterior = _problem(numbers)
    again = regression(belief, features.flip(1), targets.flip(1), noise)
    query = draw(1, 5, features.shape[-1], seed=3)
    for one, other in zip(posterior.moments(query), again.moments(query), strict=True):
        assert near(one, other, 1e-7)
    assert near(posterior.log_evidence, again.log_evidence, 1e-7)


@HYPOTHESIS
@given(NUMBERS)
def test_the_evidence_is_the_product_of_predictions_one_after_another(numbers):
    belief, features, targets, noise, posterior = _problem(numbers)
    total = 0.0
    for n in range(features.shape[1]):
        before = regression(belief, features[:, :n], targets[:, :n], noise)
        mean, variance = before.moments(features[:, n : n + 1])
        total += torch.distributions.Normal(mean, (variance + noise).sqrt()).log_prob(
            targets[:, n : n + 1]
        )
    assert near(posterior.log_evidence[0, 0], total[0, 0, 0], 1e-7)


@HYPOTHESIS
@given(NUMBERS, st.floats(0.01, 1000.0))
def test_units_of_the_target_do_not_matter(numbers, unit):
    belief, features, targets, noise, posterior = _problem(numbers)
    scaled = HeadPrior(unit * belief.mean, belief.log_var + 2 * math.log(unit))
    again = regression(scaled, features, unit * targets, unit**2 * noise)
    query = draw(1, 5, features.shape[-1], seed=3)
    mean, variance = posterior.moments(query)
    other_mean, other_variance = again.moments(query)
    assert near(other_mean / unit, mean, 1e-7)
    assert near(other_variance / unit**2, variance, 1e-7)


def _learner(outputs: int) -> MetaLearner:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, outputs)).double()
    learner = MetaLearner(
        net, FullGaussian(), solver=DualNewton(), gradient=Implicit(), objective="predictive",
        likelihood=ibaml.Gaussian(0.4, learn=True), adapt="head", beta=1.0, init_log_var=-0.5,
    )  # fmt: skip
    with torch.no_grad():
        for p in (p for n, p in learner.named_parameters() if "log_var" in n):
            p += 0.3 * draw(*p.shape)
    return learner


def _batch(outputs: int, examples: int) -> TaskBatch:
    shape = () if outputs == 1 else (outputs,)
    return TaskBatch(
        draw(2, examples, 2), draw(2, examples, *shape),
        draw(2, 6, 2, seed=1), draw(2, 6, *shape, seed=1),
    )  # fmt: skip


def _column(targets: torch.Tensor, c: int) -> torch.Tensor:
    return targets if targets.dim() == 1 else targets[:, c]
