"""Predictions from Gaussian logits against a million draws, and what the points promise."""

import pytest
import torch

from ibaml.heads.points import (
    axis_points,
    gaussian_points,
    log_predictive,
    predict,
    predict_mean_field,
    predict_probit,
)


def problem(classes: int, examples: int = 12) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(classes)
    mean = 2 * torch.randn(examples, classes, generator=generator, dtype=torch.float64)
    root = torch.randn(examples, classes, classes, generator=generator, dtype=torch.float64)
    size = torch.linspace(0.2, 2, examples, dtype=torch.float64)  # standard deviations
    covariance = root @ root.mT / classes + 0.1 * torch.eye(classes, dtype=torch.float64)
    return mean, covariance * size.square()[:, None, None]


def drawn(mean: torch.Tensor, covariance: torch.Tensor, temperature: float) -> torch.Tensor:
    """E softmax(t·z) by 2²⁰ pseudo-random draws."""
    generator = torch.Generator().manual_seed(7)
    lower = torch.linalg.cholesky(covariance)
    total = torch.zeros_like(mean)
    for _ in range(64):  # a piece at a time
        noise = torch.randn(2**14, mean.shape[-1], generator=generator, dtype=mean.dtype)
        total += (temperature * (mean[:, None] + noise @ lower.mT)).softmax(-1).sum(1)
    return total / 2**20


@pytest.mark.parametrize("classes", [2, 5, 10, 20])
def test_within_two_thousandths_of_a_million_draws(classes):
    mean, covariance = problem(classes, examples=2)
    expected = drawn(mean, covariance, 0.8)
    assert (predict(mean, covariance, 0.8) - expected).abs().max() < 2e-3
    assert (predict(mean, covariance, 0.8, count=1024) - expected).abs().median() < 2e-3


def test_a_diagonal_means_the_same_as_its_matrix():
    mean, covariance = problem(4)
    variance = covariance.diagonal(dim1=-2, dim2=-1)
    for rule in (predict, predict_probit, predict_mean_field):
        full = rule(mean, torch.diag_embed(variance), 1.3)
        assert torch.allclose(rule(mean, variance, 1.3), full, atol=1e-7)


def test_one_query_alone_gets_the_same_answer_to_the_last_bit():
    mean, covariance = problem(5)
    together = predict(mean, covariance)
    assert torch.equal(predict(mean[3], covariance[3]), together[3])
    assert torch.equal(predict(mean.flip(0), covariance.flip(0)), together.flip(0))


@pytest.mark.parametrize("rule", [predict, predict_probit, predict_mean_field])
def test_without_spread_all_are_the_softmax(rule):
    mean, covariance = problem(6)
    expected = (2 * mean).softmax(-1)
    assert torch.allclose(rule(mean, 1e-14 * covariance, 2.0), expected, atol=1e-6)
    assert torch.allclose(rule(mean, 0 * covariance, 2.0), expected, atol=1e-6)


@pytest.mark.parametrize(("rule", "worst"), [(predict_probit, 0.12), (predict_mean_field, 0.09)])
def test_approximations_by_name_are_a_few_percent_off(rule, worst):
    mean, covariance = problem(5)
    p = rule(mean, covariance)
    assert torch.allclose(p.sum(-1), torch.ones_like(p[:, 0]))
    off = (p - predict(mean, covariance)).abs()
    assert 1e-4 < off.median() < 0.03
    assert off.max() < worst


def test_points_have_the_moments_of_a_standard_normal():
    points = gaussian_points(256, 7, torch.float64)
    assert points.mean(0).abs().max() < 1e-14
    assert torch.allclose(points.T @ points / 256, torch.eye(7, dtype=torch.float64), atol=1e-13)
    cubature = axis_points(7, torch.float64)
    assert torch.allclose(cubature.T @ cubature / 14, torch.eye(7, dtype=torch.float64))


def test_points_are_the_same_at_every_call_and_nobody_can_spoil_them():
    first = gaussian_points(64, 3)
    kept = first.clone()
    first.zero_()
    assert torch.equal(gaussian_points(64, 3), kept)


def test_too_few_points_are_refused():
    with pytest.raises(ValueError, match=r"count must be even and at least 2·dimension = 20"):
        gaussian_points(18, 10)


def test_a_covariance_of_another_shape_is_refused():
    with pytest.raises(ValueError, match=r"covariance must be \(4, 3, 3\), or its diagonal"):
        predict_probit(torch.zeros(4, 3), torch.zeros(4, 2))


def test_gradients_against_finite_differences():
    mean, covariance = problem(3, examples=2)
    root = torch.linalg.cholesky(covariance).requires_grad_()
    temperature = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)

    def loss(mean, root, temperature):
        return log_predictive(mean, root @ root.mT, temperature, count=32)

    assert torch.autograd.gradcheck(loss, (mean.requires_grad_(), root, temperature), atol=1e-6)


def test_a_covariance_that_rounding_left_indefinite_still_has_an_answer():
    mean = torch.tensor([[1.0, 0.0, -1.0]]).expand(2, -1)
    low = torch.ones(3, 3)
    covariance = torch.stack([low - 1e-4 * torch.eye(3), low]).requires_grad_()
    p = predict(mean, covariance)
    assert (p - mean.softmax(-1)).abs().max() < 0.02  # a common shift of logits changes nothing
    (slope,) = torch.autograd.grad(p[:, 0].sum(), covariance)
    assert slope.isfinite().all()
