"""The temperature outside the energy: what it changes and what it does not, learned and fitted."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import ibaml
from ibaml.energy import Likelihood
from ibaml.evaluation.predict import fit_temperature, score_tasks
from ibaml.evaluation.temperature import LIMIT, fit_log_temperature
from ibaml.training import resolve, resume, train
from ibaml.training.build import build_learner, build_network
from oracles import F64, five_point, generator
from problems import class_batch, mlp_model
from runs import features_file, final_state, same
from test_checkpoints import Crash
from test_training import Recorder

METHODS = ("maml", "fomaml", "imaml", "abml", "ibaml")


def learner(method: str = "ibaml", temperature=1.0, **options):
    return getattr(ibaml.methods, method)(
        mlp_model(), likelihood=ibaml.Categorical(temperature), **options
    )


@pytest.mark.parametrize("method", METHODS)
def test_solutions_do_not_depend_on_it_and_the_meta_loss_does(method):
    batch, actual = class_batch(), []
    for t in (1.0, 3.0):
        one = learner(method, t)
        loss = one(batch, generator())
        actual.append((loss.detach(), one.diagnostics.record.solution.value))
    assert torch.equal(actual[0][1], actual[1][1])
    assert abs(actual[0][0] - actual[1][0]) > 1e-3


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("adapt", ["all", "head"])
def test_its_gradient_is_that_of_finite_differences(method, adapt):
    one = learner(method, "learned", adapt=adapt)
    one.likelihood.log_temperature.data.fill_(0.4)
    batch = class_batch()
    one(batch, generator()).backward()
    actual = float(one.likelihood.log_temperature.grad)
    slope = five_point(
        lambda: float(one(batch, generator()).detach()),
        [one.likelihood.log_temperature],
        torch.ones(1, dtype=F64),
        1e-3,
    )
    assert actual == pytest.approx(slope, rel=1e-8)
    assert actual != 0


@pytest.mark.parametrize("method", METHODS)
def test_a_learned_one_that_stays_at_one_leaves_every_other_gradient_as_it_is(method):
    batch, actual = class_batch(), []
    for t in (1.0, "learned"):
        one = learner(method, t)
        one(batch, generator()).backward()
        actual.append({n: p.grad for n, p in one.named_parameters()})
    assert set(actual[1]) - set(actual[0]) == {"likelihood.log_temperature"}
    for name, g in actual[0].items():
        torch.testing.assert_close(actual[1][name], g, rtol=1e-12, atol=1e-14)


def test_predictions_are_the_softmax_of_outputs_times_t():
    batch = class_batch()
    one = learner("maml", "both", adapt="all")
    one.likelihood.log_temperature.data.fill_(math.log(2.0))
    one.likelihood.log_fit.fill_(math.log(1.5))
    assert one.likelihood.temperature == pytest.approx(3.0)
    posterior = one.adapt(batch.support_x[0], batch.support_y[0])
    outputs = posterior.outputs(batch.query_x[0])[0]
    expected = (3 * outputs).softmax(-1)
    torch.testing.assert_close(posterior.predict_proba(batch.query_x[0]), expected)
    nll = posterior.nll(batch.query_x[0], batch.query_y[0])
    torch.testing.assert_close(
        nll, F.cross_entropy(3 * outputs, batch.query_y[0], reduction="none")
    )
    assert "temperature=3" in repr(one.likelihood)


def test_probabilities_are_what_the_likelihood_means():
    """A callable with a temperature of its own: not the softmax of the outputs."""
    one = ibaml.methods.maml(
        mlp_model(), likelihood=lambda z, y: F.cross_entropy(z / 0.1, y, reduction="none")
    )
    batch = class_batch()
    posterior = one.adapt(batch.support_x[0], batch.support_y[0])
    outputs = posterior.outputs(batch.query_x[0])[0]
    torch.testing.assert_close(
        posterior.predict_proba(batch.query_x[0]), (outputs / 0.1).softmax(-1)
    )


class Ordinal(Likelihood):
    """One output, three ordered classes."""

    def probabilities(self, outputs):
        below = torch.sigmoid(torch.tensor([-1.0, 1.0]) - outputs)
        return torch.cat([below, torch.ones_like(outputs)], -1).diff(
            dim=-1, prepend=torch.zeros_like(outputs)
        )

    def forward(self, outputs, y):
        return -self.probabilities(outputs).gather(-1, y.long()[:, None])[:, 0].log()


def test_a_likelihood_of_ones_own_says_its_probabilities():
    torch.manual_seed(0)
    one = ibaml.methods.maml(ibaml.nn.mlp(3, 1), likelihood=Ordinal())
    x, y = torch.randn(6, 3), torch.tensor([0, 1, 2, 0, 1, 2])
    probabilities = one.adapt(x, y).predict_proba(x)
    assert probabilities.shape == (6, 3)
    torch.testing.assert_close(probabilities.sum(-1), torch.ones(6))


@pytest.mark.parametrize("wrong", [0.0, -1.0, math.inf, math.nan, True, "warm"])
def test_what_is_no_temperature_is_refused(wrong):
    with pytest.raises(ValueError, match="temperature must be a positive number"):
        ibaml.Categorical(wrong)


def test_reptile_cannot_learn_one():
    with pytest.raises(ValueError, match="no gradient for the parameters of a likelihood"):
        learner("reptile", "learned")


# --- the fit -------------------------------------------------------------------------------------


@given(st.floats(-2.0, 2.0), st.integers(0, 100), st.integers(1, 5))
@settings(max_examples=20, deadline=None)
def test_the_fit_is_the_minimum_of_the_nll(log_t, seed, draws):
    rng = torch.Generator().manual_seed(seed)
    z = torch.randn(6, draws, 40, 3, generator=rng)
    truth = (math.exp(log_t) * z[:, 0]).softmax(-1).flatten(0, 1)
    y = torch.multinomial(truth, 1, generator=rng).view(6, 40)

    def nll(log_t: float) -> float:
        p = (math.exp(log_t) * z.double()).softmax(-1).mean(1)
        return -float(p.gather(-1, y[..., None]).log().sum())

    fitted = fit_log_temperature([z[:2], z[2:]], [y[:2], y[2:]])
    grid = np.linspace(-LIMIT, LIMIT, 601)
    assert nll(fitted) <= min(map(nll, grid)) + 1e-3


def test_tasks_that_do_not_say_give_the_limit():
    z = torch.tensor([[[[2.0, -2.0], [-2.0, 2.0]]]])
    assert fit_log_temperature([z], [torch.tensor([[0, 1]])]) > 2
    assert fit_log_temperature([z], [torch.tensor([[1, 0]])]) == -LIMIT


def small(tmp_path, **given):
    return resolve(
        {
            "data": features_file(tmp_path / "f.npz", 60), "ways": 3, "shots": 2, "queries": 4,
            "hidden": "8", "tasks": 4, "iterations": 30, "val_every": 10, "val_tasks": 12,
            "method": "maml", "meta_lr": 0.02, "checkpoint_every": 10, "tensorboard": False,
            "threads": 1, **given,
        }
    )  # fmt: skip


def test_training_fits_it_whenever_it_validates_and_the_best_weights_keep_theirs(tmp_path):
    seen = Recorder()
    run, _ = train(small(tmp_path), tmp_path / "run", watchers=lambda run, one: [seen])
    assert run.settings.temperature == "fitted"
    best = min(seen.validations, key=lambda v: v[1]["nll"])
    again = ibaml.load(run.path)
    assert again.likelihood.temperature == pytest.approx(best[1]["temperature"], rel=1e-5)
    assert again.likelihood.temperature != 1.0
    plain = ibaml.load(run.path)
    plain.likelihood.log_fit.zero_()
    from ibaml.training.build import open_tasks

    tasks = open_tasks(run.settings, torch.device("cpu"))
    nlls = [
        score_tasks(one, tasks, "val", range(12)).means()["nll"].mean() for one in (again, plain)
    ]
    assert nlls[0] == pytest.approx(best[1]["nll"], rel=1e-5)
    assert nlls[0] < nlls[1]
    scores = fit_temperature(plain, tasks, "val", range(12))
    assert scores.means()["nll"].mean() == pytest.approx(nlls[0], rel=1e-5)
    assert plain.likelihood.temperature == pytest.approx(again.likelihood.temperature, rel=1e-5)


def test_the_fit_changes_nothing_of_training(tmp_path):
    states = []
    for t in ("1", "fitted"):
        train(small(tmp_path, temperature=t), tmp_path / t)
        states.append(final_state(tmp_path / t))
    assert set(states[1]) - set(states[0]) == {"learner/likelihood.log_fit"}
    assert all(torch.equal(states[1][name], value) for name, value in states[0].items())


@pytest.mark.parametrize("temperature", ["both", "fitted"])
def test_a_run_with_one_resumes_bit_for_bit(temperature, tmp_path):
    given = small(tmp_path, temperature=temperature)
    train(given, tmp_path / "whole")
    with pytest.raises(ZeroDivisionError):
        train(given, tmp_path / "cut", watchers=lambda run, one: [Crash(23)])
    resume(tmp_path / "cut")
    assert same(final_state(tmp_path / "cut"), final_state(tmp_path / "whole"))


# --- what is recommended -------------------------------------------------------------------------


def dataset(train_classes: int, val_classes: int) -> ibaml.tasks.Dataset:
    count = train_classes + val_classes
    splits = {"train": tuple(range(train_classes)), "val": tuple(range(train_classes, count))}
    return ibaml.tasks.Dataset(
        "made", np.zeros((2 * count, 1, 16, 16), np.uint8), np.repeat(np.arange(count), 2),
        tuple(map(str, range(count))), splits,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("classes", "val", "net", "method", "expected"),
    [
        (400, 20, "conv4", "ibaml", "learned"),
        (400, 0, "conv4", "ibaml", "learned"),
        (64, 16, "conv4", "ibaml", "fitted"),
        (64, 0, "conv4", "ibaml", 1.0),
        (400, 20, "mlp", "ibaml", "fitted"),  # its features have no fixed size
        (400, 20, "conv4", "reptile", "fitted"),
    ],
)
def test_the_temperature_is_recommended_by_the_data_and_the_network(
    classes, val, net, method, expected
):
    model = ibaml.nn.conv4(5, 2, 1, 16) if net == "conv4" else ibaml.nn.mlp(256, 5)
    likelihood = ibaml.recommend(method, model, dataset(classes, val))["likelihood"]
    assert likelihood.chosen == expected


def test_the_command_line_takes_what_python_recommends(tmp_path):
    given = small(tmp_path, method="ibaml", iterations=1)
    run, _ = train(given, tmp_path / "run")
    network = build_network(run.settings, (6,))
    data = ibaml.tasks.open_data(given.data)
    options = ibaml.recommend("ibaml", network, ibaml.tasks.EpisodeTasks(data, ways=3))
    python = ibaml.methods.ibaml(network, **options)
    ours = build_learner(run.settings, network)
    for choice in ("belief", "solver", "gradient", "objective", "samples", "noise", "beta"):
        assert getattr(python, choice) == getattr(ours, choice), choice
    assert python.roles == ours.roles
    assert python.likelihood.chosen == ours.likelihood.chosen
    rho = [torch.cat([p.reshape(-1) for p in one.log_var.values()]) for one in (python, ours)]
    assert torch.equal(*rho)
