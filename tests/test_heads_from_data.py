"""Closed-form priors from base classes against scikit-learn, dense Gaussians and made-up data."""

import pytest
import torch

from ibaml.heads.from_data import (
    class_folds,
    class_statistics,
    diagonalize,
    lda,
    maximum_likelihood,
    two_covariance_likelihood,
    within_covariance,
)
from ibaml.heads.plda import plda_logits


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def made_up(classes: int, examples: int, width: int = 4, seed: int = 0):
    """Features and labels from the two-covariance model, with its center, between and within."""
    root, spread = draw(width, width, seed=seed), draw(width, width, seed=seed + 1)
    center = draw(width, seed=seed + 2)
    labels = torch.arange(classes).repeat_interleave(examples)
    means = center + draw(classes, width, seed=seed + 3) @ root.T
    features = means[labels] + draw(len(labels), width, seed=seed + 4) @ spread.T
    return features, labels, center, root @ root.T, spread @ spread.T


def test_lda_finds_the_directions_of_scikit_learn():
    discriminant = pytest.importorskip("sklearn.discriminant_analysis")
    features, labels, *_ = made_up(4, 15)
    model = lda(class_statistics(features, labels), 0.0, width=3)
    mapped = model.mapped(features)
    within = within_covariance(class_statistics(mapped, labels), 0.0)
    assert torch.allclose(within, torch.eye(3, dtype=within.dtype), atol=1e-10)
    theirs = discriminant.LinearDiscriminantAnalysis(solver="svd").fit(features, labels)
    expected = torch.as_tensor(theirs.transform(features))
    for ours, other in zip(mapped.T, expected.T, strict=True):
        assert torch.corrcoef(torch.stack([ours, other]))[0, 1].abs() > 1 - 1e-10


@pytest.mark.parametrize("shrinkage", [0.0, 0.3, 1.0])
def test_shrinkage_is_scikit_learns(shrinkage):
    shrunk_covariance = pytest.importorskip("sklearn.covariance").shrunk_covariance
    features, labels, *_ = made_up(4, 15)
    apart = features - torch.stack([features[labels == c].mean(0) for c in range(4)])[labels]
    expected = shrunk_covariance((apart.T @ apart / 56).numpy(), shrinkage)
    found = within_covariance(class_statistics(features, labels), shrinkage)
    assert torch.allclose(found, torch.as_tensor(expected))


def test_statistics_do_not_depend_on_the_names_or_order_of_classes():
    features, labels, *_ = made_up(3, 5)
    order = torch.randperm(15, generator=torch.Generator().manual_seed(0))
    first = class_statistics(features, labels)
    again = class_statistics(features[order], 10 * labels[order] + 7)
    for a, b in zip(vars(first).values(), vars(again).values(), strict=True):
        assert torch.allclose(a, b)


def test_moments_recover_the_model_that_made_the_data():
    features, labels, _, between, within = made_up(4000, 10)
    statistics = class_statistics(features, labels)
    assert torch.allclose(within_covariance(statistics, 0.0), within, atol=0.15)
    model, truth = lda(statistics, 0.0), diagonalize(statistics.means.mean(0), between, within)
    assert torch.allclose(model.between, truth.between, rtol=0.1)


def test_all_directions_can_be_kept_and_given_some_spread():
    features, labels, *_ = made_up(3, 30)
    statistics = class_statistics(features, labels)
    narrow, wide = lda(statistics, 0.2, width=2), lda(statistics, 0.2, floor=0.5)
    assert torch.allclose(wide.mapped(features)[:, :2].abs(), narrow.mapped(features).abs())
    whole = wide.map.T @ within_covariance(statistics, 0.2) @ wide.map
    assert torch.allclose(whole, torch.eye(4, dtype=torch.float64), atol=1e-9)
    mean = narrow.between.sum() / 4
    assert torch.allclose(wide.between[:2], 0.5 * narrow.between + 0.5 * mean)
    assert torch.allclose(wide.between[2:], 0.5 * mean)
    with pytest.raises(ValueError, match=r"floor must be from 0 to 1, got 1\.5"):
        lda(statistics, 0.2, floor=1.5)


def test_few_examples_a_class_do_not_pass_for_spread_between_classes():
    labels = torch.arange(2000).repeat_interleave(2)
    nothing = lda(class_statistics(draw(4000, 4), labels), 0.0)
    assert nothing.between.max() < 0.1  # class means alone have variance 1/2


def dense_likelihood(features, labels, center, between, within):
    """log p of all examples of all classes as one Gaussian a class."""
    total = 0.0
    for c in labels.unique():
        x = features[labels == c]
        n = len(x)
        eye = torch.eye(n, dtype=x.dtype)
        covariance = torch.kron(eye, within) + torch.kron(torch.ones_like(eye), between)
        normal = torch.distributions.MultivariateNormal(center.repeat(n), covariance)
        total = total + normal.log_prob(x.flatten())
    return total


def test_likelihood_is_that_of_the_dense_gaussian():
    features, labels, center, between, within = made_up(5, 4)
    features, labels = features[:-3], labels[:-3]  # unequal counts
    s = class_statistics(features, labels)
    found = two_covariance_likelihood(s.counts, s.means, s.scatter, center, between, within)
    assert torch.allclose(found, dense_likelihood(features, labels, center, between, within))


def test_em_climbs_to_the_closed_form_of_equal_counts():
    features, labels, *_ = made_up(200, 6)
    s = class_statistics(features, labels)
    estimate = maximum_likelihood(s, steps=60)
    assert (estimate.likelihood.diff() > -1e-8 * estimate.likelihood.abs()[0]).all()
    within = within_covariance(s, 0.0)
    apart = s.means - s.means.mean(0)
    between = apart.T @ apart / 200 - within / 6
    assert torch.allclose(estimate.within, within, atol=1e-3)
    assert torch.allclose(estimate.between, between, atol=1e-3)


def test_em_of_unequal_counts_is_a_maximum():
    features, labels, *_ = made_up(30, 8)
    keep = torch.rand(240, generator=torch.Generator().manual_seed(2)) < 0.6
    s = class_statistics(features[keep], labels[keep])
    found = maximum_likelihood(s, steps=300)
    given = [t.requires_grad_() for t in (found.center, found.between, found.within)]
    value = two_covariance_likelihood(s.counts, s.means, s.scatter, *given)
    for slope in torch.autograd.grad(value, given):
        assert slope.abs().max() < 1e-2 * 30


def test_diagonal_coordinates_keep_the_model():
    _, _, center, between, within = made_up(2, 2)
    model = diagonalize(center, between, within)
    eye = torch.eye(4, dtype=torch.float64)
    assert torch.allclose(model.map.T @ within @ model.map, eye, atol=1e-8)
    assert torch.allclose(model.map.T @ between @ model.map, torch.diag(model.between), atol=1e-8)


def test_plda_is_the_ratio_of_dense_gaussians():
    _, _, center, between, within = made_up(2, 2)
    model = diagonalize(center, between, within)
    support, query = draw(1, 6, 4), draw(1, 3, 4, seed=1)
    labels = torch.tensor([[0, 1, 0, 0, 2, 0]])  # class 3 has no example
    logits = plda_logits(model.mapped(support), labels, model.mapped(query), 4, model.between)
    expected = torch.empty(3, 4, dtype=torch.float64)
    for i, x in enumerate(query[0]):
        for c in range(4):
            members = support[0, labels[0] == c]
            joint = torch.cat([members, x[None]])
            both = dense_likelihood(joint, torch.zeros(len(joint)), center, between, within)
            alone = (
                dense_likelihood(members, torch.zeros(len(members)), center, between, within)
                if len(members)
                else 0.0
            )
            expected[i, c] = both - alone
    volume = torch.linalg.slogdet(model.map).logabsdet  # of the change of coordinates
    assert torch.allclose(logits[0] + volume, expected, atol=1e-8)


def test_folds_leave_every_class_out_once():
    labels = torch.arange(11).repeat(3) * 2
    folds = class_folds(labels, 4, seed=3)
    assert sorted(torch.cat([out for _, out in folds]).tolist()) == list(range(0, 22, 2))
    for kept, left_out in folds:
        assert not set(kept.tolist()) & set(left_out.tolist())
        assert len(kept) + len(left_out) == 11
    with pytest.raises(ValueError, match="folds must be from 2 to the 11 classes, got 12"):
        class_folds(labels, 12)


def test_what_cannot_be_whitened_is_refused():
    features, labels, *_ = made_up(2, 2, width=6)
    with pytest.raises(ValueError, match=r"singular at shrinkage 0\.0: give more"):
        lda(class_statistics(features.round(), labels), 0.0)
    with pytest.raises(ValueError, match="shrinkage must be from 0 to 1, got 2"):
        within_covariance(class_statistics(features, labels), 2.0)
