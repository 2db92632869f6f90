"""Simple heads against scikit-learn and closed forms."""

import itertools
import math

import torch

from ibaml import Reason
from ibaml.heads.baselines import (
    gaussian_process,
    logistic_regression,
    nearest_centroid,
    protonet,
    ridge,
)
from ibaml.heads.one_vs_each import one_vs_each, predict_one_vs_each, probit_one_vs_each
from ibaml.heads.points import gaussian_points, place
from ibaml.heads.prior import HeadPrior


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


SUPPORT, QUERY = draw(2, 9, 5), draw(2, 4, 5, seed=1)
LABELS = torch.tensor([[0, 1, 2, 0, 0, 1, 2, 2, 2], [2, 2, 1, 1, 0, 0, 1, 0, 2]])


def test_protonet_is_the_squared_distance_to_class_means():
    logits = protonet(SUPPORT, LABELS, QUERY, 3)
    for t in range(2):
        means = torch.stack([SUPPORT[t, LABELS[t] == c].mean(0) for c in range(3)])
        assert torch.allclose(logits[t], -torch.cdist(QUERY[t], means).square())


def test_nearest_centroid_is_the_squared_distance_on_the_sphere():
    center = draw(5, seed=4)
    logits = nearest_centroid(SUPPORT, LABELS, QUERY, 3, center)
    for t in range(2):
        x, q = SUPPORT[t] - center, QUERY[t] - center
        x, q = x / x.norm(dim=-1, keepdim=True), q / q.norm(dim=-1, keepdim=True)
        means = torch.stack([x[LABELS[t] == c].mean(0) for c in range(3)])
        means = means / means.norm(dim=-1, keepdim=True)
        assert torch.allclose(logits[t], -torch.cdist(q, means).square())


def test_ridge_is_scikit_learns():
    from sklearn import linear_model

    logits = ridge(SUPPORT, LABELS, QUERY, 3, strength=0.3)
    for t in range(2):
        target = torch.nn.functional.one_hot(LABELS[t], 3).double()
        theirs = linear_model.Ridge(alpha=0.3, fit_intercept=False).fit(SUPPORT[t], target)
        assert torch.allclose(logits[t], torch.as_tensor(theirs.predict(QUERY[t])), atol=1e-10)


def test_gaussian_process_is_scikit_learns():
    from sklearn import gaussian_process as process

    kernels = process.kernels
    gram, cross = SUPPORT @ SUPPORT.mT, SUPPORT @ QUERY.mT
    answer = gaussian_process(gram, LABELS, cross, QUERY.square().sum(-1), 3, noise=0.2)
    for t in range(2):
        evidence = 0.0
        for c in range(3):
            theirs = process.GaussianProcessRegressor(
                kernels.DotProduct(sigma_0=0.0, sigma_0_bounds="fixed"), alpha=0.2, optimizer=None
            ).fit(SUPPORT[t], 2.0 * (LABELS[t] == c) - 1)
            mean, std = theirs.predict(QUERY[t], return_std=True)
            evidence += theirs.log_marginal_likelihood_value_
            assert torch.allclose(answer.mean[t, :, c], torch.as_tensor(mean), atol=1e-8)
            assert torch.allclose(answer.variance[t].sqrt(), torch.as_tensor(std), atol=1e-8)
        assert math.isclose(answer.evidence[t], evidence, rel_tol=1e-8)


def test_gaussian_process_answers_by_the_density_of_each_class_labels():
    answer = gaussian_process(
        SUPPORT @ SUPPORT.mT, LABELS, SUPPORT @ QUERY.mT, QUERY.square().sum(-1), 3, noise=0.2
    )
    density = torch.distributions.Normal(answer.mean, (answer.variance + 0.2).sqrt()[..., None])
    codes = 2 * torch.eye(3, dtype=torch.float64) - 1
    expected = torch.stack([density.log_prob(code).sum(-1) for code in codes], -1).softmax(-1)
    assert torch.allclose(answer.logits(0.2).softmax(-1), expected, atol=1e-12)


def test_logistic_regression_is_scikit_learns():
    from sklearn import linear_model

    logits = logistic_regression(SUPPORT, LABELS, QUERY, 3, strength=0.7)
    for t in range(2):
        theirs = linear_model.LogisticRegression(C=0.7, tol=1e-10, max_iter=10_000)
        theirs.fit(SUPPORT[t], LABELS[t])
        expected = torch.as_tensor(theirs.predict_proba(QUERY[t]))
        assert torch.allclose(logits[t].softmax(-1), expected, atol=2e-5)


def test_simple_heads_are_differentiable_in_the_features():
    heads = (protonet, nearest_centroid, ridge, logistic_regression)
    for head in heads:

        def logits(support, query, head=head):
            return head(support, LABELS[:1], query, 3).log_softmax(-1)

        inputs = (SUPPORT[:1].clone().requires_grad_(), QUERY[:1, :2].clone().requires_grad_())
        assert torch.autograd.gradcheck(logits, inputs, eps=1e-5, atol=1e-6)


def one_vs_each_problem():
    prior = HeadPrior(0.3 * draw(2), 0.5 * draw(2, seed=1))
    return prior, draw(1, 3, 2, seed=5), torch.tensor([[0, 2, 2]])


def test_one_vs_each_bounds_the_evidence_and_is_near_the_posterior():
    prior, features, labels = one_vs_each_problem()
    answer = one_vs_each(prior, features, labels, 3)
    assert answer.posterior.reason.item() == Reason.CONVERGED
    weights = prior.mean + (0.5 * prior.log_var).exp() * draw(2**18, 3, 2, seed=6)
    logits = features[0] @ weights.mT  # (S, N, C)
    gap = logits.gather(-1, labels[0].expand(2**18, -1)[..., None]) - logits
    others = 1 - torch.nn.functional.one_hot(labels[0], 3).double()
    log_p = (others * torch.nn.functional.logsigmoid(gap)).sum((-2, -1))
    exact = log_p.logsumexp(0) - math.log(2**18)
    assert exact - 0.5 < answer.evidence.item() < exact
    mean, covariance = answer.posterior.moments(features)
    share = log_p.softmax(0)[:, None, None]
    expected = (share * logits).sum(0)
    assert (mean[0] - expected).abs().max() < 0.1 * expected.abs().max()
    spread = (share * (logits - expected).square()).sum(0)
    ratio = covariance[0].diagonal(dim1=-2, dim2=-1) / spread
    assert ratio.min() > 0.75  # mean field is too sure, by this much
    assert ratio.max() < 1.05


def test_one_vs_each_bound_is_the_best_of_its_kind():
    """Against Jaakkola and Jordan's bound, a Gaussian integral over all weights, for any c."""
    prior, features, labels = one_vs_each_problem()
    answer = one_vs_each(prior, features, labels, 3).evidence[0]
    rows = [
        torch.kron(torch.eye(3, dtype=torch.float64)[y] - torch.eye(3, dtype=torch.float64)[j], x)
        for x, y in zip(features[0], labels[0].tolist(), strict=True)
        for j in range(3)
        if j != y
    ]
    gaps = torch.stack(rows)  # ψ = gaps @ weights
    mean, precision = prior.mean.repeat(3), (-prior.log_var).exp().repeat(3).diag()

    def bound(c: torch.Tensor) -> torch.Tensor:
        weight = (c / 2).tanh() / (2 * c)
        after = precision + gaps.T @ (weight[:, None] * gaps)
        lean = precision @ mean + gaps.T @ torch.full_like(c, 0.5)
        integral = 0.5 * (
            lean @ torch.linalg.solve(after, lean)
            - mean @ precision @ mean
            + precision.logdet()
            - after.logdet()
        )
        factor = torch.nn.functional.logsigmoid(c) - c / 2 + weight * c**2 / 2
        return integral + factor.sum()

    c = torch.ones(6, dtype=torch.float64, requires_grad=True)
    assert bound(c) < answer
    optimizer = torch.optim.LBFGS([c], max_iter=100, line_search_fn="strong_wolfe")

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        value = -bound(c)
        value.backward()
        return value

    optimizer.step(loss)
    assert abs(bound(c) - answer) < 1e-8


def test_one_vs_each_rounds_only_raise_the_bound():
    prior, features, labels = one_vs_each_problem()
    bounds = [one_vs_each(prior, features, labels, 3, rounds=n).evidence.item() for n in range(8)]
    assert all(b >= a - 1e-12 for a, b in itertools.pairwise(bounds))
    short = one_vs_each(prior, features, labels, 3, rounds=2).posterior
    assert short.reason.item() == Reason.STEPS


def test_one_vs_each_evidence_has_the_right_gradient():
    prior, features, labels = one_vs_each_problem()
    inputs = [t.clone().requires_grad_() for t in (prior.mean, prior.log_var, features)]

    def evidence(mean, log_var, features):
        return one_vs_each(HeadPrior(mean, log_var), features, labels, 3, tol=1e-13).evidence

    assert torch.autograd.gradcheck(evidence, inputs, atol=1e-6)


def test_one_vs_each_probabilities():
    mean, covariance = draw(6, 4), 0.5 * torch.eye(4, dtype=torch.float64).expand(6, 4, 4)
    p = predict_one_vs_each(mean, covariance)
    assert torch.allclose(p.sum(-1), torch.ones(6, dtype=torch.float64))
    assert (p.argmax(-1) == mean.argmax(-1)).all()
    two = predict_one_vs_each(mean[:, :2], 0 * mean[:, :2])
    assert torch.allclose(two, mean[:, :2].softmax(-1), atol=1e-6)  # with two it is the softmax


def test_probit_one_vs_each_is_near_the_expectation_of_every_comparison():
    root = draw(5, 4, 4)
    mean, covariance = 2 * draw(5, 4), root @ root.mT
    answer = probit_one_vs_each(mean, covariance)
    points = gaussian_points(4096, 4, torch.float64)
    logits = place(mean, covariance, points)
    won = (logits[..., :, None] - logits[..., None, :]).sigmoid().mean(-3)  # E σ(z_c − z_j)
    expected = (won + 0.5 * torch.eye(4, dtype=torch.float64)).prod(-1)
    assert (answer.exp() - expected).abs().max() < 0.03
    certain = probit_one_vs_each(mean, 0 * covariance).softmax(-1)
    assert torch.allclose(certain, predict_one_vs_each(mean, 0 * covariance), atol=1e-6)
