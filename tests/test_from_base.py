"""The map, prior and temperature from base classes, against dense and known answers."""

from dataclasses import replace

import pytest
import torch

from ibaml.heads.baselines import nearest_centroid
from ibaml.heads.class_means import class_directions
from ibaml.heads.from_base import Episodes, Scalars, episodes_nll, fit, minimize
from ibaml.heads.from_data import class_statistics, lda, within_covariance
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
    return torch.nn.functional.normalize((x - found.center) @ found.map, dim=-1)


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


def test_the_head_is_the_posterior_mean_under_the_low_rank_and_diagonal_prior():
    """In the axes of B the answer is that of a dense D = exp(a)·I + exp(b)·B."""
    x, y = made_up(12, 10, 6)
    found = fit(x, y)
    s = found.scalars
    statistics = class_statistics(x, y)
    values, vectors = torch.linalg.eigh(within_covariance(statistics, s.shrinkage))
    whiten = vectors / values.sqrt()
    center = statistics.means.mean(0)
    means = (statistics.means - center) @ whiten
    z = torch.nn.functional.normalize((x - center) @ whiten, dim=-1)
    a, b = (torch.tensor(n).double().exp() for n in (s.diagonal, s.between))
    dense = a * torch.eye(6) + b * means.T @ means / 11
    rows, asked = torch.tensor([[0, 1, 20, 21]]), torch.tensor([[2, 22, 50]])
    expected = []
    for first in (0, 20):
        gain = torch.linalg.solve(2 * dense + torch.eye(6), 2 * dense)
        direction = gain @ z[first : first + 2].mean(0)
        expected.append(z[asked[0]] @ direction / direction.norm())
    phi = features(found, x)
    head = class_directions(phi[rows], torch.tensor([[0, 0, 1, 1]]), 2, found.between)
    cosines, spread = head.moments(phi[asked])
    assert torch.allclose(cosines[0], torch.stack(expected, -1), atol=1e-8)
    assert not spread.any()


def some_episodes() -> list[Episodes]:
    generator = torch.Generator().manual_seed(0)
    labels = torch.tensor([0, 0, 1, 1, 2, 2, 0, 1, 2])
    z = torch.randn(3, 9, 7, generator=generator, dtype=torch.float64) + 0.7 * labels[:, None]
    z = torch.nn.functional.normalize(z, dim=-1)
    axes = torch.linalg.qr(torch.randn(7, 2, generator=generator, dtype=torch.float64))[0]
    variances = torch.tensor([3.0, 0.5], dtype=torch.float64).expand(3, -1)
    return [Episodes(z, z @ axes, variances, labels, 3, 6)]


def test_the_nll_of_episodes_is_that_of_the_dense_head():
    """Episodes keep the axes of B and the products of z alone."""
    (episodes,) = some_episodes()
    generator = torch.Generator().manual_seed(0)
    torch.randn(3, 9, 7, generator=generator, dtype=torch.float64)
    axes = torch.linalg.qr(torch.randn(7, 2, generator=generator, dtype=torch.float64))[0]
    free = torch.tensor([-0.5, 0.3, 1.2], dtype=torch.float64)
    whole = torch.cat([axes, torch.linalg.svd(axes.T)[2][2:].T], 1)
    along = torch.tensor([3.0, 0.5, 0, 0, 0, 0, 0], dtype=torch.float64)
    variance = free[0].exp() + free[1].exp() * along
    z = episodes.own @ whole
    labels = episodes.labels.expand(3, -1)
    head = class_directions(z[:, :6], labels[:, :6], 3, variance)
    logits = free[2].exp() * head.moments(z[:, 6:])[0]
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 6:].flatten())
    assert abs(float(episodes.nll(free) - expected)) < 1e-10


@pytest.mark.parametrize("which", range(3))
def test_the_gradient_of_every_scalar_is_that_of_finite_differences(which):
    episodes = some_episodes()
    at = torch.tensor([0.5, -0.3, 0.4], dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(episodes_nll(episodes, at), at)
    step = torch.zeros(3, dtype=torch.float64)
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
    head = class_directions(phi[rows], labels, ways, found.between)
    return (found.temperature * head.moments(phi[asked])[0]).softmax(-1)


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
    net.take(found.center, found.map, found.between)
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
    episodes = [replace(e, common=0 * e.common) for e in some_episodes()]
    _, free = minimize(episodes, Scalars().free(), 10)
    assert abs(float(free[1]) - Scalars().between) < 1e-3


def test_directions_follow_their_examples_gradients_included():
    generator = torch.Generator().manual_seed(1)
    z = torch.randn(2, 6, 4, generator=generator, dtype=torch.float64, requires_grad=True)
    variance = torch.rand(4, generator=generator, dtype=torch.float64, requires_grad=True)
    labels = torch.tensor([[0, 0, 1, 1, 2, 2]]).expand(2, -1)

    def rows(z, variance):
        return class_directions(z, labels, 3, variance).rows

    assert torch.autograd.gradcheck(rows, (z, variance), atol=1e-6)
    some = class_directions(z, labels, 5, variance)  # two classes without examples
    assert torch.allclose(some.rows[:, :3].norm(dim=-1), torch.ones(2, 3).double())
    assert not some.rows[:, 3:].any()
    wide = class_directions(z, labels, 3, 1e9 * torch.ones(4).double())  # the plain mean
    means = torch.nn.functional.normalize(z.unflatten(1, (3, 2)).mean(2), dim=-1)
    assert torch.allclose(wide.rows, means, atol=1e-8)
