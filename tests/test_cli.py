"""The command line, the demo's parts, and what importing the core needs."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from typer.testing import CliRunner

import ibaml
from ibaml import demo
from ibaml.cli import app

runner = CliRunner()


def test_version_and_help():
    assert ibaml.__version__ in runner.invoke(app, ["--version"]).stdout
    shown = runner.invoke(app, ["--help"]).stdout
    assert "demo" in shown
    assert "methods" in shown


def test_methods_lists_every_method():
    shown = runner.invoke(app, ["methods"]).stdout
    for name in ("maml", "fomaml", "reptile", "imaml", "abml", "ibaml"):
        assert name in shown
        assert callable(getattr(ibaml.methods, name))


def test_the_module_is_a_command():
    done = subprocess.run(
        [sys.executable, "-m", "ibaml", "--version"], capture_output=True, text=True, check=True
    )
    assert ibaml.__version__ in done.stdout


def test_demo_leaves_its_picture_and_figures(tmp_path):
    done = runner.invoke(app, ["demo", "--out", str(tmp_path), "--iterations", "2"])
    assert done.exit_code == 0, done.output
    assert (tmp_path / "sinusoid.png").read_bytes().startswith(b"\x89PNG")
    scores = json.loads((tmp_path / "scores.json").read_text())
    assert [row["shots"] for row in scores["iBaML"]] == [1, 5, 10]
    assert all(row["rmse"] > 0 for rows in scores.values() for row in rows)
    assert scores["MAML"][0]["nll"] is None
    assert not list(tmp_path.glob("*.partial*"))


def test_demo_refuses_no_iterations():
    assert runner.invoke(app, ["demo", "--iterations", "0"]).exit_code == 2


@pytest.mark.parametrize("name", ["iBaML", "MAML"])
def test_training_in_the_demo_learns(name):
    """A hundred steps already halve the error of the prior on new sinusoids."""
    learner = demo.build()[name]
    before = demo.score(learner, tasks=20)[-1].rmse
    demo.train(learner, 100, lambda loss: None)
    assert demo.score(learner, tasks=20)[-1].rmse < 0.75 * before


def test_the_core_imports_torch_and_numpy_alone():
    """The GPU machine, and a user's server, have no matplotlib, rich or typer."""
    code = (
        "import sys, ibaml; "
        "bad = {'matplotlib', 'rich', 'typer', 'scipy', 'PIL', 'sklearn'} & set(sys.modules); "
        "assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_example_in_the_package_docstring_runs():
    learner = ibaml.methods.ibaml(ibaml.nn.mlp(1, 1), steps=5, samples=4)
    batch = ibaml.tasks.Sinusoids().batch(seed=0, keys=range(8), support=5, query=10)
    learner(batch).backward()
    assert all(p.grad is not None for p in learner.parameters())
    assert isinstance(learner(batch), torch.Tensor)
