"""The studies that train or measure: what lies in their folders, what is not done twice, what a
stopped one goes on from, and what is refused."""

from __future__ import annotations

import csv
import json
import re
import shutil
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

from ibaml.assessment import Protocol, assess
from ibaml.cli import app
from ibaml.evaluation import ClassScores
from ibaml.evaluation.packed import packed, unpacked
from ibaml.paper.complexity import fig2
from ibaml.paper.complexity.result import Cost, Measured, Point
from ibaml.paper.complexity.sweep import Sweep
from ibaml.paper.studies import STUDIES
from ibaml.paper.study import Findings, Study
from ibaml.paper.trained import fig3
from ibaml.paper.trained import results as trained
from ibaml.parts import Parts
from ibaml.training import open_run, resolve
from runs import final_state, same

runner = CliRunner()
SIZES = {
    "image_size": 16, "channels": 2, "ways": 3, "queries": 2, "train_tasks": 6, "batch": 2,
    "head_tasks": 4, "head_batch": 2, "samples": 2, "validations": 1, "val_tasks": 2,
    "test_tasks": 5, "test_samples": 2, "test_queries": 3, "diagnosed": 2, "shots": 1,
}  # fmt: skip
FEW = "maml5,fomaml5,ibaml5,ibaml_head"


@pytest.fixture(scope="module", autouse=True)
def memory_is_not_probed():
    """The estimate of a meta-step's memory takes longer than these runs, and has its own tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ibaml.training.fitting.free_bytes", lambda device: None)
        yield


@pytest.fixture(scope="module")
def pictures(tmp_path_factory) -> Path:
    """Sixteen classes of small pictures, each a pattern of its own seen through noise."""
    folder = tmp_path_factory.mktemp("data") / "patterns"
    rng = np.random.default_rng(0)
    names = [f"c{i:02d}" for i in range(16)]
    for name in names:
        pattern = rng.uniform(0, 200, (16, 16, 3))
        (folder / name).mkdir(parents=True)
        for i in range(5):
            noisy = np.clip(pattern + rng.normal(0, 20, pattern.shape), 0, 255)
            Image.fromarray(noisy.astype(np.uint8)).save(folder / name / f"{i}.png")
    splits = {"train": names[:8], "val": names[8:12], "test": names[12:]}
    (folder.parent / "splits.json").write_text(json.dumps(splits))
    return folder


def chosen(pictures: Path, **changes):
    names = {"data": str(pictures), "splits": str(pictures.parent / "splits.json"), "arms": FEW}
    return {**SIZES, **names, **changes}


def words(name: str, folder: Path, options) -> list[str]:
    pairs = [word for k, v in options.items() for word in ("--option", f"{k}={v}")]
    return ["reproduce", name, "--out", str(folder), *pairs]


def settings(name: str, options):
    return STUDIES[name].settings(changes={k: str(v) for k, v in options.items()})


def silent(done: int, total: int, label: str) -> None:
    assert 0 <= done <= total


def table(file: Path) -> list[dict[str, str]]:
    with file.open() as lines:
        return list(csv.DictReader(lines))


def no_training(*_, **__):
    raise AssertionError("trained again")


def run_of(folder: Path, arm: str) -> Path:
    (folder_of_run,) = (folder / "runs").glob(f"{arm}-????????")
    return folder_of_run


@pytest.fixture(scope="module")
def done(pictures, tmp_path_factory) -> Path:
    """Table 1 of four arms; read by several tests, changed by none."""
    folder = tmp_path_factory.mktemp("table1")
    result = runner.invoke(app, words("table1", folder, chosen(pictures)))
    assert result.exit_code == 0, result.output
    assert "12 parts computed, 0 read" in result.output  # train, test, look inside
    return folder


class TestTable1:
    def test_the_folder_holds_pictures_numbers_and_a_text(self, done):
        assert (done / "table1.png").read_bytes().startswith(b"\x89PNG")
        assert (done / "table1.pdf").read_bytes().startswith(b"%PDF")
        text = (done / "README.md").read_text()
        for part in (
            "data patterns, not miniImageNet", "3 steps of 2 tasks", "2 steps of 2 tasks",
            "H is ggn, not Lemma 1's", "| MAML, K = 5 |", "batch (transductive)", "torch",
            "against the first-order one", "## Beside the paper", "only the order can agree",
        ):  # fmt: skip
            assert part in text
        assert len(list((done / "runs").iterdir())) == 4
        assert [row["arm"] for row in table(done / "table1.csv")] == FEW.split(",")
        assert table(done / "table1.csv")[0]["paper nll"] == "0.967"

    def test_its_figures_are_those_of_the_run_folders(self, done):
        row = {r["arm"]: r for r in table(done / "table1.csv")}["ibaml5"]
        run = open_run(run_of(done, "ibaml5"))
        protocol = Protocol(tasks=5, queries=3, samples=2, norm_stats="batch")
        summary = assess(run, protocol, also_transductive=False).main.summary()
        for metric in ("nll", "accuracy", "brier", "ece", "mce"):
            assert float(row[metric]) == pytest.approx(summary[metric].value, rel=1e-6)
            assert float(row[f"{metric} low"]) == pytest.approx(summary[metric].low, rel=1e-5)
            assert float(row[f"{metric} high"]) == pytest.approx(summary[metric].high, rel=1e-5)
        assert run.settings.seed == 0
        assert run.settings.inner_lr == 0.01
        assert run.settings.schedule == "constant"

    def test_differences_are_paired_with_the_first_arm(self, done):
        rows = table(done / "table1_differences.csv")
        assert {r["minus"] for r in rows} == {"maml5"}
        assert {r["arm"] for r in rows} == {"fomaml5", "ibaml5", "ibaml_head"}
        nll = {r["arm"]: float(r["nll"]) for r in table(done / "table1.csv")}
        for r in rows:
            assert float(r["low"]) <= float(r["value"]) <= float(r["high"])
            if r["figure"] == "nll":
                assert float(r["value"]) == pytest.approx(nll[r["arm"]] - nll["maml5"], abs=1e-6)

    def test_what_is_inside_is_known_of_every_arm(self, done):
        rows = {r["arm"]: r for r in table(done / "table1_inside.csv")}
        assert float(rows["fomaml5"]["ratio to first order, all"]) == pytest.approx(1)
        assert float(rows["fomaml5"]["cosine to first order, mean"]) == pytest.approx(1)
        assert float(rows["maml5"]["ratio to first order, all"]) != pytest.approx(1, abs=1e-6)
        assert rows["maml5"]["CG residual"] == ""
        assert float(rows["ibaml5"]["CG residual"]) > 0
        for block in ("mean", "log_var"):
            after = float(rows["ibaml_head"][f"inner gradient, {block}"])
            assert after < float(rows["ibaml_head"][f"inner gradient, {block} at the prior"])

    def test_finished_arms_are_read_and_only_new_tests_are_made(
        self, done, pictures, tmp_path, monkeypatch
    ):
        folder = tmp_path / "copy"
        shutil.copytree(done, folder)
        monkeypatch.setattr(trained, "train", no_training)
        monkeypatch.setattr(trained, "resume", no_training)
        again = runner.invoke(app, words("table1", folder, chosen(pictures)))
        assert "0 parts computed, 12 read" in again.output
        assert (folder / "table1.csv").read_text() == (done / "table1.csv").read_text()
        more = runner.invoke(app, words("table1", folder, chosen(pictures, test_tasks=6)))
        assert "4 parts computed, 8 read" in more.output, more.output
        longer = runner.invoke(app, words("table1", folder, chosen(pictures, test_steps=6)))
        assert "3 parts computed, 9 read" in longer.output, longer.output  # not the head's
        assert "with K = 6 (the head as in training)" in (folder / "README.md").read_text()
        other = runner.invoke(app, words("table1", folder, chosen(pictures, meta_lr=0.002)))
        assert "trained again" in str(other.exception)  # another setting is another run

    def test_elsewhere_without_data_runs_or_matplotlib_the_parts_are_enough(
        self, done, tmp_path, monkeypatch
    ):
        folder = tmp_path / "moved"
        shutil.copytree(done / "parts", folder / "parts")
        gone = chosen(Path("/nowhere/patterns"), splits="/nowhere/splits.json", device="cpu")
        for name in [m for m in sys.modules if m.split(".")[0] == "matplotlib"]:
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.setitem(sys.modules, "matplotlib", None)
        bare = runner.invoke(app, words("table1", folder, gone))
        assert bare.exit_code == 0, bare.output
        assert 'pip install "ibaml[plots]"' in bare.output
        assert "no pictures: matplotlib is missing" in bare.output
        assert not (folder / "table1.png").exists()
        assert (folder / "table1.csv").read_text() == (done / "table1.csv").read_text()
        assert "![" not in (folder / "README.md").read_text()
        monkeypatch.undo()
        drawn = runner.invoke(app, words("table1", folder, gone))
        assert "0 parts computed, 12 read" in drawn.output
        assert (folder / "table1.png").exists()


def test_arms_with_our_defaults_are_the_runs_that_ibaml_train_makes(pictures, tmp_path):
    """The same data, network and length as the others; of the method, whatever is recommended."""
    options = chosen(pictures, arms="maml_ours,abml_ours,ibaml_ours,ibaml5_ours", our_batch=3)
    result = runner.invoke(app, words("table1", tmp_path, options))
    assert result.exit_code == 0, result.output
    for method, steps in (("maml", 5), ("abml", 5), ("ibaml", 15)):
        run = open_run(run_of(tmp_path, f"{method}-ours")).settings
        shared = ("data", "splits", "image_size", "channels", "ways", "shots", "queries")
        given = {name: getattr(run, name) for name in shared}
        plain = resolve({**given, "method": method, "adapt": "all"})
        assert run.steps == plain.steps == steps
        of_method = (
            "beta", "init_log_var", "samples", "noise", "curvature", "block", "stopping",
            "meta_lr", "schedule", "objective",
        )  # fmt: skip
        assert [getattr(run, n) for n in of_method] == [getattr(plain, n) for n in of_method]
        assert run.inner_lr == 0.3  # a small network
        assert (run.iterations, run.tasks, run.temperature) == (2, 3, "fitted")
    assert open_run(run_of(tmp_path, "ibaml5-ours")).settings.steps == 5
    text = (tmp_path / "README.md").read_text()
    assert "iBaML, our defaults" in text
    assert re.search(r"iBaML, our defaults (and|is) .*MAML, our defaults", text)


def test_an_arm_that_was_stopped_goes_on_to_the_same_end(done, pictures, tmp_path):
    wanted = settings("table1", chosen(pictures, arms="ibaml5"))
    study = STUDIES["table1"]

    def stop(count: int, total: int, label: str) -> None:
        if "training, loss" in label and count >= 4:
            raise KeyboardInterrupt("stopped while an arm was training")

    parts = Parts(tmp_path / "parts", "table1")
    with pytest.raises(KeyboardInterrupt, match="stopped while an arm was training"):
        study.run(wanted, parts, stop)
    run = run_of(tmp_path, "ibaml5")
    assert (parts.computed, len(list((run / "checkpoints").glob("step-*")))) == (0, 1)
    assert not (run / "checkpoints" / "step-00000003.safetensors").exists()
    rest = Parts(tmp_path / "parts", "table1")
    findings = study.run(wanted, rest, silent)
    assert rest.computed == 3
    assert same(final_state(run), final_state(run_of(done, "ibaml5")))
    assert float(findings.tables["table1"][0]["nll"]) == pytest.approx(
        {r["arm"]: float(r["nll"]) for r in table(done / "table1.csv")}["ibaml5"]
    )
    assert "table1_differences" not in findings.tables  # one arm differs from nobody


def test_an_arm_that_diverges_is_reported_and_the_others_go_on(pictures, tmp_path):
    options = chosen(
        pictures, arms="maml5,ibaml_head", inner_lr=1e30, train_tasks=25, batch=1, shots=1
    )
    finished = runner.invoke(app, words("fig3", tmp_path, options))
    assert finished.exit_code == 0, finished.output
    text = (tmp_path / "README.md").read_text()
    assert "MAML, K = 5: training failed. stopped: 20 faulty iterations" in text
    rows = {r["arm"]: r for r in table(tmp_path / "fig3.csv")}
    assert rows["maml5"]["failed"].startswith("stopped")
    assert not rows["ibaml_head"]["failed"]


def test_fig3_has_bars_reliability_diagrams_and_their_bins(pictures, tmp_path):
    finished = runner.invoke(app, words("fig3", tmp_path, chosen(pictures, arms="maml5,ibaml5")))
    assert finished.exit_code == 0, finished.output
    for name in ("fig3.png", "fig3.pdf", "fig3_reliability.png"):
        assert (tmp_path / name).stat().st_size > 1000
    bins = table(tmp_path / "fig3_bins.csv")
    ece = {r["arm"]: float(r["ece"]) for r in table(tmp_path / "fig3.csv")}
    for arm in ("maml5", "ibaml5"):
        own = [r for r in bins if r["arm"] == arm]
        count = np.array([int(r["predictions"]) for r in own])
        gap = np.array([abs(float(r["accuracy"]) - float(r["confidence"])) for r in own])
        assert count.sum() == 5 * 3 * 3  # tasks, classes, queries
        assert (count * gap).sum() / count.sum() == pytest.approx(ece[arm])
    text = (tmp_path / "README.md").read_text()
    assert "lowest first, of the paper's methods" in text
    assert "confident by" in text


@pytest.mark.parametrize("learned", [True, False])
def test_calibration_at_chance_is_no_merit(learned):
    rng = np.random.default_rng(0)

    def answers(right: float, sure: float) -> ClassScores:
        shape = (200, 15)
        correct, confidence = rng.random(shape) < right, np.full(shape, sure)
        return ClassScores(tuple(range(200)), -np.log(confidence), confidence, correct, confidence)

    ours = answers(0.6, 0.6) if learned else answers(0.2, 0.2)
    scores = {"maml5": answers(0.7, 0.9), "ibaml5": ours}
    agrees, differs = fig3.judgment(fig3.FULL, scores)
    where = agrees if learned else differs
    assert any("iBaML, K = 5 is better than MAML, K = 5 by ECE" in text for text in where)
    assert any("learned next to nothing" in text for text in differs) is not learned
    idle = {"maml5": answers(0.2, 0.2), "ibaml5": answers(0.6, 0.7)}
    agrees, differs = fig3.judgment(fig3.FULL, idle)
    assert not agrees
    assert all("MAML, K = 5 learned next to nothing" in text for text in differs)
    assert fig3.judgment(fig3.FULL, {"maml5": idle["maml5"]}) == ([], [])


def test_packed_scores_are_the_same_scores():
    rng = np.random.default_rng(0)
    logits = torch.tensor(rng.normal(size=(4, 6, 5)), dtype=torch.float32)
    labels = torch.tensor(rng.integers(0, 5, (4, 6)))
    scores = ClassScores.of(range(4), logits.softmax(-1), labels)
    again = unpacked(json.loads(json.dumps(packed(scores))))
    assert again.keys == scores.keys
    assert (again.correct == scores.correct).all()
    assert (again.confidence == scores.confidence).all()  # exactly: bins depend on it
    assert np.allclose(again.nll, scores.nll, rtol=1e-6)
    assert np.allclose(again.brier, scores.brier, rtol=1e-6)


# --- Figure 2 ------------------------------------------------------------------------------------


def made_up(grow: float = 10.0, price: float = 2.0) -> Measured:
    """What the paper describes: costs of ``grow`` a step where they are explicit, of 10 a product
    where implicit, and Bayes at ``price`` times the deterministic method."""
    sweep = Sweep.of(
        {"ks": (1, 5, 10), "ls": (1, 5, 10), "samples": (1,), "repeats": 1, "tasks": 1}
    )
    points = []
    for arm in sweep.arms():
        factor = price if arm.method in ("abml", "ibaml") else 1.0
        steps = arm.steps * grow if arm.cg_steps is None else 10.0 * arm.cg_steps
        kept = 3.0 * arm.steps if arm.cg_steps is None else 0.0
        back = Cost(factor * (5.0 + steps), factor * (20.0 + kept))
        points.append(Point(arm, Cost(1.0, 1.0), back, back, 1.0, "loop"))
    return Measured(sweep, {"device": "an abacus"}, tuple(points))


def test_fig2_of_a_file_measured_elsewhere(tmp_path):
    file = made_up().write_json(tmp_path / "elsewhere.json")
    options = {"measured": str(file)}
    finished = runner.invoke(app, words("fig2", tmp_path / "out", options))
    assert finished.exit_code == 0, finished.output
    assert "0 parts computed, 0 read" in finished.output
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    assert result["differs"] == []
    assert "an abacus" in result["machine"]
    assert "MAML: the backward's time grows linearly in K" in " ".join(result["agrees"])
    assert (tmp_path / "out" / "fig2.png").exists()
    assert (tmp_path / "out" / "fig2_more.png").exists()
    assert len(table(tmp_path / "out" / "fig2.csv")) == len(made_up().points)


def test_fig2_says_what_does_not_agree():
    findings = fig2.findings_of(fig2.QUICK, made_up(grow=100.0, price=4.0))
    said = " ".join(findings.differs)
    assert "iMAML over MAML: the backward's time at K = L is not comparable" in said
    assert "ABML, S = 1 over MAML: time of the backward × 4.00 to 4.00" in said
    bent = made_up()
    points = tuple(
        replace(p, backward=Cost(float(p.arm.steps**3), 1.0 + p.arm.steps)) for p in bent.points
    )
    said = " ".join(fig2.findings_of(fig2.QUICK, replace(bent, points=points)).differs)
    assert "MAML: the backward's time grows, not on a line, in K" in said
    assert "iBaML, S = 1: the backward's memory depends on K" in said


def test_fig2_is_measured_once(tmp_path):
    options = {
        "methods": "maml,imaml", "ks": "1,2", "ls": "1", "image_size": 16, "channels": 2,
        "repeats": 1,
    }  # fmt: skip
    first = runner.invoke(app, words("fig2", tmp_path, options))
    assert first.exit_code == 0, first.output
    assert "1 parts computed, 0 read" in first.output
    text = (tmp_path / "fig2.csv").read_text()
    again = runner.invoke(app, words("fig2", tmp_path, {**options, "device": "cpu"}))
    assert "0 parts computed, 1 read" in again.output
    assert (tmp_path / "fig2.csv").read_text() == text
    assert "Seed" not in (tmp_path / "README.md").read_text()


# --- refused, and all ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["table1", "data=glyfs"], "neither a path nor one of"),
        (["table1", "data=miniimagenet", "root=/nowhere"], "/nowhere does not exist"),
        (["table1", "arms=maml5,mamal"], "got 'mamal'; did you mean maml5?"),
        (["table1", "arms=maml5,maml5"], "each once"),
        (["table1", "train_tasks=0"], "train_tasks must be 1 or more"),
        (["table1", "test_steps=-1"], "test_steps must be 0 or more"),
        (["table1", "train_tasks=many"], "train_tasks must be a whole number"),
        (["table1", "norm_stats=mean"], "norm_stats must be one of"),
        (["fig3", "which=worst"], "which must be one of best, last"),
        (["fig3", "precision=double"], "precision must be one of"),
        (["fig3", "inner_lr=-1"], "inner_lr must be above 0"),
        (["fig3", "color=red"], "there is no setting 'color'"),
        (["fig2", "ks=none"], "ks must be whole numbers"),
        (["fig2", "measured=/nowhere.json"], "No such file"),
    ],
)
def test_what_is_refused_and_in_which_words(tmp_path, arguments, said):
    name, *options = arguments
    pairs = [word for option in options for word in ("--option", option)]
    refused = runner.invoke(app, ["reproduce", name, "--out", str(tmp_path), *pairs])
    assert refused.exit_code == 1
    assert said in " ".join(refused.output.split())
    assert not list(tmp_path.glob("*/*"))  # nothing was trained, nothing kept


@dataclass(frozen=True)
class Stub:
    seed: int = 0
    loud: bool = False


def test_all_goes_on_where_one_study_lacks_its_data(tmp_path, monkeypatch):
    def lacking(settings, parts, progress):
        raise ValueError("there is no data")

    def fine(settings, parts, progress):
        return Findings(["a set-up"], ["one thing"], [], {}, {"b": [{"x": 1}]}, {})

    studies = {n: Study(n, n, Stub(), Stub(), run) for n, run in (("a", lacking), ("b", fine))}
    monkeypatch.setattr("ibaml.paper.studies.STUDIES", studies)
    finished = runner.invoke(app, ["reproduce", "all", "--quick", "--out", str(tmp_path)])
    assert finished.exit_code == 1
    assert "there is no data" in finished.output
    assert "failed: a" in finished.output
    assert "one thing" in (tmp_path / "report.html").read_text()
    assert studies["b"].settings(changes={"loud": "yes"}).loud
    with pytest.raises(ValueError, match="loud must be true or false"):
        studies["b"].settings(changes={"loud": "perhaps"})
