"""The doctor: exact figures, eight planted faults named, five healthy runs left in peace."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import ibaml
from ibaml.cli import app
from ibaml.doctor import Checkup, examine
from ibaml.doctor.answers import answers
from ibaml.doctor.data import association, leaks, repeated
from ibaml.doctor.gradients import compare_with_unrolled, gradient_figures, meta_gradient, slope
from ibaml.doctor.measure import prior_figures
from ibaml.doctor.readings import Case
from ibaml.doctor.variants import with_rate, with_spread, with_steps, with_strength
from ibaml.doctor.verdict import findings
from ibaml.evaluation import score_tasks
from ibaml.evaluation.predict import fit_temperature
from ibaml.tasks import EpisodeTasks, Table, TableTasks, TaskBatch, feature_vectors
from ibaml.training import RunError, TrainingError, open_run, resolve, train
from oracles import F64
from problems import class_batch, linear_model, mlp_model, plain_learner, regression_batch
from runs import features_file, waves

# --- the meta-gradient ---------------------------------------------------------------------------


def test_the_unrolled_gradient_beside_itself_has_cosine_and_ratio_one():
    learner = plain_learner("abml", mlp_model(), gradient=ibaml.Unrolled(), objective="query")
    found = compare_with_unrolled(learner, class_batch())
    assert found is not None
    steps, cosine, ratio = found
    assert steps == 5
    for figures in (cosine, ratio):
        assert figures.keys() == {"mean", "log_var"}
        assert all(abs(figure - 1) < 1e-12 for figure in figures.values())


def test_first_order_beside_unrolled_is_what_a_quadratic_says():
    """For a linear model the unrolled gradient is (I − αH)ᴷ times the first-order one."""
    steps, lr = 4, 0.05
    learner = plain_learner("fomaml", linear_model(), solver=ibaml.GradientDescent(steps, lr))
    batch = regression_batch().select([0])
    x, y = batch.support_x[0], batch.support_y[0].reshape(-1)
    hessian = x.T @ x / len(x)  # of the mean nll, σ = 1
    power = torch.linalg.matrix_power(torch.eye(x.shape[1], dtype=F64) - lr * hessian, steps)
    w0 = learner.model.weight[0].detach()
    w = torch.linalg.solve(hessian, x.T @ y / len(x))
    w = w + power @ (w0 - w)
    qx, qy = batch.query_x[0], batch.query_y[0].reshape(-1)
    first = qx.T @ (qx @ w - qy) / len(qx)
    unrolled = power @ first
    found = compare_with_unrolled(learner, batch)
    assert found is not None
    _, cosine, ratio = found
    assert cosine["mean"] == pytest.approx(
        float(first @ unrolled / (first.norm() * unrolled.norm())), abs=1e-10
    )
    assert ratio["mean"] == pytest.approx(float(first.norm() / unrolled.norm()), rel=1e-10)


def head_learner(**options: Any) -> ibaml.MetaLearner:
    options = {
        "adapt": "head",
        "posterior": "diagonal",
        "beta": 0.05,
        "init_log_var": -2.0,
        **options,
    }
    return ibaml.methods.ibaml(mlp_model(), **options)


def test_the_slope_is_one_for_an_exact_gradient_and_not_for_a_wrong_one():
    exact = head_learner(cg_steps=200, solver=ibaml.HeadNewton(50, tol=1e-12))
    assert slope(exact, class_batch()) == pytest.approx(1, abs=1e-5)
    crude = exact.replace(gradient=replace(exact.gradient, linear_solver=ibaml.Neumann(1)))
    assert abs(slope(crude, class_batch()) - 1) > 1e-2


def test_the_error_of_a_starved_gradient_is_its_distance_from_the_dense_one():
    learner, batch = head_learner(cg_steps=1), class_batch()
    figures = gradient_figures(learner, batch)
    dense = learner.replace(gradient=replace(learner.gradient, linear_solver=ibaml.Dense()))
    a, b = meta_gradient(learner, batch), meta_gradient(dense, batch)
    flat_a, flat_b = (torch.cat([g.reshape(-1) for g in each.values()]) for each in (a, b))
    assert figures.error == pytest.approx(float((flat_a - flat_b).norm() / flat_b.norm()), rel=0.02)
    assert figures.error > 0.05
    assert figures.residual is not None
    assert gradient_figures(dense, batch).error < 1e-2


def test_what_has_no_steps_or_no_meta_loss_is_not_compared():
    assert compare_with_unrolled(head_learner(), class_batch()) is None
    reptile = gradient_figures(plain_learner("reptile", mlp_model()), class_batch())
    assert (reptile.steps, reptile.slope, reptile.residual) == (None, None, None)


def test_measuring_changes_nothing():
    learner, batch = plain_learner("ibaml", mlp_model()), class_batch()
    before = {n: t.clone() for n, t in learner.state_dict().items()}
    ibaml.check(learner, batch)
    assert all(torch.equal(before[n], t) for n, t in learner.state_dict().items())
    assert learner.training


# --- learners that differ in one setting ---------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [{}, {"lam": 0.2}, {"learn_beta": True, "beta": 0.3}, {"posterior": "full", "lam": 0.2}],
)
def test_strength_and_spread_are_moved_one_at_a_time(options):
    batch = class_batch()
    given = {"adapt": "head", "posterior": "diagonal", **options}
    learner = ibaml.methods.ibaml(mlp_model(), **given)
    now = prior_figures(learner, batch)
    weaker, narrower = with_strength(learner, 0.01), with_spread(learner, -4.0)
    assert weaker is not None
    assert narrower is not None
    assert prior_figures(weaker, batch).strength == pytest.approx(0.01 * now.strength)
    assert prior_figures(weaker, batch).noise == pytest.approx(now.noise)
    assert prior_figures(narrower, batch).strength == pytest.approx(now.strength)
    assert prior_figures(narrower, batch).noise == pytest.approx(now.noise * np.exp(-2))
    assert prior_figures(learner, batch) == now
    # adaptation reads the other strength
    assert not torch.allclose(
        weaker.adapt_all(batch).outputs(batch.query_x),
        learner.adapt_all(batch).outputs(batch.query_x),
    )


def test_a_point_has_a_strength_and_no_spread_and_maml_has_neither():
    imaml, maml = (plain_learner(name, mlp_model()) for name in ("imaml", "maml"))
    weaker = with_strength(imaml, 0.1)
    assert weaker is not None
    assert weaker.belief.lam == pytest.approx(0.1 * imaml.belief.lam)
    assert with_spread(imaml, -4.0) is None
    assert with_strength(maml, 0.1) is None


def test_steps_and_rates_given_by_name_or_learned():
    rates = {"0.*": 0.2, "*": 0.1}
    by_name = plain_learner("maml", mlp_model(), solver=ibaml.GradientDescent(3, rates))
    shorter = with_rate(by_name, 0.25)
    assert shorter is not None
    assert shorter.solver.lr == {"0.*": 0.05, "*": 0.025}
    learned = plain_learner(
        "maml", mlp_model(), solver=ibaml.GradientDescent(3, 0.1, learn_lr=True)
    )
    halved = with_rate(learned, 0.5)
    assert halved is not None
    rate = learned.step_size(learned.layout)
    assert torch.allclose(halved.step_size(halved.layout), 0.5 * rate)
    assert with_rate(head_learner(), 0.5) is None
    assert with_steps(by_name, 4).solver.steps == 12
    assert with_steps(by_name, 64) is None  # too many to try


# --- answers -------------------------------------------------------------------------------------


def test_answers_are_the_figures_of_an_evaluation():
    data = feature_vectors(*clusters())
    tasks = EpisodeTasks(data, 3, 1, queries=5)
    torch.manual_seed(0)
    learner = ibaml.methods.ibaml(
        ibaml.nn.mlp(6, 3, hidden=(8,)), likelihood=ibaml.Categorical("fitted"), adapt="head"
    )
    keys = range(10)
    found = answers(learner, tasks.batches("train", keys))
    scores = score_tasks(learner, tasks, "train", keys)
    summary = scores.summary(resamples=2)
    assert found.right == pytest.approx(summary["accuracy"].value)
    assert found.error == pytest.approx(summary["ece"].value, abs=1e-3)
    assert found.nll.mean() == pytest.approx(summary["nll"].value, abs=1e-3)
    # the best scale is the temperature that a fit chooses
    fit_temperature(learner, tasks, "train", keys)
    assert found.scale == pytest.approx(learner.likelihood.temperature, rel=0.01)
    again = answers(learner, tasks.batches("train", keys))
    assert again.nll.mean() == pytest.approx(found.informed.mean(), abs=1e-3)
    assert again.scale == pytest.approx(1, rel=0.01)
    assert (found.gap < 0) == (found.scale > 1)


def test_the_best_scale_of_numbers_is_where_the_nll_is_least():
    learner = plain_learner("ibaml", mlp_model(ways=1), likelihood=ibaml.Gaussian(0.1))
    batch = regression_batch(features=3)
    found = answers(learner, [batch])
    mean, variance = learner.adapt_all(batch).predict(batch.query_x, 10)
    error = (mean - batch.query_y.view_as(mean)).square()

    def nll(s):
        return float(
            (0.5 * (error / (s**2 * variance) + (2 * np.pi * s**2 * variance).log())).mean()
        )

    assert found.informed.mean() == pytest.approx(nll(found.scale), rel=1e-9)
    assert nll(found.scale) < min(nll(0.99 * found.scale), nll(1.01 * found.scale))
    assert found.confidence == pytest.approx(float((error <= 1.96**2 * variance).double().mean()))


def test_lone_queries_matter_only_where_statistics_are_the_batchs():
    data = ibaml.tasks.glyphs()
    batch = EpisodeTasks(data, 3, 1, queries=4).batches("train", range(2))
    torch.manual_seed(0)
    learner = ibaml.methods.ibaml(ibaml.nn.conv4(3, 2, 1, 28))
    for kind in ("running", "support"):
        together, alone = (answers(learner, batch, kind, alone=n).nll for n in (12, 11))
        one_by_one = answers(learner, batch, kind, alone=11)
        assert np.allclose(alone, one_by_one.nll)
        assert together.shape == alone.shape
    lone = answers(learner, batch, "batch", alone=12)
    posteriors = learner.adapt_all(batch[0], norm_stats="batch")
    p = torch.cat([posteriors.predict_proba(batch[0].query_x[:, i : i + 1]) for i in range(12)], 1)
    right = p.gather(-1, batch[0].query_y[..., None])[..., 0]
    assert lone.nll == pytest.approx(-right.log().mean(1).numpy(), abs=2e-2)


# --- data ----------------------------------------------------------------------------------------


def clusters(classes: int = 20, each: int = 8) -> tuple[np.ndarray, list[str]]:
    rng = np.random.default_rng(0)
    x = 3 * rng.normal(size=(classes, 1, 6)) + rng.normal(size=(classes, each, 6))
    return x.reshape(-1, 6).astype(np.float32), [f"c{i // each}" for i in range(classes * each)]


def test_association_is_sure_of_clusters_and_unsure_of_shuffled_labels():
    x, y = clusters()
    tasks = EpisodeTasks(feature_vectors(x, y), 3, 1, queries=5)
    told = association(tasks.batches("train", range(16)))
    assert told.z > 10
    assert told.share > 0.3
    z = []
    for seed in range(20):
        (batch,) = tasks.batches("train", range(8))
        order = np.random.default_rng(seed).permuted(batch.query_y.numpy(), axis=1)
        shuffled = replace(batch, query_y=torch.from_numpy(order))
        z.append(association([shuffled]).z)
    assert abs(np.mean(z)) < 1
    assert 0.5 < np.std(z) < 1.7  # it counts deviations


def test_association_of_numbers():
    (batch,) = waves_tasks(16)
    assert association([batch]).z > 4
    order = torch.from_numpy(np.random.default_rng(0).permutation(batch.query_y.shape[1]))
    assert association([replace(batch, query_y=batch.query_y[:, order])]).z < 3


def waves_tasks(count: int) -> list[TaskBatch]:
    from ibaml.training.build import open_tasks

    return open_tasks(waves(queries=15), torch.device("cpu")).batches("val", range(count))


def test_equal_examples_under_two_names_are_found_with_their_names():
    x, y = clusters()
    names = sorted(set(y), key=lambda name: int(name[1:]))
    splits = {"train": names[:10], "val": names[10:14], "test": names[14:]}
    clean = EpisodeTasks(feature_vectors(x, y, splits=splits), 3)
    assert leaks(clean) == ()
    x[14 * 8 : 15 * 8] = x[:8]  # c14 of the test split is c0 of the training split
    (leak,) = leaks(EpisodeTasks(feature_vectors(x, y, splits=splits), 3))
    assert leak.split == "test"
    assert leak.share == pytest.approx(1 / 6)
    assert leak.pairs == (("c0", "c14", 8),)


def test_a_tables_task_under_another_name_is_found_in_any_order_of_its_rows(tmp_path):
    rng = np.random.default_rng(0)
    rows = {name: rng.normal(size=(8, 2)) for name in "abcdef"}
    rows["e"] = rows["a"][::-1]
    lines = [f"{n},{x},{y}" for n, r in rows.items() for x, y in r]
    (tmp_path / "t.csv").write_text("\n".join(["task,x,y", *lines]) + "\n")
    (tmp_path / "s.json").write_text(
        json.dumps({"train": ["a", "b", "c"], "val": ["d"], "test": ["e", "f"]})
    )
    table = Table.read(
        tmp_path / "t.csv", task="task", features=["x"], target="y", splits=tmp_path / "s.json"
    )
    (leak,) = leaks(TableTasks(table))
    assert (leak.split, leak.share, leak.pairs) == ("test", 0.5, (("a", "e", 1),))


def test_queries_that_are_in_the_support_set_are_counted():
    batch = class_batch((6,))
    assert repeated([batch]) == 0
    x = batch.query_x.clone()
    x[:, 0] = batch.support_x[:, -1]
    assert repeated([replace(batch, query_x=x)]) == pytest.approx(1 / x.shape[1])


# --- eight faults and five healthy runs ----------------------------------------------------------

COMMON = {
    "ways": 3, "hidden": "16", "queries": 5, "tasks": 4, "iterations": 30, "val_every": 15,
    "val_tasks": 10, "log_every": 5, "tensorboard": False, "threads": 1,
}  # fmt: skip
DIAGONAL = {**COMMON, "posterior": "diagonal"}
MAML = {**COMMON, "method": "maml", "inner_lr": 0.1, "meta_lr": 0.01}
GLYPHS = {**COMMON, "data": "glyphs", "channels": 4, "hidden": None, "iterations": 24}


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("doctor")
    file = features_file(folder / "vectors.npz", 60, 12)
    x, y = (np.load(file)[name] for name in ("x", "y"))
    np.savez(folder / "shuffled.npz", x=x, y=np.random.default_rng(0).permutation(y))
    names = [f"c{c}" for c in range(60)]
    x = x.copy()
    x[48 * 12 : 50 * 12] = x[: 2 * 12]
    np.savez(folder / "leak.npz", x=x, y=np.array([f"c{c}" for c in y]))
    splits = {"train": names[:36], "val": names[36:48], "test": names[48:]}
    (folder / "splits.json").write_text(json.dumps(splits))
    return folder


def doctored(folder: Path, name: str, norm_stats: Any = None, **given: Any) -> Checkup:
    given = {n: v for n, v in given.items() if v is not None}
    for key in ("data", "splits"):
        if (folder / str(given.get(key))).exists():
            given[key] = str(folder / given[key])
    out = folder / name
    if not out.exists():
        with suppress(TrainingError):  # as planted
            train(resolve({"data": str(folder / "vectors.npz"), **given}), out)
    return examine(open_run(out), tasks=8, norm_stats=norm_stats)


PLANTED: dict[str, tuple[str, dict[str, Any]]] = {
    "beta": ("β too large", {**DIAGONAL, "beta": 1.0}),
    "rho": ("prior too wide", {**COMMON, "adapt": "all", "init_log_var": -1.0}),
    "rate": ("inner step too long", {**MAML, "solver": "descent", "inner_lr": 10.0}),
    "steps": ("too few steps", {**MAML, "steps": 1, "inner_lr": 0.01}),
    "cg": ("CG starved", {**DIAGONAL, "cg_steps": 1}),
    "labels": ("labels shuffled", {**COMMON, "data": "shuffled.npz"}),
    "leak": ("data leak", {**COMMON, "data": "leak.npz", "splits": "splits.json", "iterations": 5}),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_is_named_with_the_setting_to_change(data, name):
    fault, given = PLANTED[name]
    checkup = doctored(data, name, **given)
    assert checkup.fault == fault, checkup.verdict
    assert checkup.readings[fault] >= 1
    changed = {
        "beta": "--beta", "rho": "--init-log-var", "rate": "--inner-lr", "steps": "--steps",
        "cg": "--cg-steps", "labels": "ibaml data preview", "leak": "ibaml data check",
    }  # fmt: skip
    assert changed[name] in checkup.command


def test_statistics_of_lone_queries_are_named(data):
    checkup = doctored(data, "glyphs", norm_stats="batch", **GLYPHS)
    assert checkup.fault == "batch norm misused", checkup.verdict
    assert "--norm-stats running" in checkup.command or "--norm-stats support" in checkup.command


def test_running_statistics_that_were_never_filled_are_named():
    torch.manual_seed(0)
    tasks = EpisodeTasks(ibaml.tasks.glyphs(), 3, 1, queries=2)
    learner = ibaml.methods.ibaml(ibaml.nn.conv4(3, 2, 1, 28)).eval()
    (batch,) = tasks.batches("train", range(4))
    learner(batch).backward()
    checkup = ibaml.check(learner, batch)
    assert "batch norm misused" in [finding.fault for finding in checkup.findings]
    assert "never filled" in checkup.verdict


def cluster_learner(temperature: float = 4.0) -> tuple[ibaml.MetaLearner, TaskBatch]:
    """A learner that needs no training: the clusters are far apart."""
    torch.manual_seed(0)
    net = ibaml.nn.mlp(6, 3, hidden=(32,))
    learner = ibaml.methods.imaml(net, likelihood=ibaml.Categorical(temperature))
    tasks = EpisodeTasks(feature_vectors(*clusters()), 3, queries=5)
    return learner, tasks.batches("train", range(12))[0]


@pytest.mark.parametrize(
    ("temperature", "word"), [(50.0, "overconfident"), (0.1, "underconfident")]
)
def test_answers_that_are_too_sure_or_not_sure_enough_are_named(temperature, word):
    checkup = ibaml.check(*cluster_learner(temperature))
    assert checkup.fault == "confidence", checkup.verdict
    assert word in checkup.verdict
    assert (checkup.measured.answers.gap > 0) == (word == "overconfident")


def test_queries_that_were_given_with_their_answers_are_named():
    learner, batch = cluster_learner()
    x = torch.cat([batch.support_x, batch.query_x[:, 3:]], 1)
    y = torch.cat([batch.support_y, batch.query_y[:, 3:]], 1)
    checkup = ibaml.check(learner, replace(batch, query_x=x, query_y=y))
    assert checkup.fault == "queries in the support set", checkup.verdict


def test_an_implicit_gradient_that_is_far_too_long_is_named():
    learner, batch = cluster_learner()
    case = Case(ibaml.check(learner, batch).measured)
    assert findings(case) == ()
    long = replace(case.measured.gradient, steps=5, ratio={"mean": 8.0}, residual=0.2)
    (finding,) = findings(replace(case, measured=replace(case.measured, gradient=long)))
    assert finding.fault == "gradient unfit"
    assert "8.0 times as long as the unrolled one of the same 5 steps" in finding.sentence
    partly = replace(long, partly=True)  # of fewer steps than the run takes: no verdict on that
    assert not findings(replace(case, measured=replace(case.measured, gradient=partly)))


HEALTHY: dict[str, dict[str, Any]] = {
    "vectors": COMMON,
    "diagonal": DIAGONAL,
    "maml": {**MAML, "iterations": 60},
    "waves": {**{n: COMMON[n] for n in ("tensorboard", "threads", "val_tasks", "val_every")},
              "data": "sinusoids", "iterations": 60},
    "glyphs": GLYPHS,
}  # fmt: skip


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_run_has_no_verdict(data, name):
    checkup = doctored(data, name, **HEALTHY[name])
    assert checkup.healthy, checkup.verdict
    assert checkup.command == ""
    assert max(checkup.readings.values()) < 1


# --- results -------------------------------------------------------------------------------------


def test_the_command_shows_a_table_and_writes_the_same_figures_as_json(data):
    doctored(data, "vectors", **COMMON)
    run = data / "vectors"
    shown = CliRunner().invoke(app, ["doctor", str(run), "--tasks", "4"])
    assert shown.exit_code == 0, shown.output
    for words in ("accuracy", "temperature", "slope", "weaker prior", "throughput", "Healthy"):
        assert words in shown.output
    written = json.loads((run / "doctor.json").read_text())
    assert written["verdict"] == "Healthy: no fault was found."
    assert written["measured"]["tasks"] == 4
    assert written["facts"]["iterations"] == 30
    assert written["facts"]["validation"][-1][0] == 30
    checkup = examine(open_run(run), tasks=4)
    for part in ("answers", "prior", "association"):
        assert checkup.to_dict()["measured"][part] == pytest.approx(written["measured"][part])
    json.dumps(checkup.to_dict(), allow_nan=False)


def test_what_cannot_be_examined_is_refused_in_a_sentence(tmp_path):
    learner, batch = plain_learner("maml", mlp_model()), class_batch()
    with pytest.raises(ValueError, match="check needs two tasks or more"):
        ibaml.check(learner, batch.select([0]))
    with pytest.raises(TypeError, match="a TaskBatch is needed, got tuple"):
        ibaml.check(learner, (batch,))
    with pytest.raises(RunError, match="does not exist"):
        examine(open_run(tmp_path / "nothing"))
