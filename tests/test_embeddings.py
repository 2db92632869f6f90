"""A run on vectors: what it starts from, and that loading, saving and resuming change nothing."""

import pytest
import torch

import ibaml
from ibaml.fields import SettingsError
from ibaml.tasks import EpisodeTasks
from ibaml.tasks.catalog import open_data
from ibaml.training import base_classes, open_run, resolve, resume, train
from runs import features_file


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    return features_file(tmp_path_factory.mktemp("data") / "f.npz", 60, nuisance=6)


@pytest.fixture(scope="module")
def run(file, tmp_path_factory):
    return train(settings(file), tmp_path_factory.mktemp("runs") / "run")[0]


def settings(file, **given):
    given = {"data": file, "queries": 4, "val_tasks": 10, **given}
    return resolve({**given, "tensorboard": False, "threads": 1})


def answers(learner, file, ways=5, shots=1):
    batch = EpisodeTasks(open_data(file), ways, shots, queries=4).batches("test", range(20))[0]
    return learner.adapt_all(batch).predict_proba(batch.query_x), batch.query_y


def test_vectors_start_from_their_base_classes_and_are_not_trained(run):
    of_run = run.settings
    assert (of_run.model, of_run.iterations, of_run.posterior) == ("discriminant", 0, "class_means")
    assert of_run.tie_head
    assert (of_run.beta, of_run.init_log_var) == (None, None)
    assert float(of_run.temperature) > 1
    assert run.best_score() is not None  # validated, though nothing was trained


def test_one_run_serves_any_ways_and_shots(run, file):
    learner = ibaml.load(run.path)
    for ways, shots, least in ((2, 1, 0.75), (5, 5, 0.75), (8, 2, 0.5)):
        p, y = answers(learner, file, ways, shots)
        assert (p.argmax(-1) == y).double().mean() > least


def test_loading_saving_and_resuming_do_not_fit_again(run, file, tmp_path, monkeypatch):
    before = answers(ibaml.load(run.path), file)[0]

    def never(*_, **__):
        raise AssertionError("fitted again")

    monkeypatch.setattr(base_classes, "fit", never)
    resume(run.path)
    assert torch.equal(answers(ibaml.load(run.path), file)[0], before)
    saved = ibaml.load(run.path).save(tmp_path / "learner.ibaml")
    assert torch.equal(answers(ibaml.load(saved), file)[0], before)


def test_the_prior_can_be_trained_on_from_there(run, file):
    resume(run.path, iterations=2)
    assert open_run(run.path).settings.iterations == 2
    p, _ = answers(ibaml.load(run.path, which="last"), file)
    assert bool(p.isfinite().all())


def test_a_given_temperature_is_kept(file, tmp_path):
    run, _ = train(settings(file, temperature="2"), tmp_path / "run")
    assert run.settings.temperature == "2"


def test_the_full_posterior_of_the_same_map_is_trained(file, tmp_path):
    run, _ = train(
        settings(file, posterior="full", model="discriminant", iterations=3), tmp_path / "r"
    )
    assert (run.settings.posterior, run.settings.lam) == ("full", 0.3)
    p, _ = answers(ibaml.load(run.path), file)
    assert bool(p.isfinite().all())


@pytest.mark.parametrize("name", ["beta", "init_log_var", "lam"])
def test_what_class_means_do_not_read_is_refused(file, name):
    with pytest.raises(SettingsError, match=f"{name} is not read by posterior class_means"):
        settings(file, posterior="class_means", **{name: 0.5})


def test_a_posterior_of_class_means_is_saved_and_deployed(run, file, tmp_path):
    learner = ibaml.load(run.path)
    batch = EpisodeTasks(open_data(file), 3, 2, queries=4).batches("test", [0])[0]
    posterior = learner.adapt(batch.support_x[0], [f"c{i}" for i in batch.support_y[0].tolist()])
    expected = posterior.predict_proba(batch.query_x[0])
    again = ibaml.load_posterior(posterior.save(tmp_path / "p.ibaml"))
    assert torch.allclose(again.predict_proba(batch.query_x[0]), expected, atol=1e-6)
    assert torch.allclose(posterior.module()(batch.query_x[0]), expected, atol=1e-6)
    assert posterior.log_var == {}
    assert torch.equal(posterior.sample(1)["head.weight"][0], posterior.mean["head.weight"])


@pytest.mark.parametrize("given", [{"model": "mlp"}, {"hidden": "8"}, {"method": "maml"}])
def test_a_network_can_still_be_trained(file, given, tmp_path):
    run, _ = train(settings(file, iterations=2, val_every=0, **given), tmp_path / "run")
    assert run.settings.model == "mlp"
    assert ibaml.load(run.path).model[0].__class__ is torch.nn.Flatten


def test_regression_is_refused():
    with pytest.raises(SettingsError, match="model discriminant is for classes"):
        resolve({"data": "sinusoids", "model": "discriminant"})
