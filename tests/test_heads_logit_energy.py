"""The logit-space E of a linear head against noise on its weights."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from ibaml import DiagonalGaussian, FirstOrder, GradientDescent, MetaLearner
from ibaml.energy import detached
from ibaml.heads.logit_energy import diagonal_kl, logit_energy
from ibaml.heads.points import axis_points, gaussian_points
from problems import class_batch


def problem(classes: int = 3, examples: int = 6, width: int = 4, tasks: int = 2):
    generator = torch.Generator().manual_seed(3)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    mean, std = draw(tasks, classes, width), (0.5 * draw(tasks, classes, width)).exp()
    labels = torch.randint(0, classes, (tasks, examples), generator=generator)
    prior = draw(width), 0.3 * draw(width)
    return mean, std, draw(tasks, examples, width), labels, *prior


def test_the_same_in_expectation_as_noise_on_the_weights():
    mean, std, features, labels, prior_mean, prior_log_var = problem(examples=4)
    generator = torch.Generator().manual_seed(1)
    nll = torch.zeros(2, dtype=torch.float64)
    rounds, draws = 50, 20_000  # 10⁶ draws of all weights
    for _ in range(rounds):
        noise = torch.randn(draws, *mean.shape, generator=generator, dtype=mean.dtype)
        logits = features @ (mean + std * noise).mT  # (S, T, N, C)
        right = labels.expand(draws, *labels.shape)[..., None]
        nll -= logits.log_softmax(-1).gather(-1, right).mean((0, 2, 3)) / rounds
    divergence = torch.distributions.kl_divergence(
        torch.distributions.Normal(mean, std),
        torch.distributions.Normal(prior_mean, (0.5 * prior_log_var).exp()),
    ).sum((-2, -1))
    expected = nll + 0.3 / 4 * divergence
    points = gaussian_points(2**14, 3, torch.float64)
    found = logit_energy(mean, std, features, labels, prior_mean, prior_log_var, points, beta=0.3)
    assert (found - expected).abs().max() < 3e-3  # the draws' own error is 1e-3
    assert torch.allclose(diagonal_kl(mean, std, prior_mean, prior_log_var), divergence)


@pytest.mark.parametrize("bias", [True, False])
def test_a_learners_energy_is_the_same_in_expectation_as_noise_on_the_weights(bias):
    """E of ``noise="outputs"`` as the solvers see it, against 10⁶ draws of the weights run through
    the network."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3, bias=bias)).double()
    learner = MetaLearner(
        model, DiagonalGaussian(), GradientDescent(1), FirstOrder(), adapt="head",
        noise="outputs", samples=2**13, beta=0.3, init_log_var=-1.0,
    )  # fmt: skip
    by_outputs, _ = learner.problem(class_batch(), 0)
    by_outputs = detached(by_outputs)
    assert by_outputs.points is not None
    generator = torch.Generator().manual_seed(2)
    n = by_outputs.layout.size
    v = torch.randn(2, 2 * n, generator=generator, dtype=torch.float64)
    rounds, draws = 100, 10_000
    loss = torch.zeros(2, dtype=torch.float64)
    for _ in range(rounds):
        noise = torch.randn(2, draws, n, generator=generator, dtype=torch.float64)
        loss += replace(by_outputs, points=None, noise=noise).loss(v) / rounds
    found = by_outputs(v)
    assert (found - loss - by_outputs.penalty(v)).abs().max() < 3e-3


@pytest.mark.parametrize("kind", ["axes", "sobol"])
def test_convex_in_mean_and_standard_deviation(kind):
    _, _, features, labels, prior_mean, prior_log_var = problem()
    points = (
        axis_points(3, torch.float64) if kind == "axes" else gaussian_points(64, 3, torch.float64)
    )
    generator = torch.Generator().manual_seed(5)

    def energy(mean, std):
        return logit_energy(mean, std, features, labels, prior_mean, prior_log_var, points)

    for _ in range(50):
        ends = [
            (
                3 * torch.randn(2, 3, 4, generator=generator, dtype=torch.float64),
                torch.randn(2, 3, 4, generator=generator, dtype=torch.float64).exp(),
            )
            for _ in range(2)
        ]
        (m0, s0), (m1, s1) = ends
        for part in (0.1, 0.5, 0.8):
            middle = energy(m0 + part * (m1 - m0), s0 + part * (s1 - s0))
            assert (middle < (1 - part) * energy(m0, s0) + part * energy(m1, s1)).all()


def test_the_order_of_examples_does_not_matter():
    mean, std, features, labels, prior_mean, prior_log_var = problem()
    points = gaussian_points(32, 3, torch.float64)
    turned = [2, 5, 0, 1, 4, 3]
    first = logit_energy(mean, std, features, labels, prior_mean, prior_log_var, points)
    again = logit_energy(
        mean, std, features[:, turned], labels[:, turned], prior_mean, prior_log_var, points
    )
    assert torch.allclose(first, again, rtol=1e-14)


def test_gradients_against_finite_differences():
    mean, std, features, labels, prior_mean, prior_log_var = problem(tasks=1, examples=3)
    points = gaussian_points(8, 3, torch.float64)
    beta = torch.tensor(0.4, dtype=torch.float64)
    inputs = [t.requires_grad_() for t in (mean, std, features, prior_mean, prior_log_var, beta)]

    def energy(mean, std, features, prior_mean, prior_log_var, beta):
        return logit_energy(mean, std, features, labels, prior_mean, prior_log_var, points, beta)

    assert torch.autograd.gradcheck(energy, inputs, atol=1e-6)


def test_an_example_without_features_has_a_finite_gradient():
    mean, std, features, labels, prior_mean, prior_log_var = problem()
    std.requires_grad_()
    points = gaussian_points(8, 3, torch.float64)
    logit_energy(
        mean, std, 0 * features, labels, prior_mean, prior_log_var, points
    ).sum().backward()
    assert std.grad.isfinite().all()
