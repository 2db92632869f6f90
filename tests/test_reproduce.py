"""`ibaml reproduce`: what lies in the folder, what is read instead of computed, what is refused;
and what Figure 1 and the theorems must show."""

from __future__ import annotations

import ast
import csv
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import ibaml
from ibaml.cli import app
from ibaml.linalg import ConjugateGradient, Dense
from ibaml.pages import report
from ibaml.paper.folder import write_study
from ibaml.paper.gradients import bounds, fig1
from ibaml.paper.gradients.curves import Curves, crossing, errors_of_a_task
from ibaml.paper.gradients.linear import LinearTest
from ibaml.paper.studies import STUDIES
from ibaml.parts import Parts
from ibaml.tasks import LinearRegression

runner = CliRunner()
TINY_FIG1 = {
    "seeds": "2", "dimension": "4", "steps": "0,1,5", "samples": "8", "scan_seeds": "2",
    "scan_steps": "1,2", "scan_stiffness": "0.5",
}  # fmt: skip
TINY_BOUNDS = replace(
    bounds.QUICK, seeds=1, dimension=16, jacobian_steps=16, points=2, solved_steps=(16,),
    steps=(0, 1, 16, 512, 1024, 1536),
)  # fmt: skip


def words(name: str, folder, options: dict[str, str]) -> list[str]:
    chosen = [word for k, v in options.items() for word in ("--option", f"{k}={v}")]
    return ["reproduce", name, "--out", str(folder), *chosen]


def silent(done: int, total: int, label: str) -> None:
    assert 0 <= done <= total


def test_fig1_leaves_pictures_numbers_and_a_text_and_is_read_the_second_time(tmp_path):
    done = runner.invoke(app, words("fig1", tmp_path, TINY_FIG1))
    assert done.exit_code == 0, done.output
    assert "20 parts computed, 0 read" in done.output
    assert (tmp_path / "fig1.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "fig1.pdf").read_bytes().startswith(b"%PDF")
    rows = list(csv.DictReader((tmp_path / "fig1.csv").open()))
    rules = {"explicit"} | {
        f"{kind} {solver}"
        for kind in ("energy", "ggn", "lemma")
        for solver in ("exact", "plain", "warm", "preconditioned")
    }
    assert {row["rule"] for row in rows} == rules
    assert len(rows) == 2 * len(rules) * 3  # expectations, rules, K
    assert len(list(csv.DictReader((tmp_path / "fig1_crossing.csv").open()))) == 8
    text = (tmp_path / "README.md").read_text()
    for part in (
        "ibaml reproduce fig1 --seeds 2 --option dimension=4", "Seed 0.", "torch", "scanning 480",
        "## Agrees with the paper", "## Does not agree",
    ):  # fmt: skip
        assert part in text
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["settings"]["dimension"] == 4
    first = (tmp_path / "fig1.csv").read_text()

    again = runner.invoke(app, words("fig1", tmp_path, TINY_FIG1))
    assert "0 parts computed, 20 read" in again.output
    assert (tmp_path / "fig1.csv").read_text() == first
    assert not [f for f in tmp_path.iterdir() if "partial" in f.name or f.name.startswith(".")]


def test_what_was_finished_is_kept_when_a_run_is_stopped(tmp_path):
    settings = STUDIES["fig1"].settings(changes=TINY_FIG1)

    def stop(done: int, total: int, label: str) -> None:
        if done == 3:
            raise KeyboardInterrupt("stopped after three parts were done")

    parts = Parts(tmp_path, "fig1")
    with pytest.raises(KeyboardInterrupt, match="stopped after three parts were done"):
        fig1.run(settings, parts, stop)
    assert (parts.computed, parts.reused) == (3, 0)
    rest = Parts(tmp_path, "fig1")
    fig1.run(settings, rest, silent)
    assert (rest.computed, rest.reused) == (17, 3)
    more = Parts(tmp_path, "fig1")
    fig1.run(replace(settings, seeds=3), more, silent)
    assert (more.computed, more.reused) == (2, 20)  # the new seed, both expectations


def test_a_part_is_known_by_its_settings_and_a_torn_one_is_computed_again(tmp_path):
    parts = Parts(tmp_path, "x")
    assert parts({"k": (1, 2)}, lambda: {"n": 1.5}) == {"n": 1.5}
    assert parts({"k": (1, 2)}, lambda: pytest.fail("computed twice")) == {"n": 1.5}
    assert parts({"k": (1, 3)}, lambda: {"n": 2.5}) == {"n": 2.5}
    assert Parts(tmp_path, "y")({"k": (1, 2)}, lambda: {"n": 3.5}) == {"n": 3.5}
    for file in tmp_path.iterdir():
        file.write_text(file.read_text()[:10])
    assert parts({"k": (1, 2)}, lambda: {"n": 4.5}) == {"n": 4.5}
    assert (parts.computed, parts.reused) == (3, 1)


def test_fresh_begins_anew(tmp_path):
    stale = tmp_path / "parts" / "stale.json"
    stale.parent.mkdir()
    stale.touch()
    options = {"seeds": "2", "steps": "2,1"}  # refused: nothing is lost by a word mistyped
    runner.invoke(app, [*words("fig1", tmp_path, options), "--fresh"])
    assert stale.exists()
    options = {**TINY_FIG1, "steps": "1", "scan_steps": "1", "dimension": "2"}
    done = runner.invoke(app, [*words("fig1", tmp_path, options), "--fresh"])
    assert "20 parts computed, 0 read" in done.output
    assert not stale.exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["fig9"], "fig1, fig2, table1, fig3, bounds, or all"),
        (["fig1", "--option", "color=red"], "there is no setting 'color'"),
        (["fig1", "--option", "stifness=1"], "did you mean stiffness?"),
        (["fig1", "--option", "scan_stiffness=0.5,3"], "between 0 and 2"),
        (["fig1", "--option", "steps"], "NAME=VALUE"),
        (["fig1", "--option", "steps=2,1"], "steps must rise"),
        (["fig1", "--option", "samples=many"], "samples must be a whole number"),
        (["fig1", "--option", "stiffness=2.5"], "between 0 and 2"),
        (["fig1", "--option", "spectrum=flat"], "one-small, half-small, linear, geometric"),
        (["fig1", "--seeds", "1"], "seeds must be 2 or more"),
        (["bounds", "--option", "steps=1,2"], "steps must rise from 0"),
        (["all", "--option", "steps=1"], "changes one study"),
    ],
)
def test_what_is_refused_and_in_which_words(tmp_path, arguments, said):
    done = runner.invoke(app, ["reproduce", *arguments, "--out", str(tmp_path)])
    assert done.exit_code == 1
    assert said in " ".join(done.output.split())
    assert not list(tmp_path.iterdir())


def test_figure_1_on_the_documented_set_up():
    """Four seeds, closed form. One test, so that it is computed once."""
    steps = (1, 2, 3, 4, 5, 6, 10)
    solvers = {
        "exact": Dense(),
        "plain": ConjugateGradient(2, precondition=False),
        "warm": ConjugateGradient(2, precondition=False, start="preconditioned"),
    }
    tasks = [
        errors_of_a_task(
            LinearTest(), steps, solvers, ("lemma", "energy"), seed=0, key=key, exact=True
        )
        for key in range(4)
    ]
    curves = Curves.of(steps, {"exact": tasks})
    ratio, pooled = curves.ratio["exact"], curves.pooled["exact"]
    mean = {rule: ratios.mean(0) for rule, ratios in ratio.items()}
    # the paper's form overtakes the explicit gradient near K = 5
    for errors in (mean, pooled):
        at = crossing(steps, errors["lemma exact"], errors["explicit"])
        assert at is not None
        assert 4 <= at <= 6
    # with nothing substituted there is no crossing
    assert (mean["energy exact"] < mean["explicit"]).all()
    assert (ratio["energy exact"] < ratio["explicit"])[:, :6].all()
    # two steps of CG suffice from a warm start, and from zero they are hardly a gradient at all
    assert np.allclose(ratio["lemma warm"], ratio["lemma exact"], rtol=1e-6)
    plain = mean["lemma plain"][4:]
    assert ((plain > 0.9) & (plain < 1.1)).all()
    assert pooled["lemma exact"][-1] < 0.6
    assert pooled["lemma plain"][-1] > 0.9


def test_crossing_is_where_two_curves_meet():
    assert crossing((0, 1, 2, 3), (1, 4, 4, 1), (9, 1, 1, 4)) == pytest.approx(2.5)
    assert crossing((1, 2), (1, 1), (2, 2)) == 1
    assert crossing((1, 2), (3, 3), (2, 2)) is None


@pytest.mark.parametrize("model", list(bounds.PROBLEMS))
def test_the_theorems_hold_and_errors_track_their_terms(model, tmp_path, monkeypatch):
    """One test a model, so that it is computed once."""
    cell = bounds.cell(bounds.PROBLEMS[model](TINY_BOUNDS, 0), TINY_BOUNDS)
    for case in bounds.CASES:
        assert min(bounds.ratios(cell, case)) >= 1
    slopes = bounds.slopes(cell)
    assert slopes["delta'"] == pytest.approx(1, abs=0.1)
    if model == "linear":  # test_paper.py: its lemma gradient does not feel the variances
        assert slopes["eps"] > 1.5
    else:
        assert slopes["eps"] == pytest.approx(1, abs=0.1)
    # Remark 3: one constant for all K
    factors = []
    for row in cell["rows"]:
        assert row["implicit bound, Remark 3"] >= row["implicit bound"] * (1 - 1e-12)
        factors.append(row["implicit bound, Remark 3"] / row["eps"])
    assert np.ptp(factors) <= 1e-9 * max(factors)
    deltas = [row["delta"] for row in cell["rows"] if row["delta"] is not None]
    assert deltas[-1] < deltas[0]
    if model == "linear":
        closed_form_constants(cell["rows"][0]["constants"])
    if model == "mlp":
        written_and_shown(cell, tmp_path, monkeypatch)


def closed_form_constants(constants) -> None:
    batch = LinearTest(dimension=16, support=16).batch(0, 0)
    x, queries = batch.support_x[0], batch.query_x[0]
    assert constants["d"] == pytest.approx(float(torch.linalg.matrix_norm(x, 2)) ** 2 / 1e-4)
    smooth = float(torch.linalg.matrix_norm(queries, 2)) ** 2 / 1e-4 / len(queries)
    assert constants["b"] == pytest.approx(smooth)
    assert constants["c"] == constants["e"] == 0
    assert constants["d_min"] == constants["d_max"] == 1


def written_and_shown(cell, tmp_path, monkeypatch) -> None:
    """The folder of a study, and the page over all of them."""
    monkeypatch.setattr(bounds, "cell", lambda problem, settings: cell)
    study = STUDIES["bounds"]
    findings = study.run(TINY_BOUNDS, Parts(tmp_path / "bounds" / "parts", "bounds"), silent)
    command = "ibaml reproduce bounds --option x=<1>"
    write_study(tmp_path / "bounds", study, TINY_BOUNDS, findings, command=command, seconds=1.0)
    names = {file.name for file in (tmp_path / "bounds").iterdir()}
    assert names == {
        "bounds.png", "bounds.pdf", "bounds.csv", "bounds_solves.csv", "README.md", "result.json",
        "parts",
    }  # fmt: skip
    page = report({"paper": tmp_path}).read_text()
    assert 'src="data:image/png;base64,' in page
    assert "x=&lt;1&gt;" in page
    assert "Theorem 2" in page


@pytest.mark.parametrize("room", ["ibaml", "ibaml.cli"])
def test_the_paper_is_imported_only_when_asked_for(room):
    code = f"import sys, {room}; sys.exit(any(m.startswith('ibaml.paper') for m in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def imports(nodes) -> list[str]:
    """What is imported from the library, as dotted names."""
    return [
        f"{node.module}.{alias.name}"
        for node in nodes
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "ibaml"
        for alias in node.names
    ]


def test_the_paper_is_a_client_of_what_other_rooms_show():
    """It takes no private name, and is taken by functions of commands alone."""
    src = Path(ibaml.__file__).parent
    clients = {"cli/bench.py", "cli/reproduce.py", "complexity.py"}
    for file in src.rglob("*.py"):
        name, tree = file.relative_to(src).as_posix(), ast.parse(file.read_text())
        every = imports(ast.walk(tree))
        if name.startswith("paper/"):
            parts = {part for dotted in every for part in dotted.split(".")} - {"__version__"}
            assert not [part for part in parts if part.startswith("_")], name
        else:
            of_paper = [dotted for dotted in every if dotted.startswith("ibaml.paper")]
            assert not of_paper or name in clients, name
            assert not set(of_paper) & set(imports(tree.body)), name


def test_help_names_every_study():
    done = runner.invoke(app, ["reproduce", "--help"], terminal_width=200)
    assert f"{', '.join(STUDIES)}, or all" in " ".join(done.output.split())


@pytest.mark.parametrize("spectrum", ["one-small", "half-small", "linear", "geometric"])
def test_the_linear_family_has_the_spectrum_it_is_asked_for(spectrum):
    family = LinearRegression(6, condition=20, scale=0.5, spectrum=spectrum, queries="aligned")
    batch = family.batch(0, [3], support=8, query=9)
    values = family.singular_values()
    assert values[0] == 0.5
    assert values[0] / values[-1] == pytest.approx(20)
    assert torch.allclose(torch.linalg.svdvals(batch.support_x[0]), values)
    assert torch.allclose(torch.linalg.svdvals(batch.query_x[0]), values)
    gram, other = (x.T @ x for x in (batch.support_x[0], batch.query_x[0]))
    assert torch.allclose(gram, other)  # the same singular vectors, too
