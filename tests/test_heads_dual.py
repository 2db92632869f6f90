"""Full-covariance heads in the dual against dense solutions over all weights."""

import math

import pytest
import torch

from ibaml import Reason
from ibaml.heads.dual import _UNSEEN_STEPS, DualPosterior, laplace
from ibaml.heads.points import gaussian_points
from ibaml.heads.prior import HeadPrior
from ibaml.heads.variational import variational


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def prior(kind: str, classes: int, width: int) -> HeadPrior:
    tied = HeadPrior(draw(width), 0.5 * draw(width, seed=1))
    return {
        "tied": tied,
        "per class": HeadPrior(draw(classes, width), 0.5 * draw(classes, width, seed=1)),
        "low rank": HeadPrior(tied.mean, tied.log_var, draw(width, 2)),
        "low rank per class": HeadPrior(
            draw(classes, width), 0.5 * draw(classes, width, seed=1), draw(width, 2)
        ),
    }[kind]


KINDS = ["tied", "per class", "low rank", "low rank per class"]


def dense_prior(prior: HeadPrior, classes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean (C·F,) and covariance (C·F, C·F) of one task's head."""
    width = prior.mean.shape[-1]
    mean = prior.mean.expand(classes, width)
    blocks = [torch.diag(row) for row in prior.log_var.expand(classes, width).exp()]
    if prior.low_rank is not None:
        blocks = [block + prior.low_rank @ prior.low_rank.T for block in blocks]
    return mean.flatten(), torch.block_diag(*blocks)


def dense_moments(mean, covariance, features, points):
    """E of π (N, C) and of diag π − ππᵀ (N, C, C), for weights N(mean, covariance)."""
    design = torch.stack([torch.kron(torch.eye(len(mean) // len(f)), f) for f in features])
    center = design @ mean
    if points is None:
        p = center.softmax(-1)
        return design, p, torch.diag_embed(p) - p[:, :, None] * p[:, None, :]
    lower = torch.linalg.cholesky(design @ covariance @ design.mT)
    p = (center[:, None] + points @ lower.mT).softmax(-1)
    curvature = (torch.diag_embed(p) - p[..., :, None] * p[..., None, :]).mean(1)
    return design, p.mean(1), curvature


def dense_posterior(prior, features, labels, classes, beta, points=None):
    """Mean and covariance over all weights of one task, by damped rounds in the primal."""
    start, spread = dense_prior(prior, classes)
    precision = torch.linalg.inv(spread)
    target = torch.nn.functional.one_hot(labels, classes).double()
    mean, covariance = start.clone(), 0.1 * spread
    for _ in range(400):
        design, p, curvature = dense_moments(mean, covariance, features, points)
        inner = torch.einsum("ncp,ncd,ndq->pq", design, curvature, design)
        hessian = precision + inner / beta
        slope = torch.einsum("ncp,nc->p", design, p - target) / beta + precision @ (mean - start)
        mean = mean - 0.2 * torch.linalg.solve(hessian, slope)
        wanted = torch.linalg.inv(hessian)
        inverse = 0.5 * torch.linalg.inv(covariance) + 0.5 * torch.linalg.inv(wanted)
        covariance = torch.linalg.inv(inverse)
    return mean, wanted


def assert_same(posterior: DualPosterior, task: int, dense, query, classes) -> None:
    mean, covariance = dense
    design = torch.stack([torch.kron(torch.eye(classes), f) for f in query])
    found_mean, found_covariance = posterior.moments(query.expand(len(posterior.dual), -1, -1))
    assert torch.allclose(found_mean[task], design @ mean, atol=1e-8, rtol=1e-8)
    expected = design @ covariance @ design.mT
    assert torch.allclose(found_covariance[task], expected, atol=1e-8, rtol=1e-8)
    assert torch.allclose(posterior.mean_weights()[task].flatten(), mean, atol=1e-8, rtol=1e-8)
    variances = posterior.weight_variances()[task].flatten()
    assert torch.allclose(variances, covariance.diagonal(), atol=1e-8, rtol=1e-8)
    # draws are linear in their noise, so unit noise gives a factor of the covariance
    size = sum(posterior.noise_sizes())
    unit = torch.eye(size).expand(len(posterior.dual), -1, -1)
    factor = (posterior.sample(unit) - posterior.mean_weights()[:, None])[task].flatten(1)
    assert torch.allclose(factor.mT @ factor, covariance, atol=1e-7, rtol=1e-7)


@pytest.fixture(autouse=True)
def _double():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("classes", "labels"),
    [
        (3, [0, 1, 2]),  # one shot
        (3, [0, 0, 1, 0, 2, 0, 1, 0, 0, 1]),  # more examples than features, unequal counts
        (4, [0, 0, 1, 2]),  # a class without examples
        (2, [1, 0, 1, 1]),
    ],
)
@pytest.mark.parametrize("beta", [1.0, 0.2])
def test_laplace_is_the_dense_solution(kind, classes, labels, beta):
    belief = prior(kind, classes, 4)
    labels = torch.tensor([labels, labels[::-1]])
    features = draw(2, labels.shape[1], 4)
    posterior = laplace(belief, features, labels, classes, beta)
    assert (posterior.reason == Reason.CONVERGED).all()
    assert (posterior.residual <= 1e-9).all()
    for task in range(2):
        dense = dense_posterior(belief, features[task], labels[task], classes, beta)
        assert_same(posterior, task, dense, draw(3, 4, seed=9), classes)


@pytest.mark.parametrize("kind", ["tied", "low rank per class"])
def test_variational_is_the_dense_solution(kind):
    belief, beta = prior(kind, 3, 4), 0.6
    labels = torch.tensor([[0, 0, 1, 2, 2, 1], [2, 0, 0, 0, 0, 1]])
    features = draw(2, 6, 4)
    posterior = variational(belief, features, labels, 3, beta, tol=1e-12, rounds=400, points=64)
    assert (posterior.reason == Reason.CONVERGED).all()
    points = gaussian_points(64, 3, torch.float64)
    for task in range(2):
        dense = dense_posterior(belief, features[task], labels[task], 3, beta, points)
        assert_same(posterior, task, dense, draw(3, 4, seed=9), 3)


def test_nothing_near_the_variational_solution_has_a_lower_energy():
    belief, labels, features = prior("tied", 3, 2), torch.tensor([[0, 1, 2, 1]]), draw(1, 4, 2)
    posterior = variational(belief, features, labels, 3, points=2048)
    mean = posterior.mean_weights()[0].flatten()
    start, spread = dense_prior(belief, 3)
    points = gaussian_points(2048, 3, torch.float64)

    def energy(mean, covariance):
        design = torch.stack([torch.kron(torch.eye(3), f) for f in features[0]])
        lower = torch.linalg.cholesky(design @ covariance @ design.mT)
        logits = (design @ mean)[:, None] + points @ lower.mT
        nll = -logits.log_softmax(-1)[torch.arange(4), :, labels[0]].mean(-1).sum()
        normal = torch.distributions.MultivariateNormal
        return nll + torch.distributions.kl_divergence(
            normal(mean, covariance), normal(start, spread)
        )

    _, covariance = dense_posterior(belief, features[0], labels[0], 3, 1.0, points)
    best = energy(mean, covariance)
    at_map = laplace(belief, features, labels, 3)
    assert energy(at_map.mean_weights()[0].flatten(), covariance) > best
    for seed in range(10):
        nudge = 0.05 * draw(6, seed=seed)
        root = torch.eye(6) + 0.05 * draw(6, 6, seed=seed)
        assert energy(mean + nudge, covariance) > best
        assert energy(mean, root @ covariance @ root.mT) > best


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("solve", [laplace, variational])
def test_gradients_against_finite_differences(solve, kind):
    belief, features, query = prior(kind, 3, 4), draw(2, 5, 4), draw(2, 3, 4, seed=4)
    labels = torch.tensor([[0, 0, 1, 2, 2], [2, 0, 0, 0, 0]])
    more = {} if solve is laplace else {"rounds": 400, "points": 32}
    given = [belief.mean, belief.log_var, features, torch.tensor(0.7)]
    if belief.low_rank is not None:
        given.append(belief.low_rank)

    def loss(mean, log_var, features, beta, low_rank=None):
        posterior = solve(
            HeadPrior(mean, log_var, low_rank), features, labels, 3, beta, tol=1e-12, **more
        )
        mean, covariance = posterior.moments(query)
        weight = torch.linspace(-1, 1, 3)
        return (mean * weight).sum() + 0.3 * covariance.square().sum()

    given = [t.clone().requires_grad_() for t in given]
    slopes = torch.autograd.grad(loss(*given), given)
    for i, (value, slope) in enumerate(zip(given, slopes, strict=True)):
        way = draw(*value.shape, seed=3) if value.dim() else torch.ones(())
        moved = [[t.detach() for t in given] for _ in range(2)]
        moved[0][i] = moved[0][i] + 1e-5 * way
        moved[1][i] = moved[1][i] - 1e-5 * way
        up, down = (loss(*m) for m in moved)
        expected = (up - down) / 2e-5
        assert abs((slope * way).sum() - expected) <= 1e-6 * max(1, abs(expected))


@pytest.mark.parametrize("classes", [2, 20])
def test_wide_priors_and_many_classes_converge(classes):
    labels = torch.arange(3 * classes)[None] % classes
    features = draw(1, 3 * classes, 8)
    for log_var in (-4.0, 0.0, 6.0):
        belief = HeadPrior(torch.zeros(8), torch.full((8,), log_var))
        posterior = laplace(belief, features, labels, classes)
        assert posterior.reason.item() == Reason.CONVERGED
        assert posterior.steps.item() <= 20
        _, covariance = posterior.moments(features)
        assert torch.linalg.eigvalsh(covariance).min() > -1e-9


@pytest.mark.parametrize(("classes", "shots"), [(2, 1), (5, 1), (5, 5), (20, 1)])
def test_the_steps_of_an_accelerator_suffice_for_any_strength_of_prior(classes, shots):
    """There twelve are taken unseen. Features have length one, as batch norm's have up to a factor;
    the prior's variance over β is 1 to 10⁴, ours 1/(λN) at first."""
    labels = torch.arange(classes).repeat_interleave(shots).expand(4, -1)
    means = draw(4, classes, 64).repeat_interleave(shots, 1)
    features = (0.5 * means + draw(4, classes * shots, 64, seed=1)).relu()
    features = torch.nn.functional.normalize(features, dim=-1)
    for variance in (1.0, 1e2, 1e4):
        belief = HeadPrior(torch.zeros(64), torch.full((64,), math.log(variance)))
        for dtype in (torch.float64, torch.float32):
            single = HeadPrior(belief.mean.to(dtype), belief.log_var.to(dtype))
            posterior = laplace(single, features.to(dtype), labels, classes, steps=_UNSEEN_STEPS)
            assert (posterior.reason == Reason.CONVERGED).all()


def test_a_task_that_is_ill_never_touches_its_neighbor():
    belief, labels = prior("tied", 3, 4), torch.tensor([[0, 1, 2], [0, 1, 2]])
    features = draw(2, 3, 4)
    alone = laplace(belief, features[:1], labels[:1], 3)
    features[1, 0, 0] = torch.inf
    for solve in (laplace, variational):
        both = solve(belief, features, labels, 3)
        assert both.reason.tolist()[1] == Reason.NONFINITE
        assert both.reason.tolist()[0] == Reason.CONVERGED
    both = laplace(belief, features, labels, 3)
    assert torch.allclose(both.dual[0], alone.dual[0], atol=1e-12)


def test_running_out_of_steps_is_said():
    labels, features = torch.tensor([[0, 1, 2]]), draw(1, 3, 4)
    posterior = laplace(prior("tied", 3, 4), features, labels, 3, steps=1)
    assert posterior.reason.item() == Reason.STEPS
    assert posterior.residual.item() > 1e-3


def test_single_precision_is_close():
    belief, labels, features = prior("low rank", 3, 4), torch.tensor([[0, 1, 2]]), draw(1, 3, 4)
    exact = laplace(belief, features, labels, 3).moments(features)
    single = HeadPrior(*(t.float() for t in (belief.mean, belief.log_var, belief.low_rank)))
    posterior = laplace(single, features.float(), labels, 3)
    assert posterior.reason.item() == Reason.CONVERGED
    for value, expected in zip(posterior.moments(features.float()), exact, strict=True):
        assert value.dtype == torch.float32
        assert torch.allclose(value.double(), expected, atol=1e-3)


def test_shapes_that_do_not_fit_are_refused():
    belief = prior("tied", 3, 4)
    with pytest.raises(ValueError, match=r"features must be \(T, N, F\) and labels \(T, N\)"):
        laplace(belief, draw(3, 4), torch.tensor([0, 1, 2]), 3)
    with pytest.raises(ValueError, match="classes must be 2 or more, got 1"):
        laplace(belief, draw(1, 3, 4), torch.zeros(1, 3).long(), 1)
    with pytest.raises(ValueError, match="the prior's mean has 3 classes, the task 4"):
        laplace(prior("per class", 3, 4), draw(1, 3, 4), torch.tensor([[0, 1, 2]]), 4)
    with pytest.raises(ValueError, match=r"low_rank must be \(F, R\) with F = 4"):
        HeadPrior(draw(4), draw(4), draw(3, 2))
    with pytest.raises(ValueError, match=r"log_var must be \(F,\), \(C, F\) or \(T, C, F\)"):
        HeadPrior(draw(4), draw(3))


@pytest.mark.parametrize("width", [1e2, 1e4, 1e6])
def test_single_precision_converges_under_wide_priors_too(width):
    features = torch.randn(16, 50, 64, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(10).repeat_interleave(5).expand(16, -1)
    features += 3 * torch.nn.functional.one_hot(labels, 64)
    wide = HeadPrior(torch.zeros(64), torch.full((64,), math.log(width)))
    single = laplace(wide, features, labels, classes=10)
    assert (single.reason == Reason.CONVERGED).all()
    assert int(single.steps.max()) <= 20
    double = HeadPrior(wide.mean.double(), wide.log_var.double())
    exact = laplace(double, features.double(), labels, classes=10)
    gap = single.mean_logits(features).softmax(-1) - exact.mean_logits(features.double()).softmax(
        -1
    )
    assert gap.abs().max() < 1e-3
