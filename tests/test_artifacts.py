"""Files that predict: complete, in another process, with the data gone; and nothing executes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import ibaml
from ibaml.artifact import ArtifactError
from ibaml.training import resolve, train
from oracles import F64, generator
from problems import class_batch, conv_model, regression_batch
from runs import environment, features_file, waves

FIXTURES = Path(__file__).parent / "artefacts"


def learners() -> dict[str, ibaml.MetaLearner]:
    """One of every method, trained a little, with choices of every kind."""
    torch.manual_seed(0)
    net = ibaml.nn.conv4(2, 3, 1, 16)
    made = {
        "maml": ibaml.methods.maml(net, steps=2),
        "fomaml": ibaml.methods.fomaml(net, solver="adam", steps=2),
        "reptile": ibaml.methods.reptile(net, steps=2),
        "imaml": ibaml.methods.imaml(net, lam=0.2),
        "abml": ibaml.methods.abml(
            net, objective=ibaml.Abml(tasks=7), solver=ibaml.NaturalDescent(3, {"*": 0.1})
        ),
        "ibaml": ibaml.methods.ibaml(
            net, likelihood=ibaml.Categorical("both"), objective=ibaml.PredictiveNll(samples=3)
        ),
        "ibaml, all": ibaml.methods.ibaml(net, adapt="all", curvature="energy", cg_steps=3),
        "ibaml, tied": ibaml.methods.ibaml(net, tie_head=True),
        "ibaml, a block": ibaml.methods.ibaml(net, adapt="blocks.3.*", freeze="blocks.0.*"),
    }
    for learner in made.values():
        learner.inputs = ibaml.tasks.Inputs((1, 16, 16), (0.3,), (0.4,))
        for p in learner.parameters():
            p.data.add_(0.01 * torch.randn(p.shape))
        if (
            isinstance(learner.likelihood, ibaml.Categorical)
            and learner.likelihood.log_fit is not None
        ):
            learner.likelihood.log_fit.fill_(0.3)
    return made


NAMES = tuple(learners())
BATCH = class_batch((1, 16, 16), ways=2).to(torch.float32)


@pytest.mark.parametrize("name", NAMES)
def test_a_saved_learner_is_the_same_learner_without_its_code(name, tmp_path):
    learner = learners()[name]
    again = ibaml.load(learner.save(tmp_path / "a.ibaml"))
    for choice in (
        "belief",
        "solver",
        "gradient",
        "objective",
        "samples",
        "noise",
        "beta",
        "roles",
    ):
        assert getattr(again, choice) == getattr(learner, choice), choice
    assert again.inputs == learner.inputs
    loss, other = (one(BATCH, generator()) for one in (learner.eval(), again))
    assert torch.equal(loss, other)
    expected = learner.adapt(BATCH.support_x[0], BATCH.support_y[0])
    posterior = again.adapt(BATCH.support_x[0], BATCH.support_y[0])
    x = BATCH.query_x[0]
    assert torch.equal(posterior.predict_proba(x), expected.predict_proba(x))
    loss.backward()
    other.backward()
    for p, q in zip(learner.parameters(), again.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("norm_stats", [None, "running", "support"])
def test_a_saved_posterior_predicts_the_same(name, norm_stats, tmp_path):
    learner = learners()[name]
    posterior = learner.adapt(BATCH.support_x[0], BATCH.support_y[0], norm_stats=norm_stats)
    again = ibaml.load_posterior(posterior.save(tmp_path / "p.ibaml"))
    x = BATCH.query_x[0]
    torch.testing.assert_close(
        again.predict_proba(x), posterior.predict_proba(x), rtol=0, atol=1e-6
    )
    assert again.classes == posterior.classes
    assert again.needs_examples == posterior.needs_examples
    assert again.inputs == learner.inputs
    if not posterior.needs_examples:
        posterior.save(tmp_path / "q.ibaml", examples=False)
        return
    assert "holds its support examples" in repr(posterior)
    with pytest.raises(ArtifactError, match=r'need its support examples.*norm_stats="running"'):
        posterior.save(tmp_path / "q.ibaml", examples=False)


def test_examples_are_in_the_file_only_where_predictions_read_them(tmp_path):
    from safetensors import safe_open

    learner = learners()["ibaml, all"]
    for norm_stats, wanted in (("running", False), ("support", True)):
        posterior = learner.adapt(BATCH.support_x[0], BATCH.support_y[0], norm_stats=norm_stats)
        with safe_open(posterior.save(tmp_path / "p.ibaml"), "pt") as file:
            assert ("posterior/x" in file.keys()) == wanted  # noqa: SIM118


def test_labels_of_any_kind_go_into_the_file_and_come_back(tmp_path):
    learner = learners()["ibaml, tied"]
    x = BATCH.support_x[0]
    for labels in (["dog", "cat", "dog", "cat"], [7, 3, 3, 7], [True, False, True, True]):
        posterior = learner.adapt(x, np.array(labels))
        again = ibaml.load_posterior(posterior.save(tmp_path / "p.ibaml"))
        assert again.classes == tuple(sorted(set(labels)))
        assert again.predict_labels(x).tolist() == posterior.predict_labels(x).tolist()
        assert set(again.predict_labels(x).tolist()) <= set(labels)


def test_regression_is_saved_with_its_noise(tmp_path):
    torch.manual_seed(0)
    learner = ibaml.methods.ibaml(
        ibaml.nn.mlp(4, 1, (8,)).to(F64), likelihood=ibaml.Gaussian(0.7, learn=True)
    )
    batch = regression_batch()
    posterior = learner.adapt(batch.support_x[0], batch.support_y[0])
    again = ibaml.load_posterior(posterior.save(tmp_path / "p.ibaml"))
    for a, b in zip(
        again.predict(batch.query_x[0]), posterior.predict(batch.query_x[0]), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)
    assert again.classes is None
    assert ibaml.load(learner.save(tmp_path / "l.ibaml")).likelihood.log_noise.dtype == F64


def test_another_process_predicts_with_the_data_gone(tmp_path):
    """From a run on feature vectors: the run folder and the data are deleted."""
    import shutil

    data = Path(features_file(tmp_path / "features.npz", 60))
    settings = resolve(
        {"data": str(data), "ways": 3, "shots": 2, "queries": 4, "hidden": "8", "tasks": 4,
         "iterations": 30, "val_every": 30, "val_tasks": 5, "tensorboard": False, "threads": 1,
         "tie_head": True}
    )  # fmt: skip
    run, _ = train(settings, tmp_path / "run")
    learner = ibaml.load(run.path)
    raw = np.load(data)["x"]
    labels = ["left"] * 3 + ["right"] * 3
    posterior = learner.adapt(learner.inputs(raw[[0, 1, 2, 30, 31, 32]]), labels)
    posterior.save(tmp_path / "shop.ibaml")
    learner.save(tmp_path / "learner.ibaml")
    expected = posterior.predict_proba(posterior.inputs(raw[3:9]))
    np.save(tmp_path / "new.npy", raw[3:9])
    shutil.rmtree(run.path)
    data.unlink()
    script = f"""
import numpy as np, torch, ibaml
raw = np.load({str(tmp_path / "new.npy")!r})
p = ibaml.load_posterior({str(tmp_path / "shop.ibaml")!r})
torch.save((p.predict_proba(p.inputs(raw)), p.predict_labels(p.inputs(raw)).tolist(),
            ibaml.load({str(tmp_path / "learner.ibaml")!r}).inputs == p.inputs),
           {str(tmp_path / "said.pt")!r})
"""
    subprocess.run([sys.executable, "-c", script], check=True, env=environment())
    probabilities, said, same = torch.load(tmp_path / "said.pt", weights_only=True)
    torch.testing.assert_close(probabilities, expected, rtol=0, atol=1e-6)
    assert said == posterior.predict_labels(posterior.inputs(raw[3:9])).tolist()
    assert same


# --- inputs --------------------------------------------------------------------------------------


def test_pictures_are_prepared_as_the_training_data_were(tmp_path):
    from PIL import Image

    rng = np.random.default_rng(0)
    for name in ("a", "b", "c"):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for i in range(3):
            pixels = rng.integers(0, 256, (30, 24, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / "photos" / name / f"{i}.png")
    data = ibaml.tasks.image_folder(tmp_path / "photos", image_size=20)
    inputs = ibaml.tasks.Inputs.of(data)
    episode = ibaml.tasks.Episodes(data, "train" if data.splits["train"] else "all", 1, 1, 1)
    rows, _ = episode.draw(0)
    file = tmp_path / "photos" / data.files[rows[0, 0]]
    expected = episode.batch([0]).support_x[0]
    torch.testing.assert_close(inputs([file]), expected, rtol=0, atol=1e-5)
    raw = np.asarray(Image.open(file))
    torch.testing.assert_close(inputs([raw]), expected, rtol=0, atol=1e-5)
    assert ibaml.tasks.Inputs.read(json.loads(json.dumps(inputs.described()))) == inputs


def test_rows_of_a_table_are_prepared_by_the_names_of_its_columns(tmp_path):
    rows = ["who,age,height,score"]
    rng = np.random.default_rng(0)
    rows += [
        f"t{t},{20 + t},{150 + i},{t + 3 * i + rng.normal()}" for t in range(30) for i in range(8)
    ]
    file = tmp_path / "table.csv"
    file.write_text("\n".join(rows))
    table = ibaml.tasks.Table.read(file, task="who", features=["age", "height"], target="score")
    inputs = ibaml.tasks.Inputs.of(ibaml.tasks.TableTasks(table))
    assert inputs.columns == ("age", "height")
    prepared = inputs([{"height": 151, "age": 20, "who": "me"}])
    expected = (np.array([20.0, 151.0]) - table.center[:2]) / table.spread[:2]
    np.testing.assert_allclose(prepared.numpy()[0], expected, rtol=1e-6)
    mean, variance = inputs.restored(inputs.targets([7.0]), torch.ones(1))
    assert mean.item() == pytest.approx(7.0, rel=1e-5)
    assert variance.item() == pytest.approx(table.spread[-1] ** 2)


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        ([[1.0, 2.0, 3.0]], "rows of 2 numbers"),
        ([[1.0, float("nan")]], "NaN"),
        ([{"a": 1.0}], "no column 'b'"),
    ],
)
def test_rows_that_do_not_fit_are_refused(raw, words):
    inputs = ibaml.tasks.Inputs((2,), (0.0, 0.0), (1.0, 1.0), columns=("a", "b"))
    with pytest.raises(ibaml.tasks.DataError, match=words):
        inputs(raw)


# --- modules of one's own ------------------------------------------------------------------------


class Own(nn.Module):
    def __init__(self, ways: int = 2) -> None:
        super().__init__()
        self.body, self.head = conv_model().float(), nn.Linear(2, ways)

    def forward(self, x):
        return self.head(self.body(x))


def test_what_is_somebodys_own_is_passed_in_again(tmp_path):
    batch = class_batch((1, 6, 6), ways=2).to(torch.float32)
    own = ibaml.methods.ibaml(Own(), likelihood=lambda z, y: nn.functional.cross_entropy(
        2 * z, y, reduction="none"))  # fmt: skip
    path = own.save(tmp_path / "own.ibaml")
    with pytest.raises(ArtifactError, match=r"around a module of your own \(Own\).*model=…"):
        ibaml.load(path)
    with pytest.raises(ArtifactError, match=r"a likelihood of your own.*likelihood=…"):
        ibaml.load(path, Own())
    again = ibaml.load(path, Own(), likelihood=own.likelihood.function)
    assert torch.equal(again(batch, generator()), own.eval()(batch, generator()))
    with pytest.raises(ArtifactError, match="is your module the one it was saved with"):
        ibaml.load(path, Own(3), likelihood=own.likelihood.function)


def test_a_backbone_that_was_changed_is_a_module_of_ones_own(tmp_path):
    net = ibaml.nn.mlp(3, 3)
    net[-1] = nn.Linear(40, 4)
    with pytest.raises(ArtifactError, match="a module of your own"):
        ibaml.load(ibaml.methods.maml(net).save(tmp_path / "a.ibaml"))


# --- files that are not what they should be ------------------------------------------------------


def test_files_of_the_wrong_kind_version_or_content_are_refused_in_a_sentence(tmp_path):
    learner = learners()["ibaml"]
    path = learner.save(tmp_path / "a.ibaml")
    posterior = learner.adapt(BATCH.support_x[0], BATCH.support_y[0]).save(tmp_path / "p.ibaml")
    with pytest.raises(ArtifactError, match=r"holds a learner, not a posterior: ibaml\.load reads"):
        ibaml.load_posterior(path)
    with pytest.raises(ArtifactError, match=r"holds a posterior.*ibaml\.load_posterior reads it"):
        ibaml.load(posterior)
    with pytest.raises(ArtifactError, match="cannot be read"):
        ibaml.load_posterior(tmp_path / "nothing.ibaml")
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])

    def written(**changes: str) -> Path:
        new = {**header, "__metadata__": {**header["__metadata__"], **changes}}
        text = json.dumps(new).encode()
        made = tmp_path / "changed.ibaml"
        made.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + size :])
        return made

    with pytest.raises(ArtifactError, match=r"in format 99, but this is ibaml .*: update ibaml"):
        ibaml.load(written(format="99"))
    facts = json.loads(header["__metadata__"]["facts"])
    evil = {**facts, "solver": {"class": "Popen", "args": "touch /tmp/evil"}}
    with pytest.raises(ArtifactError, match="solver is of an unknown class, 'Popen'"):
        ibaml.load(written(facts=json.dumps(evil)))
    odd = {**facts, "solver": {**facts["solver"], "shell": True}}
    with pytest.raises(ArtifactError, match=r"solver has the wrong fields \(shell\)"):
        ibaml.load(written(facts=json.dumps(odd)))
    for broken in (b"", content[:50], content[: size + 20], b"\x80\x04" + content):
        path.write_bytes(broken)
        with pytest.raises(ArtifactError):
            ibaml.load(path)


@pytest.mark.parametrize("lacking", ["model", "adapt", "dtype", "inputs", "beta"])
def test_a_file_without_some_of_its_facts_is_refused(lacking, tmp_path):
    from safetensors.torch import load, save

    path = learners()["ibaml"].save(tmp_path / "a.ibaml")
    content = path.read_bytes()
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])["__metadata__"]
    facts = {k: v for k, v in json.loads(header["facts"]).items() if k != lacking}
    path.write_bytes(save(load(content), {**header, "facts": json.dumps(facts)}))
    with pytest.raises(ArtifactError, match=r"parts of .* do not match"):
        ibaml.load(path)


@pytest.mark.parametrize("file", sorted(FIXTURES.glob("*.ibaml")), ids=lambda f: f.stem)
def test_files_of_every_format_there_was_are_read(file):
    """Written by `python tests/test_artifacts.py`, once for every format, and kept."""
    x = torch.linspace(-1, 1, 8).view(4, 2)
    expected = torch.tensor(json.loads(file.with_suffix(".json").read_text()))
    if file.stem.startswith("learner"):
        posterior = ibaml.load(file).adapt(x, torch.tensor([0, 1, 0, 1]))
    else:
        posterior = ibaml.load_posterior(file)
    # the first format's were predicted by draws
    torch.testing.assert_close(posterior.predict_proba(x), expected, rtol=0, atol=2e-3)


# --- a plain module ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("norm_stats", ["running", "support"])
def test_a_plain_module_says_what_the_posterior_says_and_can_be_exported(name, norm_stats):
    learner = learners()[name]
    posterior = learner.adapt(BATCH.support_x[0], BATCH.support_y[0], norm_stats=norm_stats)
    module, x = posterior.module(), BATCH.query_x[0]
    expected = posterior.predict_proba(x)
    torch.testing.assert_close(module(x), expected, rtol=0, atol=1e-6)
    if name in ("ibaml", "ibaml, all") and norm_stats == "running":
        exported = torch.export.export(module, (x,)).module()
        torch.testing.assert_close(exported(x), expected, rtol=0, atol=1e-6)


def test_a_plain_module_of_a_regressor_gives_mean_and_variance():
    torch.manual_seed(0)
    learner = ibaml.methods.ibaml(
        ibaml.nn.mlp(4, 1, (8,)).to(F64), likelihood=ibaml.Gaussian(0.7, learn=True)
    )
    batch = regression_batch()
    posterior = learner.adapt(batch.support_x[0], batch.support_y[0])
    for a, b in zip(posterior.module()(batch.query_x[0]), posterior.predict(batch.query_x[0]),
                    strict=True):  # fmt: skip
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def test_a_run_of_sinusoids_has_nothing_to_prepare(tmp_path):
    run, _ = train(waves(iterations=1), tmp_path / "run")
    learner = ibaml.load(run.path)
    assert learner.inputs is None
    with pytest.raises(ValueError, match="how inputs are prepared is not known"):
        _ = learner.adapt(np.zeros((2, 1)), np.zeros((2, 1))).inputs


def write_fixtures() -> None:
    torch.manual_seed(0)
    FIXTURES.mkdir(exist_ok=True)
    learner = ibaml.methods.ibaml(ibaml.nn.mlp(2, 2, (3,)), likelihood=ibaml.Categorical("both"))
    for p in learner.parameters():
        p.data.add_(0.3 * torch.randn(p.shape))
    learner.inputs = ibaml.tasks.Inputs((2,), (0.1, 0.2), (1.0, 2.0))
    x = torch.linspace(-1, 1, 8).view(4, 2)
    posterior = learner.adapt(x, torch.tensor([0, 1, 0, 1]))
    for name, one in (("learner-1", learner), ("posterior-1", posterior)):
        one.save(FIXTURES / f"{name}.ibaml")
        (FIXTURES / f"{name}.json").write_text(json.dumps(posterior.predict_proba(x).tolist()))


if __name__ == "__main__":
    write_fixtures()
