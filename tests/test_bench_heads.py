"""`ibaml bench heads`: simple heads, chosen on validation classes, and runs on the same tasks."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.functional import normalize
from typer.testing import CliRunner

import ibaml
from ibaml.assessment import HeadsOptions, Protocol, assess, compare_heads
from ibaml.assessment.heads_options import HEADS
from ibaml.assessment.simple_heads import Tables, simple_heads
from ibaml.cli import app
from ibaml.fields import SettingsError
from ibaml.heads.baselines import ridge
from ibaml.heads.from_data import class_statistics, within_covariance
from ibaml.heads.one_vs_each import one_vs_each, predict_one_vs_each
from ibaml.heads.prior import HeadPrior
from ibaml.tasks import Episodes, TaskBatch, open_data
from ibaml.training import load, open_run, resolve, train
from runs import features_file

FEW = {"ways": 3, "shots": "1,2", "queries": 3, "tasks": 12, "val_tasks": 8, "device": "cpu"}
CHEAP = ("centroid", "ridge", "lda")


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """features.npz, splits.json and small runs."""
    root = tmp_path_factory.mktemp("heads")
    data = features_file(root / "features.npz")
    names = [str(c) for c in range(24)]
    splits = {"train": names[:12], "val": names[12:17], "test": names[17:]}
    (root / "splits.json").write_text(json.dumps(splits))
    common = {
        "data": data, "splits": str(root / "splits.json"), "iterations": 2, "tasks": 2,
        "queries": 3, "val_every": 0, "tensorboard": False, "threads": 1, "hidden": "8",
        "solver": "descent",
    }  # fmt: skip
    for name, settings in {
        "tied": {"ways": 5, "tie_head": True},
        "three": {"ways": 3},
        "five": {"ways": 5},
    }.items():
        train(resolve({**common, **settings}), root / name)
    return root


def options(place: Path, **given) -> HeadsOptions:
    return HeadsOptions.of({"splits": str(place / "splits.json"), **FEW, **given})


def bench(place: Path, *words: str | Path, given=FEW) -> str:
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in given.items()]
    arguments = [str(word) for word in words] or [str(place / "features.npz")]
    splits = f"--splits={place / 'splits.json'}"
    done = CliRunner().invoke(
        app, ["bench", "heads", *arguments, splits, *flags, f"--out={place / 'heads.json'}"],
        env={"COLUMNS": "120"},
    )  # fmt: skip
    if done.exit_code:
        assert isinstance(done.exception, SystemExit), f"a traceback: {done.exception!r}"
        return " ".join(done.output.split())
    return done.output


# --- heads ---------------------------------------------------------------------------------------


@pytest.fixture
def problem():
    """Tables of four-dimensional features, and two tasks by their rows."""
    generator = torch.Generator().manual_seed(0)
    examples = torch.randn(40, 4, generator=generator, dtype=torch.float64)
    base = 3 + torch.randn(30, 4, generator=generator, dtype=torch.float64) @ torch.diag(
        torch.tensor([3.0, 1.0, 0.5, 0.1], dtype=torch.float64)
    )
    labels = torch.arange(6).repeat_interleave(5)
    rows = torch.randperm(40, generator=generator)[:24].view(2, 12)
    return examples, base, labels, rows


def answered(problem, word: str, **values: float) -> tuple[torch.Tensor, torch.Tensor]:
    """A head's answer, and the table it read."""
    examples, base, labels, rows = problem
    (arm,) = simple_heads(Tables(examples, base, labels), [word])
    assert set(values) == set(arm.grid[0])
    table = arm.table(values).double()
    support, query = table[rows[:, :6]], table[rows[:, 6:]]
    y = torch.arange(3).repeat_interleave(2).expand(2, -1)
    return arm.answer(TaskBatch(support, y, query, y, classes=3), values), table


def means(x: torch.Tensor) -> torch.Tensor:
    return x.unflatten(1, (3, 2)).mean(2)


def test_lda_with_centroids_is_the_angle_between_whitened_features(problem):
    examples, base, labels, rows = problem
    logits, _ = answered(problem, "lda", shrinkage=0.3, scale=3.0)
    white = whitened(examples, base, labels)[rows]
    unit = normalize(white, dim=-1)
    expected = 6 * torch.cosine_similarity(unit[:, 6:, None], means(unit[:, :6])[:, None], dim=-1)
    assert torch.allclose(logits.log_softmax(-1), expected.log_softmax(-1), atol=1e-5)


def whitened(x: torch.Tensor, base: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Less the mean of the class means, times the root of the inverse within covariance."""
    statistics = class_statistics(base, labels)
    values, vectors = torch.linalg.eigh(within_covariance(statistics, 0.3))
    return (x - statistics.means.mean(0)) @ vectors / values.sqrt()


def test_protonet_does_not_depend_on_the_units_of_the_features(problem):
    examples, base, labels, rows = problem
    logits, table = answered(problem, "protonet", scale=2.0)
    apart = base - torch.stack([base[labels == c].mean(0) for c in range(6)])[labels]
    unit = apart.square().sum() / (30 - 6)
    assert torch.allclose(table, examples / unit.sqrt(), atol=1e-6)
    x = examples[rows]
    expected = -2 * torch.cdist(x[:, 6:], means(x[:, :6])).square() / unit
    assert torch.allclose(logits, expected, atol=1e-5)
    bigger = (100 * examples, 100 * base, labels, rows)
    assert torch.allclose(answered(bigger, "protonet", scale=2.0)[0], logits, atol=1e-5)


def test_logistic_regression_is_scikit_learns_on_the_features_it_names(problem):
    from sklearn.linear_model import LogisticRegression

    examples, base, labels, rows = problem
    apart = examples - base.mean(0)
    unit = apart / apart.norm(dim=-1, keepdim=True)
    white = normalize(whitened(examples, base, labels), dim=-1)
    for word, features, chosen in (
        ("logistic", unit, {"C": 3.0}),
        ("lda-logistic", white, {"C": 3.0, "shrinkage": 0.3}),
    ):
        logits, _ = answered(problem, word, **chosen)
        for t in range(2):
            support, query = features[rows[t, :6]], features[rows[t, 6:]]
            theirs = LogisticRegression(C=3.0, tol=1e-10, max_iter=10_000)
            theirs.fit(support, [0, 0, 1, 1, 2, 2])
            expected = torch.as_tensor(theirs.predict_proba(query))
            assert torch.allclose(logits[t].softmax(-1), expected, atol=1e-4)


def test_plda_with_equal_variances_between_is_one_gaussian_a_class(problem):
    """With floor 1, class means vary alike in all directions: a Bayesian nearest centroid."""
    logits, table = answered(problem, "plda", shrinkage=0.3, floor=1.0, unit=0.0)
    _, base, labels, rows = problem
    between = simple_between(base, labels)
    x = table[rows]
    gain = 2 * between / (2 * between + 1)
    variance = 1 + between - gain * between
    expected = -0.5 * torch.cdist(x[:, 6:], gain * means(x[:, :6])).square() / variance
    assert torch.allclose(logits.log_softmax(-1), expected.log_softmax(-1), atol=1e-5)


def simple_between(base: torch.Tensor, labels: torch.Tensor) -> float:
    """Mean variance of class means over all directions, beyond what their examples' noise adds."""
    statistics = class_statistics(base, labels)
    within = within_covariance(statistics, 0.3)
    apart = statistics.means - statistics.means.mean(0)
    white = torch.linalg.eigvalsh(
        torch.linalg.solve(torch.linalg.cholesky(within), apart.T @ apart / 5)
        @ torch.linalg.cholesky(within).inverse().T
    )
    return float((white - 1 / 5).clamp_min(0).mean())


def test_one_vs_each_is_near_its_exact_prediction(problem):
    logits, table = answered(problem, "one-vs-each", variance=10.0)
    x = table[problem[3]]
    y = torch.arange(3).repeat_interleave(2).expand(2, -1)
    prior = HeadPrior(x.new_zeros(4), x.new_full((4,), 10.0).log())
    exact = predict_one_vs_each(*one_vs_each(prior, x[:, :6], y, 3).posterior.moments(x[:, 6:]))
    assert (logits.softmax(-1) - exact).abs().max() < 0.15
    assert (logits.argmax(-1) == exact.argmax(-1)).all()


# --- what is chosen ------------------------------------------------------------------------------


def test_hyper_parameters_and_temperatures_are_the_best_of_the_validation_tasks(place):
    """Found again by brute force, on the tasks that `Episodes` gives."""
    (compared,) = compare_heads(place / "features.npz", options(place, shots="2", heads="ridge"))
    data = open_data(str(place / "features.npz"), splits=place / "splits.json")
    base = data.tensor[
        torch.isin(torch.from_numpy(data.labels), torch.tensor(data.splits["train"]))
    ]
    center = base.double().mean(0)

    def nll(split: str, tasks: int, strength: float, t: torch.Tensor) -> torch.Tensor:
        episodes = Episodes(data, split, 3, 2, 3, normalize=False, dtype=torch.float64)
        batch = episodes.batch(range(tasks))
        x, q = (normalize(a - center, dim=-1) for a in (batch.support_x, batch.query_x))
        logits = t.view(-1, 1, 1, 1) * ridge(x, batch.support_y, q, 3, strength)
        y = batch.query_y.expand(len(t), -1, -1)[..., None]
        return -logits.log_softmax(-1).gather(-1, y).flatten(1).mean(1)

    strengths = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3)
    temperatures = torch.linspace(-3, 3, 2001, dtype=torch.float64).exp()
    plain, tempered = compared.rows
    one = torch.ones(1, dtype=torch.float64)
    best = min(strengths, key=lambda s: nll("val", 8, s, one))
    assert plain.values == {"strength": best}
    assert plain.log_t is None
    assert plain.val_nll == pytest.approx(float(nll("val", 8, best, one)), abs=1e-5)
    best = min(strengths, key=lambda s: nll("val", 8, s, temperatures).min())
    losses = nll("val", 8, best, temperatures)
    assert tempered.values == {"strength": best}
    assert tempered.val_nll == pytest.approx(float(losses.min()), abs=1e-5)
    t = temperatures[losses.argmin()]
    assert tempered.chosen["t"] == pytest.approx(float(t), rel=0.01)
    assert tempered.scores.nll.mean() == pytest.approx(
        float(nll("test", 12, best, t[None])), abs=1e-3
    )


def test_test_classes_choose_nothing(place, tmp_path):
    with np.load(place / "features.npz") as content:
        x, y = content["x"], content["y"]
    rows = np.flatnonzero(y >= 17)  # the test classes
    mixed = y.copy()
    mixed[rows] = np.random.default_rng(1).permutation(y[rows])
    np.savez(tmp_path / "features.npz", x=x, y=mixed)
    asked = options(place, tasks=6)
    ours = compare_heads(place / "features.npz", asked)
    theirs = compare_heads(tmp_path / "features.npz", asked)
    for one, other in zip(ours, theirs, strict=True):
        assert len(one.rows) == 2 * len(HEADS)
        assert one.reference.label == other.reference.label
        for a, b in zip(one.rows, other.rows, strict=True):
            assert (a.label, a.values, a.log_t, a.val_nll) == (
                b.label,
                b.values,
                b.log_t,
                b.val_nll,
            )
            assert a.scores.correct.mean() > b.scores.correct.mean() + 0.15


def test_with_few_validation_classes_their_tasks_have_fewer_ways(place, tmp_path):
    splits = json.loads((place / "splits.json").read_text())
    (tmp_path / "splits.json").write_text(json.dumps({**splits, "val": splits["val"][:2]}))
    asked = options(place, splits=str(tmp_path / "splits.json"), shots="1", heads="ridge,lda")
    (one,) = compare_heads(place / "features.npz", asked)
    assert one.val_ways == 2
    assert one.notes[0] == (
        "hyper-parameters and temperatures are chosen on 2-way validation tasks: no more "
        "validation classes have 4 examples"
    )
    assert len(one.rows) == 4


def test_one_vs_each_is_taken_where_it_is_cheap_or_asked_for(place, tmp_path):
    data = features_file(tmp_path / "features.npz", classes=40)
    names = [str(c) for c in range(40)]
    splits = {"train": names[:12], "val": names[12:26], "test": names[26:]}
    (tmp_path / "splits.json").write_text(json.dumps(splits))
    tiny = {"splits": tmp_path / "splits.json", "ways": 12, "shots": (1, 2), "queries": 1}
    tiny = {**tiny, "splits": str(tiny["splits"]), "tasks": 2, "val_tasks": 2}
    one, two = compare_heads(data, HeadsOptions.of(tiny))
    assert "one-vs-each GP" in [row.name for row in one.rows]
    assert "one-vs-each GP" not in [row.name for row in two.rows]
    assert any(note.startswith("one-vs-each GP is left out") for note in two.notes)
    (asked,) = compare_heads(data, HeadsOptions.of({**tiny, "shots": (2,), "heads": "one-vs-each"}))
    assert [row.name for row in asked.rows] == 2 * ["one-vs-each GP"]


# --- runs ----------------------------------------------------------------------------------------


def test_a_run_has_the_figures_that_evaluate_gives_it(place, tmp_path):
    asked = options(place, shots="1", heads=",".join(CHEAP))
    (one,) = compare_heads(place / "features.npz", asked, {"a run": place / "tied"})
    assert [row.name for row in one.rows[-2:]] == ["a run", "a run"]
    assert one.reference is one.rows[-2]
    protocol = Protocol(tasks=12, ways=3, shots=1, queries=3, device="cpu")
    judged = assess(open_run(place / "tied"), protocol).main
    assert np.allclose(one.reference.scores.nll, judged.nll, atol=1e-5)
    assert np.array_equal(one.reference.scores.correct, judged.correct)
    # the same learner as a file
    file = load(place / "tied").save(tmp_path / "learner.ibaml")
    (other,) = compare_heads(place / "features.npz", asked, {"a file": file})
    assert np.allclose(other.reference.scores.nll, judged.nll, atol=1e-5)


def test_a_run_of_fixed_ways_needs_validation_tasks_of_these_for_a_temperature(place, tmp_path):
    asked = options(place, shots="1", heads="lda")
    (one,) = compare_heads(place / "features.npz", asked, {"run": place / "three"})
    assert [row.label for row in one.rows[2:]] == ["run", "run, tempered"]
    asked = replace(asked, ways=5)
    given = {"run": place / "five"}
    assert len(compare_heads(place / "features.npz", asked, given)[0].rows) == 4
    splits = json.loads((place / "splits.json").read_text())
    small = {**splits, "val": splits["val"][:4]}
    (tmp_path / "splits.json").write_text(json.dumps(small))
    file = load(place / "five").save(tmp_path / "five.ibaml")
    asked = replace(asked, splits=str(tmp_path / "splits.json"))
    (one,) = compare_heads(place / "features.npz", asked, {"run": file})
    assert [row.label for row in one.rows[2:]] == ["run"]
    assert one.reference.val_nll is None


# --- the command ---------------------------------------------------------------------------------


def test_the_command_shows_every_head_and_writes_every_figure(place):
    shown = bench(place, place / "features.npz", "--run", place / "tied")
    for name in (*HEADS.values(), "tied"):
        assert shown.count(name) >= 2, name  # a table for each number of shots
    assert "1 shot, 3 ways, 12 test tasks" in shown
    assert "nll minus that of tied" in shown
    assert str(place / "heads.json") in shown
    first = strict(place / "heads.json")
    assert first["options"]["shots"] == [1, 2]
    for shots in ("1", "2"):
        results = first["shots"][shots]["results"]
        assert len(results) == 2 * (len(HEADS) + 1)
        assert results["tied"]["minus reference"] == {}
        for name, row in results.items():
            assert row["accuracy"]["low"] <= row["accuracy"]["value"] <= row["accuracy"]["high"]
            assert ("t" in row["chosen"]) == name.endswith(", tempered")
            if name != "tied":
                gap = row["nll"]["value"] - results["tied"]["nll"]["value"]
                assert row["minus reference"]["nll"]["value"] == pytest.approx(gap)
    bench(place, place / "features.npz", "--run", place / "tied")
    second = strict(place / "heads.json")
    for content in (first, second):
        for one in content["shots"].values():
            for row in one["results"].values():
                assert row.pop("seconds per task") > 0
    assert first == second


def strict(path: Path):
    """JSON as the standard has it: NaN and Infinity are refused."""

    def never(word: str):
        raise AssertionError(f"{path.name} holds {word}, which is no JSON")

    return json.loads(path.read_text(), parse_constant=never)


def test_what_cannot_be_compared_is_refused_in_a_sentence(place, tmp_path):
    assert "'glyphs' is no .npz: simple heads read feature vectors" in bench(place, "glyphs")
    assert "is neither a path nor one of" in bench(place, "nowhere.npz")
    assert "each of heads must be one of centroid, protonet" in bench(
        place, given={**FEW, "heads": "svm"}
    )
    assert (
        "features, split 'test': 8-way episodes of 1 + 3 examples need 8 classes of 4, and there "
        "are 7 (0 classes are smaller): lower ways, shots or queries"
    ) in bench(place, given={**FEW, "ways": 8})
    assert "need 3 classes of 13, and there are 0 (7 classes are smaller)" in bench(
        place, given={**FEW, "shots": "1,10"}
    )
    run = place / "three"
    assert "three was trained 3-way and its head has a prior for each class: give --ways 3" in (
        bench(place, place / "features.npz", "--run", run, given={**FEW, "ways": 2})
    )
    assert "three: label 3 is out of range: the model has 3 outputs" in bench(
        place, place / "features.npz", "--run", run, given={**FEW, "ways": 4}
    )
    other = features_file(tmp_path / "features.npz", nuisance=3)
    assert "three was trained on features with other examples or splits" in bench(
        place, other, "--run", run
    )
    file = load(run).save(tmp_path / "learner.ibaml")
    assert "does not fit features: inputs must be rows of 6 numbers" in bench(
        place, other, "--run", file
    )
    waves = ibaml.methods.ibaml(ibaml.nn.mlp(6, 1), likelihood=ibaml.Gaussian(0.1))
    file = waves.save(tmp_path / "waves.ibaml")
    assert "waves.ibaml is regression, and simple heads classify" in bench(
        place, place / "features.npz", "--run", file
    )
    with pytest.raises(SettingsError, match="a run is named 'PLDA', as a simple head is"):
        compare_heads(place / "features.npz", options(place), {"PLDA": run})
    assert "nowhere does not exist" in bench(place, place / "features.npz", "--run", "nowhere")


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            {"val": []},
            "features, split 'val': hyper-parameters and temperatures are chosen on validation "
            "classes, and 0 have the 4 examples of a class of a 1-shot task: give --splits, or "
            "lower shots or queries",
        ),
        ({"val": ["12"]}, "and 1 have the 4 examples"),
        ({"train": ["0"]}, "1 training classes; LDA and PLDA need two or more"),
        ({"train": []}, "0 training classes"),
    ],
)
def test_splits_without_classes_to_choose_or_learn_on_are_refused(
    place, tmp_path, change, sentence
):
    splits = json.loads((place / "splits.json").read_text())
    (tmp_path / "splits.json").write_text(json.dumps({**splits, **change}))
    given = {**FEW, "splits": tmp_path / "splits.json"}
    assert sentence in bench(place, given=given)
