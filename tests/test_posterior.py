"""Posterior: what a practitioner holds in hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import ibaml
from ibaml import Gaussian, NaturalDescent
from oracles import F64
from problems import class_batch, mlp_model, plain_learner, regression_batch


def classifier(**options) -> ibaml.MetaLearner:
    return plain_learner("ibaml", mlp_model(), init_log_var=-1.0, **options)


def task():
    batch = class_batch((3,))
    return batch.support_x[0], batch.support_y[0], batch.query_x[0]


def test_probabilities_average_the_draws_and_repeat():
    x, y, query = task()
    posterior = classifier().adapt(x, y)
    p = posterior.predict_proba(query)
    assert p.shape == (6, 3)
    assert torch.allclose(p.sum(-1), torch.ones(6, dtype=F64))
    assert torch.equal(p, posterior.predict_proba(query))
    assert torch.equal(p, classifier().adapt(x, y).predict_proba(query))
    assert torch.allclose(p, posterior.outputs(query).softmax(-1).mean(0))
    a, b = (
        posterior.predict_proba(query, generator=torch.Generator().manual_seed(i)) for i in (1, 2)
    )
    assert not torch.equal(a, b)
    assert posterior.outputs(query, samples=4).shape == (4, 6, 3)


def test_a_generator_changes_the_noise_of_adaptation():
    x, y, _ = task()
    a = classifier().adapt(x, y).mean["0.weight"]
    b = classifier().adapt(x, y, torch.Generator().manual_seed(5)).mean["0.weight"]
    assert not torch.equal(a, b)


def test_more_examples_make_it_surer():
    """Bayesian linear regression: the predictive variance falls with the examples."""
    batch = regression_batch(tasks=1, support=40)
    learner = plain_learner(
        "ibaml",
        nn.Linear(4, 1).to(F64),
        solver=NaturalDescent(300, 0.002),
        likelihood=Gaussian(0.1),
        init_log_var=0.0,
        samples=16,
    )
    x, y = batch.support_x[0], batch.support_y[0]
    variances = [
        learner.adapt(x[:n], y[:n]).predict(batch.query_x[0], samples=200)[1].mean()
        for n in (0, 2, 10, 40)
    ]
    assert variances == sorted(variances, reverse=True)
    mean, variance = learner.adapt(x, y).predict(batch.query_x[0])
    assert mean.shape == variance.shape == (5, 1)
    assert (variance >= 0.1**2 - 1e-12).all()
    assert (mean - batch.query_y[0]).abs().mean() < 0.3


def test_without_examples_it_is_the_prior():
    learner = classifier()
    posterior = learner.adapt(torch.zeros(0, 3, dtype=F64), torch.zeros(0, dtype=torch.long))
    assert posterior.solution is None
    for name, w in posterior.mean.items():
        assert torch.equal(w, learner.model.get_parameter(name).detach())
    assert posterior.predict_proba(torch.zeros(2, 3, dtype=F64)).shape == (2, 3)
    tied = plain_learner("ibaml", mlp_model(), adapt="head", tie_head=True)
    with pytest.raises(ValueError, match="classes"):
        tied.adapt(torch.zeros(0, 3, dtype=F64), torch.zeros(0, dtype=torch.long))


def test_draws_of_the_weights():
    x, y, _ = task()
    draws = classifier().adapt(x, y).sample(7)
    assert draws["0.weight"].shape == (7, 4, 3)
    point = plain_learner("maml", mlp_model()).adapt(x, y)
    assert point.log_var == {}
    assert torch.equal(point.sample()["0.weight"][0], point.mean["0.weight"])


def test_adapting_changes_nothing_in_the_learner():
    x, y, query = task()
    learner = classifier()
    before = {n: t.clone() for n, t in learner.state_dict().items()}
    learner.adapt(x, y).predict_proba(query)
    for n, t in learner.state_dict().items():
        assert torch.equal(t, before[n])


def test_a_posterior_older_than_its_shared_weights_says_so():
    x, y, query = task()
    learner = classifier(adapt="head")
    posterior = learner.adapt(x, y)
    posterior.predict_proba(query)
    with torch.no_grad():
        learner.model[0].weight += 0.1
    with pytest.raises(RuntimeError, match=r"learner\.adapt again"):
        posterior.predict_proba(query)


def test_everything_adapted_does_not_care():
    x, y, query = task()
    learner = classifier()
    posterior = learner.adapt(x, y)
    p = posterior.predict_proba(query)
    with torch.no_grad():
        learner.model[0].weight += 0.1
    assert torch.equal(p, posterior.predict_proba(query))


def test_regression_has_no_class_probabilities():
    batch = regression_batch()
    learner = plain_learner("maml", nn.Linear(4, 1).to(F64))
    posterior = learner.adapt(batch.support_x[0], batch.support_y[0])
    with pytest.raises(ValueError, match="use predict"):
        posterior.predict_proba(batch.query_x[0])
    with pytest.raises(ValueError, match="use predict_proba"):
        classifier().adapt(*task()[:2]).predict(task()[2])
    with pytest.raises(ValueError, match="samples"):
        posterior.predict(batch.query_x[0], samples=0)


def test_predictions_have_the_targets_shape():
    batch = regression_batch()
    learner = plain_learner("ibaml", nn.Linear(4, 1).to(F64), init_log_var=-2.0)
    posterior = learner.adapt(batch.support_x[0], batch.support_y[0, :, 0])
    mean, variance = posterior.predict(batch.query_x[0])
    assert mean.shape == variance.shape == (5,)


def test_batches_convert_and_select():
    tokens = torch.randint(30000, (3, 4, 5))
    batch = ibaml.TaskBatch(tokens, tokens[..., 0] % 2, tokens, tokens[..., 0] % 2, keys=[5, 6, 7])
    assert torch.equal(batch.to(torch.bfloat16).support_x, tokens)
    picked = batch.select(torch.tensor([True, False, True]))
    assert picked.task_keys == (5, 7)
    assert torch.equal(picked.query_x, tokens[[0, 2]])
    assert batch.select(slice(1, 3)).task_keys == (6, 7)
    other = ibaml.TaskBatch(tokens, tokens[..., 0] % 2, tokens, tokens[..., 0] % 2, np.arange(3))
    assert other.task_keys == (0, 1, 2)


def test_sinusoids_depend_on_their_keys_alone():
    family = ibaml.tasks.Sinusoids()
    whole = family.batch(seed=1, keys=[3, 4, 5], support=5, query=7)
    one = family.batch(seed=1, keys=[4], support=5, query=7)
    assert torch.equal(whole.select([1]).support_x, one.support_x)
    assert whole.query_y.shape == (3, 7, 1)
    assert one.task_keys == (4,)
    a, phi, _ = family.task(1, 4)
    assert 0.1 <= a <= 5
    assert torch.allclose(one.support_y, a * torch.sin(one.support_x + phi), atol=1e-5)


def test_it_says_what_it_is():
    x, y, _ = task()
    assert repr(classifier(adapt="head").adapt(x, y)) == (
        "Posterior(3 classes (0, 1, 2), DiagonalGaussian over 15 weights (2.weight, 2.bias))"
    )
    tied = plain_learner("ibaml", mlp_model(), adapt="head", tie_head=True)
    many = [f"kind {i}" for i in range(6)]
    assert repr(tied.adapt(x, many)) == (
        "Posterior(6 classes (kind 0, kind 1, kind 2, kind 3, … 2 more), "
        "DiagonalGaussian over 30 weights (2.weight, 2.bias))"
    )
    numbers = regression_batch()
    learner = plain_learner("maml", nn.Linear(4, 1).to(F64))
    assert repr(learner.adapt(numbers.support_x[0], numbers.support_y[0])) == (
        "Posterior(regression, Point over 5 weights (weight, bias))"
    )
    assert repr(learner.adapt_all(numbers)) == (
        "Posteriors(2 tasks, Point over 5 weights (weight, bias))"
    )
    far = plain_learner("maml", nn.Linear(4, 1).to(F64), lr=1e9)
    with pytest.warns(RuntimeWarning, match="diverged"):
        posterior = far.adapt(numbers.support_x[0], numbers.support_y[0])
    assert "the prior for 1 of 1: the solver diverged" in repr(posterior)


class TestNll:
    """−log of the averaged likelihood, of targets as people have them."""

    def test_labels_as_they_went_in(self):
        x, y, query = task()
        names = [("cat", "dog", "owl")[i] for i in y.tolist()]
        learner = plain_learner("ibaml", mlp_model(), adapt="head", tie_head=True)
        posterior = learner.adapt(x, names)
        asked = ["owl", "cat", "dog", "owl", "cat", "cat"]
        right = [posterior.classes.index(name) for name in asked]
        expected = -posterior.predict_proba(query)[torch.arange(6), right].log()
        assert torch.allclose(posterior.nll(query, asked), expected, atol=1e-12)
        numbers = learner.adapt(x, [(3, 7, 11)[i] for i in y.tolist()])
        assert torch.equal(
            numbers.nll(query, [11, 3, 7, 11, 3, 3]), posterior.nll(query.numpy(), asked)
        )
        with pytest.raises(ValueError, match="y has labels that classes does not name: cow"):
            posterior.nll(query, ["cow"] * 6)

    @pytest.mark.parametrize("kind", [torch.tensor, np.array, list])
    def test_tensors_arrays_and_lists(self, kind):
        x, y, query = task()
        posterior = classifier().adapt(x, y)
        asked = [2, 0, 1, 2, 0, 0]
        expected = -posterior.predict_proba(query)[torch.arange(6), asked].log()
        assert torch.allclose(posterior.nll(query, kind(asked)), expected, atol=1e-12)

    def test_numbers(self):
        batch = regression_batch()
        learner = plain_learner("ibaml", nn.Linear(4, 1).to(F64), likelihood=Gaussian(0.5))
        posterior = learner.adapt(batch.support_x[0], batch.support_y[0])
        query, y = batch.query_x[0], torch.tensor([[1.0], [0.0], [2.0], [1.0], [0.0]], dtype=F64)
        mean, variance = posterior.predict(query)  # a linear model: the outputs are Gaussian
        expected = -torch.distributions.Normal(mean, variance.sqrt()).log_prob(y).squeeze(-1)
        for targets in (y, y.numpy(), y.long(), y.int().numpy()):
            assert torch.allclose(posterior.nll(query, targets), expected, atol=1e-12)

    def test_what_it_refuses(self):
        x, y, query = task()
        posterior = classifier().adapt(x, y)
        with pytest.raises(ValueError, match="x and y need one entry per example: x has 6, y has"):
            posterior.nll(query, y[:4])
        with pytest.raises(ValueError, match="y has labels that classes does not name: 3"):
            posterior.nll(query, [0, 1, 2, 3, 0, 0])
        with pytest.raises(ValueError, match="y is floating; labels are text, whole numbers"):
            posterior.nll(query, query[:, 0])
        with pytest.raises(
            ValueError, match=r"samples must be a whole number, 1 or more; got 2\.0"
        ):
            posterior.nll(query, y, samples=2.0)
