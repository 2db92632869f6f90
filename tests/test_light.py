"""What is loaded for what, and what is said where a library is missing."""

from __future__ import annotations

import ast
import json
import re
import shutil
import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path

import pytest
from typer.testing import CliRunner

import ibaml
from ibaml.cli import app
from ibaml.extras import MissingLibrary, missing, need
from runs import environment

runner = CliRunner()
PROJECT = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())["project"]
LIBRARIES = (
    "typer", "rich", "matplotlib", "PIL", "scipy", "tensorboard", "filelock", "jinja2", "tomli_w",
    "safetensors", "fontTools", "sklearn", "torchmetrics", "pandas",
)  # fmt: skip
ONLY_TORCH_AND_NUMPY = f"""
import sys

class Without:
    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {LIBRARIES}:
            return None
        return self.finder.find_spec(name, path, target)

sys.meta_path = [Without(finder) for finder in sys.meta_path]
"""


def names(requirements: list[str]) -> list[str]:
    return [line.split(">")[0] for line in requirements]


def python(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment()
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


# --- what is loaded


def test_importing_the_package_loads_nothing_until_a_name_is_asked_for():
    python(
        "import sys, ibaml, ibaml.tasks, ibaml.training\n"
        "assert not {'torch', 'numpy'} & set(sys.modules)\n"
        "assert ibaml.TaskBatch.__module__ == 'ibaml.tasks.batch'\n"
        "assert 'torch' in sys.modules and 'ibaml.learner' not in sys.modules"
    )


def test_a_meta_step_adaptation_and_prediction_need_torch_and_numpy_alone():
    python(
        ONLY_TORCH_AND_NUMPY
        + """
import torch, ibaml
from ibaml.tasks import Episodes, Sinusoids, feature_vectors

tasks = Sinusoids()
for name in ("maml", "fomaml", "reptile", "imaml", "abml", "ibaml"):
    learner = getattr(ibaml.methods, name)(
        ibaml.nn.mlp(1, 1), steps=2, likelihood=ibaml.Gaussian(0.3, learn=name != "reptile")
    )
    optimizer = torch.optim.Adam(learner.parameters())
    learner(tasks.batch(seed=0, keys=range(4), support=5, query=10)).backward()
    optimizer.step()
    new = tasks.batch(seed=1, keys=[0], support=5, query=10)
    posterior = learner.adapt(new.support_x[0], new.support_y[0])
    mean, variance = posterior.predict(new.query_x[0])
    assert mean.isfinite().all() and (variance > 0).all()
for name in ibaml.__all__:
    getattr(ibaml, name)
try:
    ibaml.FewShotClassifier()
except ModuleNotFoundError as error:
    assert 'pip install "ibaml[sklearn]"' in str(error)
else:
    raise AssertionError("it needs scikit-learn")

import numpy as np

labels = np.repeat(np.arange(20), 8)
data = feature_vectors(np.random.default_rng(0).normal(size=(160, 3)).astype("f4"), labels)
batch = Episodes(data, "train", ways=2, shots=1, queries=2).batch([0, 1])
learner = ibaml.methods.ibaml(ibaml.nn.mlp(3, 2), steps=2)
learner(batch).backward()
sure = learner.adapt(batch.support_x[0], batch.support_y[0]).predict_proba(batch.query_x[0])
assert sure.shape == (4, 2)
"""
    )


def test_help_of_every_command_loads_no_torch():
    shown = python(
        """
import sys
from typer.main import get_command
from typer.testing import CliRunner
from ibaml.cli import app

def walk(command, words):
    done = CliRunner().invoke(app, [*words, "--help"])
    assert done.exit_code == 0, (words, done.output)
    heavy = {"torch", "numpy", "matplotlib", "scipy", "PIL"} & set(sys.modules)
    assert not heavy, (words, heavy)
    print(*words)
    if hasattr(command, "list_commands"):
        for name in command.list_commands(None):
            walk(command.get_command(None, name), [*words, name])

CliRunner().invoke(app, ["--help"])
assert not [name for name in sys.modules if name.startswith("ibaml.paper")]
walk(get_command(app), [])
"""
    )
    walked = shown.splitlines()
    for words in ("train", "evaluate", "compare", "data get", "bench heads", "reproduce"):
        assert words in walked


def test_the_module_as_a_command_loads_no_torch_for_its_help():
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "ibaml", "train", "--help"],
        capture_output=True, text=True, env=environment(), check=True,
    )  # fmt: skip
    assert "--shots" in done.stdout
    loaded = {line.rsplit("|", 1)[-1].strip() for line in done.stderr.splitlines()}
    assert "ibaml.cli.train" in loaded
    assert not {"torch", "numpy"} & loaded


@pytest.mark.parametrize("name", ["ibaml", "ibaml.tasks", "ibaml.training", "ibaml.assessment"])
def test_a_lazy_package_offers_what_it_lists_and_what_type_checkers_see(name):
    package = import_module(name)
    tree = ast.parse(Path(package.__file__).read_text())
    block = next(n for n in tree.body if isinstance(n, ast.If))
    seen = {}
    for line in block.body:
        assert isinstance(line, ast.ImportFrom)
        for alias in line.names:
            seen[alias.name] = getattr(import_module(line.module), alias.name)
    assert set(seen) == set(package.__all__) - {"__version__"}
    for one, value in seen.items():
        assert getattr(package, one) is value
    assert set(package.__all__) <= set(dir(package))
    with pytest.raises(AttributeError, match=f"module '{name}' has no attribute 'nothing'"):
        package.nothing  # noqa: B018


# --- what is said where a library is missing


@pytest.fixture
def without(monkeypatch):
    """Makes libraries impossible to import."""

    def hide(*libraries: str) -> None:
        for name in [m for m in sys.modules if m.split(".")[0] in libraries]:
            monkeypatch.delitem(sys.modules, name)
        for name in libraries:
            monkeypatch.setitem(sys.modules, name, None)

    return hide


@pytest.mark.parametrize(
    "library",
    ["matplotlib", "tensorboard", "fontTools", "scipy", "PIL", "safetensors", "filelock",
     "tomli_w", "sklearn"],
)  # fmt: skip
def test_the_pip_line_installs_what_is_missing(library, without):
    without(library)
    package = re.search(r"need (\S+), which is not installed", missing(library))[1]
    line = re.search(r'pip install "?([^"]+)"?$', missing(library))[1]
    if line == package:  # a dependency of ours, which was left out
        assert package in names(PROJECT["dependencies"])
    else:
        extra = re.fullmatch(r"ibaml\[(\w+)\]", line)[1]
        assert package in names(PROJECT["optional-dependencies"][extra])


def test_all_is_every_extra_of_a_user():
    extras = PROJECT["optional-dependencies"]
    ours = ("all", "test", "peers", "browser", "docs", "release")
    users = [name for name in extras if name not in ours]
    assert extras["all"] == [f"ibaml[{','.join(users)}]"]


def test_a_refusal_says_what_for_and_how_to_install_it(without):
    without("matplotlib", "fontTools", "safetensors")
    assert missing("numpy") is None
    with pytest.raises(MissingLibrary) as error:
        need("matplotlib")
    assert str(error.value) == (
        'pictures need matplotlib, which is not installed: pip install "ibaml[plots]"'
    )
    assert (
        missing("fontTools")
        == 'glyphs need fonttools, which is not installed: pip install "ibaml[glyphs]"'
    )
    assert missing("safetensors").endswith("pip install safetensors")


def test_a_library_that_is_there_and_broken_says_why(tmp_path, monkeypatch, without):
    without("tensorboard")
    monkeypatch.delitem(sys.modules, "tensorboard")
    (tmp_path / "tensorboard.py").write_text("raise ImportError('built for another numpy')")
    monkeypatch.syspath_prepend(tmp_path)
    assert "cannot be imported (built for another numpy): pip install" in missing("tensorboard")


@pytest.mark.parametrize("library", ["matplotlib", "fontTools", "PIL"])
def test_glyphs_name_their_extra(library, without):
    without(library)
    with pytest.raises(MissingLibrary, match=r'^glyphs need .*: pip install "ibaml\[glyphs\]"$'):
        ibaml.tasks.glyphs()
    done = runner.invoke(app, ["train", "--out", "nowhere"])
    assert done.exit_code == 1
    assert 'pip install "ibaml[glyphs]"' in done.output


def test_saving_names_what_is_missing(tmp_path, without):
    without("safetensors")
    learner = ibaml.methods.maml(ibaml.nn.mlp(1, 1))
    with pytest.raises(MissingLibrary, match="pip install safetensors"):
        learner.save(tmp_path / "a.ibaml")


@pytest.mark.parametrize("library", ["tomli_w", "filelock", "safetensors"])
def test_a_run_is_refused_before_its_first_iteration(library, tmp_path, without):
    without(library)
    run = tmp_path / "run"
    done = runner.invoke(app, ["train", "--data", "sinusoids", "--out", str(run)])
    assert done.exit_code == 1
    assert "pip install " in done.output
    assert "need" in done.output
    assert not list(run.glob("checkpoints/*"))


def test_images_name_what_is_missing(without):
    from ibaml.tasks.images import decode

    without("PIL")
    with pytest.raises(MissingLibrary, match=r"images need pillow.*pip install pillow"):
        decode(b"", "a.png", 8)


def test_a_preview_is_refused_before_anything_is_decoded(without):
    without("matplotlib")
    done = runner.invoke(app, ["data", "preview", "nowhere"])
    assert done.exit_code == 1
    assert 'pip install "ibaml[plots]"' in done.output


def test_a_run_without_tensorboard_and_matplotlib_loses_nothing_else(tmp_path, without):
    without("tensorboard", "matplotlib")
    run = tmp_path / "run"
    words = [
        "train", "--data", "sinusoids", "--hidden", "8", "--iterations", "2", "--val-every", "2",
        "--val-tasks", "2", "--tasks", "2", "--threads", "1", "--tensorboard", "--out", run,
    ]  # fmt: skip
    done = runner.invoke(app, [*map(str, words)], env={"COLUMNS": "200"})
    assert done.exit_code == 0, done.output
    sentence = (
        'TensorBoard files need tensorboard, which is not installed: pip install "ibaml[tensor'
        'board]". Continuing without.'
    )
    assert sentence in done.output
    log = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    assert sentence in [line.get("note") for line in log]
    assert not (run / "tensorboard").exists()

    out = tmp_path / "evaluation"
    done = runner.invoke(app, ["evaluate", str(run), "--tasks", "4", "--out", str(out)])
    assert done.exit_code == 0, done.output
    assert 'pip install "ibaml[plots]". Continuing without.' in done.output.replace("\n", " ")
    kept = ["scores.npz", "summary.json", "tasks.csv", "tasks.json"]
    assert sorted(p.name for p in out.iterdir()) == kept

    done = runner.invoke(app, ["report", str(run), "--tasks", "4"])
    assert done.exit_code == 0, done.output
    page = (run / "report.html").read_text()
    assert 'role="img"' not in page
    assert "<table>" in page

    out = tmp_path / "compared"
    other = shutil.copytree(run, tmp_path / "other")
    done = runner.invoke(app, ["compare", str(run), str(other), "--tasks", "4", "--out", str(out)])
    assert done.exit_code == 0, done.output
    assert [p.name for p in out.iterdir()] == ["comparison.json"]
