"""Settings: what is filled in, what is refused and in which words, and the way through TOML."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import ibaml
from ibaml.fields import SettingsError, write_toml
from ibaml.files import write_whole
from ibaml.training.rules import resolve
from ibaml.training.settings import FIELDS, read_toml
from ibaml.words import METHODS


@pytest.mark.parametrize("data", ["glyphs", "sinusoids"])
@pytest.mark.parametrize("method", METHODS)
def test_resolved_settings_survive_toml_and_resolve_to_themselves(method, data, tmp_path):
    settings = resolve({"method": method, "data": data, "seed": 3})
    file = tmp_path / "config.toml"
    file.write_text(write_toml(settings))
    assert resolve(read_toml(file)) == settings


@example('line\nbreak, "quotes", \\back\\slashes\\, tab\t, return\r\n')
@given(st.text(min_size=1, max_size=30))
def test_any_path_survives_toml(tmp_path_factory, name):
    file = tmp_path_factory.mktemp("toml") / "config.toml"
    write_whole(file, write_toml(resolve({"data": name})))
    assert read_toml(file)["data"] == name


def test_the_method_decides_what_was_not_given():
    ours, maml = resolve({}), resolve({"method": "maml"})
    assert (ours.adapt, ours.posterior, ours.solver) == ("head", "full", "dual")
    assert (ours.lam, ours.beta) == (0.3, None)
    assert (resolve({"beta": 0.1}).lam, resolve({"beta": 0.1}).beta) == (None, 0.1)
    assert (ours.curvature, ours.samples, ours.objective) == (None, None, "predictive")
    drawn = resolve({"samples": 8})  # what only draws need selects the posterior that has them
    assert (drawn.posterior, drawn.solver, drawn.noise) == ("diagonal", "head", "outputs")
    assert resolve({"noise": "antithetic"}).solver == "newton"
    assert resolve({"adapt": "all"}).posterior == "diagonal"
    assert (maml.adapt, maml.solver, maml.steps) == ("all", "polyak", 5)
    assert resolve({"method": "maml", "inner_lr": 0.2}).solver == "descent"
    assert maml.samples is None
    assert maml.lam is None
    assert resolve({"method": "ibaml", "inner_lr": 0.1}).solver == "descent"
    assert resolve({"posterior": "class_means"}).iterations == ours.iterations  # of pictures
    assert ours.tie_head
    assert not drawn.tie_head
    waves = resolve({"data": "sinusoids"})
    assert (waves.ways, waves.posterior, waves.beta, waves.tie_head) == (None, "full", 1.0, False)


@pytest.mark.parametrize(
    ("given_", "words"),
    [
        ({"wayz": 5}, "wayz.*did you mean ways"),
        ({"method": "mamml"}, "method.*mamml.*did you mean maml"),
        ({"ways": "five"}, "ways must be a whole number"),
        ({"ways": 1}, "ways must be 2 or more"),
        ({"meta_lr": 0.0}, "meta_lr must be above 0"),
        ({"meta_lr": float("nan")}, "meta_lr must be finite"),
        ({"ema": 1.5}, "ema must be 1 or less"),
        ({"rotations": 1}, "rotations must be true or false"),
        ({"iterations": True}, "iterations must be a whole number"),
        ({"method": "maml", "cg_steps": 3}, "cg_steps is read by ibaml, imaml"),
        ({"method": "maml", "samples": 3}, "samples is read by ibaml, abml"),
        ({"method": "maml", "lam": 1.0}, "lam is read by imaml, ibaml"),
        ({"method": "maml", "train_ways": 10}, "train_ways other than ways needs tie_head"),
        ({"tie_head": False, "train_ways": 10}, "train_ways other than ways needs tie_head"),
        ({"data": "sinusoids", "train_ways": 10}, "train_ways is for classification"),
        ({"lam": 1.0, "beta": 1.0}, "lam and beta both set the strength of the prior"),
        ({"method": "maml", "posterior": "full"}, "posterior is read by ibaml"),
        ({"posterior": "full", "samples": 4}, "samples is not read by posterior full"),
        ({"posterior": "full", "inner_lr": 0.1}, "inner_lr is not read by posterior full"),
        ({"posterior": "full", "solver": "newton"}, "solver is not read by posterior full"),
        ({"posterior": "full", "adapt": "all"}, "posterior full is for a linear head"),
        ({"posterior": "diagonal", "solver": "dual"}, "solver dual is for posterior full"),
        ({"method": "imaml", "solver": "dual"}, "solver dual is for posterior full"),
        ({"method": "maml", "solver": "newton"}, "newton cannot be unrolled"),
        ({"method": "imaml", "solver": "natural"}, "natural moves log-variances"),
        ({"solver": "newton", "inner_lr": 0.1}, "inner_lr is not read by solver newton"),
        ({"method": "imaml", "curvature": "lemma"}, "lemma is written for ibaml"),
        ({"method": "reptile", "adapt": "head"}, "reptile has no gradient for shared"),
        ({"method": "imaml", "objective": "abml"}, "objective abml needs a Gaussian"),
        ({"data": "sinusoids", "ways": 5}, "ways is for classification"),
        ({"noise_std": 0.1}, "noise_std is for regression"),
        ({"target": "life"}, "a table needs task and features too"),
        ({"model": "mlp", "norm": "batch"}, "norm is for conv4"),
        ({"model": "conv4", "hidden": "8"}, "hidden is for mlp"),
        ({"momentum": 0.9}, "momentum is for sgd and rmsprop"),
        ({"warmup": 50, "iterations": 10}, "warmup .50. is longer"),
    ],
)
def test_what_is_wrong_is_refused_by_name(given_, words):
    with pytest.raises(SettingsError, match=words):
        resolve(given_)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("ways = ", "not TOML"),
        ("[task]\nways = 5", "is a table; settings are flat"),
        ("wasy = 5", "wasy.*did you mean ways"),
        ("val-every = 5\nval_every = 7", "val_every is given twice"),
    ],
)
def test_a_file_that_is_wrong_is_named(text, words, tmp_path):
    file = tmp_path / "run.toml"
    file.write_text(text)
    with pytest.raises(SettingsError, match=f"(?s)run.toml.*{words}"):
        read_toml(file)
    with pytest.raises(SettingsError, match=r"nothing\.toml"):
        read_toml(tmp_path / "nothing.toml")


def test_every_setting_is_described_and_its_default_is_of_its_kind():
    for name, field in FIELDS.items():
        assert field.help, name
        assert field.default is None or isinstance(field.default, field.kind), name


@pytest.mark.parametrize("method", ["ibaml", "imaml", "maml", "abml", "fomaml", "reptile"])
def test_the_step_size_suits_the_network_in_python_as_in_runs(method):
    """A head that reads many features is too curved for steps of 0.1; a given one is taken."""
    from ibaml.training.build import build_learner

    settings = resolve({"method": method, "adapt": "all"})
    for side, small in ((28, True), (84, False)):
        net = ibaml.nn.conv4(5, 16, 1, side)
        solver = build_learner(settings, net).solver
        assert solver == getattr(ibaml.methods, method)(net, adapt="all").solver
        many = 0.1 if method in ("ibaml", "imaml") else 0.03
        assert solver.lr == (0.1 if method == "reptile" else 0.3 if small else many)
        own = resolve({"method": method, "adapt": "all", "inner_lr": 0.2})
        assert build_learner(own, net).solver.lr == 0.2


def test_a_run_is_as_long_as_its_tasks_are_many():
    """Unless its length is given: a larger batch has fewer iterations, and everything that is done
    now and then is done after as many tasks."""
    names = ("tasks", "iterations", "val_every", "checkpoint_every", "log_every")

    def of(**given):
        made = resolve(given)
        return tuple(getattr(made, name) for name in names)

    assert of() == of(tasks=8) == (8, 2000, 200, 200, 20)
    assert of(data="sinusoids") == of(data="sinusoids", tasks=16) == (16, 2000, 200, 200, 20)
    assert of(tasks=32) == (32, 500, 50, 50, 5)
    assert of(data="sinusoids", tasks=4) == (4, 8000, 800, 800, 80)
    assert of(tasks=32, iterations=2000, val_every=0) == (32, 2000, 0, 50, 5)
    assert of(tasks=100_000) == (100_000, 1, 1, 1, 1)
    with pytest.raises(SettingsError, match=r"warmup \(600\) is longer than iterations \(500\)"):
        resolve({"tasks": 32, "warmup": 600})
