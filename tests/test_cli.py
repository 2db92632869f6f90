"""The command line, and the demo's parts."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from typer.main import get_command
from typer.testing import CliRunner

import ibaml
from ibaml.cli import app

runner = CliRunner()


def test_version_and_help():
    assert ibaml.__version__ in runner.invoke(app, ["--version"]).stdout
    shown = runner.invoke(app, ["--help"]).stdout
    assert "demo" in shown
    assert "methods" in shown


@pytest.mark.parametrize("group", [[], ["data"], ["bench"]])
def test_every_command_is_one_whole_sentence_on_a_line_of_80_columns(group):
    shown = runner.invoke(app, [*group, "--help"], env={"COLUMNS": "80"}).stdout
    lines = shown[shown.index("─ Commands ─") :].splitlines()[1:]
    rows = [line.strip("│ ") for line in lines if line.startswith("│")]
    command = get_command(app)
    for name in group:
        command = command.commands[name]
    assert [row.split()[0] for row in rows] == list(command.commands), "a sentence goes on"
    for row in rows:
        assert row.endswith("."), row
        assert "…" not in row


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


def test_demo_leaves_its_pictures_and_figures_and_goes_on_where_it_was_stopped(tmp_path):
    words = ["demo", "--out", str(tmp_path), "--iterations", "3", "--tasks", "4"]
    done = runner.invoke(app, words)
    assert done.exit_code == 0, done.output
    for picture in ("reliability.png", "episode.png"):
        assert (tmp_path / picture).read_bytes().startswith(b"\x89PNG")
    scores = json.loads((tmp_path / "scores.json").read_text())
    assert set(scores["figures"]) == {"iBaML", "untrained prior", "nearest centroid on pixels"}
    assert set(scores["lead in accuracy"]) == {"untrained prior", "nearest centroid on pixels"}
    assert not list(tmp_path.glob(".*"))  # nothing half written
    learner = ibaml.load(tmp_path / "run")
    assert learner.adapts_head
    again = runner.invoke(app, words)  # a finished demo begins anew
    assert again.exit_code == 0, again.output
    assert json.loads((tmp_path / "scores.json").read_text()) == scores


def test_demo_refuses_no_iterations():
    assert runner.invoke(app, ["demo", "--iterations", "0"]).exit_code == 2


def test_the_example_in_the_package_docstring_runs():
    learner = ibaml.methods.ibaml(ibaml.nn.mlp(1, 1), steps=5, samples=4)
    batch = ibaml.tasks.Sinusoids().batch(seed=0, keys=range(8), support=5, query=10)
    learner(batch).backward()
    assert all(p.grad is not None for p in learner.parameters())
    assert isinstance(learner(batch), torch.Tensor)
