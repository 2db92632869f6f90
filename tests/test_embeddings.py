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
    assert (of_run.model, of_run.iterations, of_run.posterior) == ("discriminant", 0, "full")
    assert of_run.tie_head
    assert of_run.beta is not None
    assert float(of_run.temperature) > 0
    assert torch.log(torch.tensor(of_run.beta)).item() == pytest.approx(of_run.init_log_var)
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


def test_given_scalars_are_kept(file, tmp_path):
    run, _ = train(settings(file, beta=0.5, temperature="2"), tmp_path / "run")
    assert (run.settings.beta, run.settings.temperature) == (0.5, "2")


@pytest.mark.parametrize("given", [{"model": "mlp"}, {"hidden": "8"}, {"method": "maml"}])
def test_a_network_can_still_be_trained(file, given, tmp_path):
    run, _ = train(settings(file, iterations=2, val_every=0, **given), tmp_path / "run")
    assert run.settings.model == "mlp"
    assert ibaml.load(run.path).model[0].__class__ is torch.nn.Flatten


def test_regression_is_refused():
    with pytest.raises(SettingsError, match="model discriminant is for classes"):
        resolve({"data": "sinusoids", "model": "discriminant"})
