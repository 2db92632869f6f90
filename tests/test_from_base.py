"""The map, prior and temperature from base classes, against dense and known answers."""

from dataclasses import replace

import pytest
import torch

from ibaml.heads.baselines import nearest_centroid
from ibaml.heads.dual import laplace
from ibaml.heads.from_base import Episodes, Scalars, episodes_nll, fit
from ibaml.heads.from_data import class_statistics, lda, within_covariance
from ibaml.heads.points import predict
from ibaml.heads.prior import HeadPrior
from ibaml.nn import discriminant


def made_up(classes: int, examples: int, width: int, seed: int = 0, wide: float = 1.0):
    """Vectors of the two-covariance model: classes differ in the first third of the directions, and
    the spread within a class is largest in the last third."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    between, within = torch.full((width,), 0.05), torch.ones(width)
    between[: width // 3], within[-(width // 3) :] = 2.0, 6.0
    turn = torch.linalg.qr(torch.randn(width, width, generator=torch.Generator().manual_seed(7)))[0]
    labels = torch.arange(classes).repeat_interleave(examples)
    means = draw(classes, width) * between
    x = (means[labels] + draw(classes * examples, width) * within) @ turn.double()
    return wide * x + 3.0, labels


def features(found, x: torch.Tensor) -> torch.Tensor:
    return found.scale * torch.nn.functional.normalize((x - found.center) @ found.map, dim=-1)


def test_the_map_whitens_within_classes_along_the_axes_between():
    x, y = made_up(16, 12, 9)
    found = fit(x, y)
    mapped = (x - found.center) @ found.map
    statistics = class_statistics(x, y)
    assert torch.allclose(found.center, statistics.means.mean(0))
    shrunk = found.map.T @ within_covariance(statistics, found.scalars.shrinkage) @ found.map
    assert torch.allclose(shrunk / shrunk[0, 0], torch.eye(9).double(), atol=1e-9)
    between = class_statistics(mapped, y).means
    spread = between.T @ between / 15
    assert torch.allclose(spread, spread.diag().diag(), atol=1e-9 * float(spread[0, 0]))
    # the same axes as those of discriminant analysis
    other = lda(statistics, found.scalars.shrinkage).map
    cosine = torch.nn.functional.cosine_similarity(found.map, other, dim=0).abs()
    assert torch.allclose(cosine, torch.ones(9).double(), atol=1e-6)


def test_at_no_shrinkage_the_axes_are_scikit_learns(monkeypatch):
    analysis = pytest.importorskip("sklearn.discriminant_analysis")
    monkeypatch.setattr("ibaml.heads.from_base._cross_fitted", lambda *_: (None, Scalars(0.0)))
    x, y = made_up(5, 20, 9)
    ours = (x - x.mean(0)) @ fit(x, y).map[:, :4]
    theirs = torch.as_tensor(
        analysis.LinearDiscriminantAnalysis(solver="svd").fit(x, y).transform(x)
    )
    for one, other in zip(ours.T, theirs.T, strict=True):
        assert torch.corrcoef(torch.stack([one, other]))[0, 1].abs() > 1 - 1e-8


def test_the_scale_of_the_features_is_the_low_rank_and_diagonal_prior():
    """Features in the axes of B with a unit prior answer as whitened vectors with N(0, D) do."""
    x, y = made_up(12, 10, 6)
    found = fit(x, y)
    s = found.scalars
    statistics = class_statistics(x, y)
    values, vectors = torch.linalg.eigh(within_covariance(statistics, s.shrinkage))
    whiten = vectors / values.sqrt()
    means = (statistics.means - statistics.means.mean(0)) @ whiten / 11**0.5
    z = torch.nn.functional.normalize((x - statistics.means.mean(0)) @ whiten, dim=-1)
    e = torch.tensor(1.0).exp().double()
    prior = HeadPrior(
        torch.zeros(6).double(),
        torch.full((6,), s.diagonal).double(),
        (e ** (s.between / 2)) * means.T,
    )
    unit = HeadPrior(torch.zeros(6).double(), torch.zeros(6).double())
    labels = torch.tensor([[0, 0, 1, 1]])
    rows, asked = torch.tensor([[0, 1, 20, 21]]), torch.tensor([[2, 22, 50]])
    dense = laplace(prior, z[rows], labels, 2).moments(z[asked])
    phi = features(found, x)
    ours = laplace(unit, phi[rows], labels, 2).moments(phi[asked])
    for one, other in zip(ours, dense, strict=True):
        assert torch.allclose(one, other, atol=1e-8)


def some_episodes() -> list[Episodes]:
    generator = torch.Generator().manual_seed(0)
    labels = torch.tensor([0, 0, 1, 1, 2, 2, 0, 1, 2])
    own = torch.randn(3, 9, 5, generator=generator, dtype=torch.float64)
    common = torch.randn(3, 9, 2, generator=generator, dtype=torch.float64)
    return [Episodes(own + 0.7 * labels[:, None], common, labels, 3, 6)]


@pytest.mark.parametrize("which", range(4))
def test_the_gradient_of_every_scalar_is_that_of_finite_differences(which):
    episodes = some_episodes()
    at = torch.tensor([0.5, -0.3, -1.0, 0.4], dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(episodes_nll(episodes, at), at)
    step = torch.zeros(4, dtype=torch.float64)
    step[which] = 1e-5
    with torch.no_grad():
        up, down = episodes_nll(episodes, at + step), episodes_nll(episodes, at - step)
    assert abs(float(gradient[which] - (up - down) / 2e-5)) <= 1e-6


def test_the_fit_is_deterministic_and_does_not_touch_the_random_state():
    x, y = made_up(12, 8, 6)
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    first, again = fit(x, y), fit(x, y)
    assert first.scalars == again.scalars
    assert torch.equal(first.map, again.map)
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize("wide", [1e-3, 1e3])
def test_the_unit_of_the_vectors_does_not_matter(wide):
    x, y = made_up(12, 8, 6)
    first, scaled = fit(x, y), fit(wide * x, y)
    assert torch.allclose(features(first, x), features(scaled, wide * x), atol=1e-5)


def answers(found, x, rows, asked, labels, ways):
    phi = features(found, x)
    unit = HeadPrior(torch.zeros(phi.shape[1]).double(), torch.zeros(phi.shape[1]).double())
    posterior = laplace(unit, phi[rows], labels, ways, rows.shape[1] / ways)
    mean, covariance = posterior.moments(phi[asked])
    return predict(mean, found.beta * covariance, found.temperature)


def test_new_classes_are_told_apart_better_than_by_their_centroids():
    x, y = made_up(60, 12, 24)
    base = y < 40
    found = fit(x[base], y[base])
    assert found.nll is not None
    generator = torch.Generator().manual_seed(3)
    ways, nll, plain = 5, [], []
    for _ in range(60):
        classes = 40 + torch.randperm(20, generator=generator)[:ways]
        rows = classes[:, None] * 12 + torch.arange(12)
        shown, asked = rows[:, :2].reshape(1, -1), rows[:, 2:].reshape(1, -1)
        labels = torch.arange(ways).repeat_interleave(2)[None]
        truth = torch.arange(ways).repeat_interleave(10)[None]
        p = answers(found, x, shown, asked, labels, ways)
        q = (10 * nearest_centroid(x[shown], labels, x[asked], ways, x[base].mean(0))).softmax(-1)
        nll.append(-p.gather(-1, truth[..., None]).log().mean())
        plain.append(-q.gather(-1, truth[..., None]).log().mean())
    better = torch.stack(plain) - torch.stack(nll)
    assert better.mean() > 2 * better.std() / 60**0.5


@pytest.mark.parametrize(
    "case", ["two classes", "one example", "constant", "all equal", "few", "wide", "some of one"]
)
def test_degenerate_base_classes_give_a_finite_map(case):
    x, y = made_up(12, 6, 8)
    if case == "two classes":
        x, y = x[y < 2], y[y < 2]
    if case == "one example":
        x, y = x[::6], y[::6]
    if case == "constant":
        x[:, 3] = 5.0
    if case == "all equal":
        x = torch.ones_like(x)
    if case == "few":
        x, y = x.repeat(1, 20)[: 2 * 6], y[: 2 * 6]
    if case == "wide":
        x, y = x[::3].repeat(1, 20) + torch.arange(160) / 100, y[::3]
    if case == "some of one":
        keep = (y > 3) | (torch.arange(len(y)) % 6 == 0)
        x, y = x[keep], y[keep]
    found = fit(x.float(), y)
    phi = features(found, x)
    assert bool(phi.isfinite().all())
    ways = 2
    rows = torch.tensor([[0, len(x) - 1]])
    p = answers(found, x, rows, torch.tensor([[1]]), torch.tensor([[0, 1]]), ways)
    assert bool(p.isfinite().all())


def test_too_few_classes_have_the_default_scalars():
    x, y = made_up(3, 6, 4)
    found = fit(x, y)
    assert found.nll is None
    assert found.scalars == Scalars()


def test_more_vectors_than_the_network_is_wide_keep_the_widest_directions():
    x, y = made_up(12, 10, 30)
    found = fit(x, y, widest=9)
    assert found.map.shape == (30, 9)
    net = discriminant(30, 5)
    net.take(found.center, found.map, found.scale)
    own = net.features(x.float())
    assert torch.allclose(own[:, :9].double(), features(found, x), atol=1e-4)
    assert bool((own[:, 9:] == 0).all())


def test_what_is_wrong_is_named():
    with pytest.raises(ValueError, match="two classes or more"):
        fit(torch.zeros(4, 3), torch.zeros(4).long())
    with pytest.raises(ValueError, match=r"x must be \(n, F\)"):
        fit(torch.zeros(4, 3), torch.zeros(5).long())
    with pytest.raises(ValueError, match="the map must be"):
        discriminant(4, 2).take(torch.zeros(3), torch.zeros(3, 3), torch.zeros(3))


def test_scalars_are_held_where_episodes_do_not_say():
    episodes = [replace(e, own=torch.zeros_like(e.own)) for e in some_episodes()]
    from ibaml.heads.from_base import minimize

    _, free = minimize(episodes, Scalars().free(), 10)
    assert abs(float(free[0]) - Scalars().diagonal) < 1e-3
