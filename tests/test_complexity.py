"""What a meta-gradient costs in K and L: what is measured, kept, said and drawn; never a timing."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from typer.testing import CliRunner

from ibaml.cli import app
from ibaml.machine import free_bytes, within_free_memory
from ibaml.paper.complexity import measure as measure_room
from ibaml.paper.complexity.findings import findings, slope
from ibaml.paper.complexity.measure import measure
from ibaml.paper.complexity.picture import draw_complexity, spread
from ibaml.paper.complexity.result import Cost, Measured, Point, read
from ibaml.paper.complexity.sweep import Arm, Sweep

runner = CliRunner()
SMALL = {
    "ks": "1,2,4",
    "ls": "1,3",
    "samples": "2",
    "image_size": 16,
    "channels": 2,
    "repeats": 1,
    "device": "cpu",
}


@pytest.fixture(scope="module")
def measured() -> Measured:
    return measure(Sweep.of(SMALL))


def memory_over(points: list[Point]) -> list[float]:
    return [p.backward.mb for p in points]


@pytest.mark.parametrize("curve", [("imaml", 1), ("ibaml", 2)])
def test_implicit_memory_is_flat_in_k_and_in_l(measured, curve):
    for points in (measured.along_steps(*curve), measured.along_cg_steps(*curve)):
        memory = memory_over(points)
        assert len(memory) > 1
        assert max(memory) <= 1.02 * min(memory)


@pytest.mark.parametrize("curve", [("maml", 1), ("abml", 2)])
def test_explicit_memory_grows_with_every_step(measured, curve):
    one, two, four = memory_over(measured.along_steps(*curve))
    assert two - one > 0.02 * one
    assert four - two == pytest.approx(2 * (two - one), rel=0.2)  # a line


def test_a_backward_needs_at_least_what_the_forward_kept(measured):
    for point in measured.points:
        assert not point.problem
        assert 0 < point.kept_mb <= point.forward.mb
        assert point.backward.mb >= point.kept_mb
        assert point.together.mb == max(point.forward.mb, point.backward.mb)
        assert min(point.forward.ms, point.backward.ms, point.together.ms) > 0


def test_more_samples_take_more_memory():
    options = {**SMALL, "methods": "ibaml", "ks": [1], "ls": [1], "samples": [2, 1]}
    one, two = (p.backward.mb for p in measure(Sweep.of(options)).points)
    assert 1.5 * one < two < 2.5 * one


def test_json_goes_there_and_back(measured, tmp_path):
    assert read(measured.write_json(tmp_path / "new" / "points.json")) == measured


def made_up() -> Measured:
    """Costs that are known: explicit 10·K ms and 5 + 3·K MB, implicit 8·L ms and 4 MB, both S
    times that for Gaussian beliefs; forward 10 ms."""
    sweep = Sweep.of({"device": "cpu", "ks": [1, 5, 10], "ls": [1, 5, 10]})

    def point(arm: Arm) -> Point:
        if arm.cg_steps is None:
            cost = Cost(10.0 * arm.steps * arm.samples, (5.0 + 3.0 * arm.steps) * arm.samples)
        else:
            cost = Cost(8.0 * arm.cg_steps * arm.samples, 4.0 * arm.samples)
        both = Cost(cost.ms + 10, cost.mb)
        return Point(arm, Cost(10.0, 1.0), cost, both, 1.0, "loop")

    return Measured(sweep, {"device": "nowhere"}, tuple(point(a) for a in sweep.arms()))


def test_findings_are_the_ratios_of_the_points():
    said = [f"{f.question} | {f.subject} | {f.answer}" for f in findings(made_up())]

    def line(*words: str) -> str:
        (sentence,) = [s for s in said if all(w in s for w in words)]
        return sentence

    assert "time × 1.00, memory × 1.00" in line("K grows", "iBaML, S = 5")
    assert "time × 10.00, memory × 1.00 (+8 ms, +0 MB a step)" in line("L grows", "iMAML")
    assert "time × 10.00, memory × 4.38 (+50 ms, +15 MB a step)" in line("K grows", "ABML, S = 5")
    assert "× 0.80 at 1, × 0.80 at 5, × 0.80 at 10" in line("K = L", "iBaML over ABML, S = 1")
    for factor in (1, 5):
        assert f"time × {factor}.00" in line("over deterministic", f"iBaML, S = {factor}")
    assert "50 % at K = 1, 17 % at K = 5, 9 % at K = 10" in line("share", " MAML")


def test_a_point_that_did_not_fit_is_shown_and_left_out_of_the_ratios(tmp_path):
    whole = made_up()
    last = max(i for i, p in enumerate(whole.points) if p.arm.method == "abml")
    points = list(whole.points)
    points[last] = Point(points[last].arm, problem="out of memory (memory)")
    measured = replace(whole, points=tuple(points))
    (growth,) = [
        f
        for f in findings(measured)
        if f.subject.startswith("ABML, S = 5") and "K gr" in f.question
    ]
    assert "K = 5 over K = 1" in growth.subject
    done = show(measured, tmp_path)
    assert "out of memory" in done.output


def test_out_of_memory_is_a_point_and_the_rest_goes_on(monkeypatch):
    measure_memory = measure_room.Bench.measure_memory

    def fails_at_three(bench) -> None:
        if bench.arm.steps == 3:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")
        measure_memory(bench)

    monkeypatch.setattr(measure_room.Bench, "measure_memory", fails_at_three)
    measured = measure(Sweep.of({**SMALL, "methods": "maml", "ks": "1,3,4"}))
    assert [p.backward is None for p in measured.points] == [False, True, False]
    assert "out of memory" in measured.points[1].problem


@pytest.mark.parametrize("refused", [False, True])
def test_phases_on_a_device_are_those_of_replays_where_it_records(refused, monkeypatch):
    """A clock that is told: a forward pass takes 5 seconds launched and 2 replayed, with its
    backward pass 7 replayed; launched, the backward pass takes none."""
    now = [0.0]
    room = measure_room
    launched = room.Bench.loss

    class Recording:
        def __init__(self, learner, work, batch, roots, *, backward: bool) -> None:
            if refused:
                raise RuntimeError("operation not permitted when stream is capturing")
            assert work(batch, roots).loss.isfinite()
            self.takes = 7 if backward else 2

        def replay(self) -> None:
            now[0] += self.takes

    def loss(bench, learner):
        now[0] += 5
        return launched(bench, learner)

    monkeypatch.setattr(room, "Recording", Recording)
    monkeypatch.setattr(room.Bench, "loss", loss)
    monkeypatch.setattr(room.Bench, "now", lambda bench: now[0])
    sweep = Sweep.of({**SMALL, "repeats": 2})
    arm = next(a for a in sweep.arms() if a.method == "ibaml")
    bench = room.Bench(sweep, arm, room.picture_tasks(1, image_size=16))
    bench.measure_memory()
    bench.time_replays()
    point = bench.point()
    expected = (5000, 0) if refused else (2000, 5000)
    assert (point.forward.ms, point.backward.ms) == expected
    assert bench.replayed == [5, 5]  # the meta-step as a training loop pays it
    assert ("launched" in point.strategy) == refused
    assert point.problem == ""


def test_an_allocation_beyond_free_memory_fails_and_does_not_kill():
    cpu = torch.device("cpu")
    free = free_bytes(cpu)
    with (
        within_free_memory(cpu),
        pytest.raises(RuntimeError, match="memory: you tried to allocate"),
    ):
        torch.empty(free + 2**30, dtype=torch.uint8)
    torch.empty(8)


def test_pictures_that_do_not_fit_are_refused_by_name():
    with pytest.raises(ValueError, match="tasks: the pictures of 10000000 tasks"):
        measure(Sweep.of({**SMALL, "tasks": 10_000_000}))


def show(measured: Measured, folder):
    path = measured.write_json(folder / "points.json")
    done = runner.invoke(
        app, ["bench", "complexity", "--from", str(path), "--out", str(folder / "shown")]
    )
    assert done.exit_code == 0, done.output
    return done


def test_the_command_measures_and_writes_table_csv_and_picture(tmp_path):
    words = ["bench", "complexity", "--methods", "maml,imaml", "--ks", "1,2", "--ls", "1,2"]
    words += ["--image-size", "16", "--channels", "2", "--repeats", "1", "--device", "cpu"]
    points = tmp_path / "points.json"
    done = runner.invoke(app, [*words, "--json", str(points), "--out", str(tmp_path / "out")])
    assert done.exit_code == 0, done.output
    assert "iMAML over MAML" in done.output
    assert (tmp_path / "out" / "complexity.png").read_bytes().startswith(b"\x89PNG")
    with (tmp_path / "out" / "complexity.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(r["method"], r["steps"], r["cg_steps"]) for r in rows] == [
        ("maml", "1", ""),
        ("maml", "2", ""),
        ("imaml", "1", "2"),
        ("imaml", "2", "1"),
        ("imaml", "2", "2"),
    ]
    kept = read(points)
    assert float(rows[0]["backward_mb"]) == kept.points[0].backward.mb


def test_a_measurement_of_elsewhere_is_shown_again(tmp_path):
    done = show(made_up(), tmp_path)
    assert "nowhere" in done.output
    assert (tmp_path / "shown" / "complexity.png").read_bytes().startswith(b"\x89PNG")
    made_up().write_csv(tmp_path / "here.csv")
    shown = (tmp_path / "shown" / "complexity.csv").read_bytes()
    assert shown == (tmp_path / "here.csv").read_bytes()


def test_a_few_points_are_drawn_too(tmp_path):
    whole = made_up()
    one = replace(whole, points=whole.points[:1])
    assert draw_complexity(one, tmp_path / "one.png").exists()
    none = replace(whole, points=(Point(whole.points[0].arm, problem="out of memory"),))
    with pytest.raises(ValueError, match="nothing to draw: no point of the measurement has costs"):
        draw_complexity(none, tmp_path / "none.png")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--ks", "0"], "ks must be whole numbers of 1 or more"),
        (["--ks", "1,x"], "ks must be whole numbers of 1 or more"),
        (["--ls", ""], "ls must be whole numbers of 1 or more"),
        (["--samples", "-1"], "samples must be whole numbers"),
        (["--methods", "imamel"], "did you mean imaml?"),
        (["--methods", "reptile"], "each of methods must be one of maml, imaml, abml, ibaml"),
        (["--device", "abacus"], "device must be auto, cpu, cuda or cuda:N"),
        (["--tasks", "0"], "tasks must be 1 or more"),
        (["--repeats", "0"], "repeats must be 1 or more"),
        (["--image-size", "8"], "image_size must be 16 or more"),
        (["--execution", "magic"], "execution must be one of"),
        (["--precision", "half"], "precision must be one of"),
        (["--curvature", "lemma"], "leave imaml out"),
        (["--from", "nowhere.json"], "nowhere.json: No such file"),
        (["--from", "nowhere.json", "--ks", "1"], "--ks does not go with --from"),
    ],
)
def test_what_is_refused_is_said_by_name(words, said):
    done = runner.invoke(app, ["bench", "complexity", *words])
    assert done.exit_code == 1, done.output
    assert said in " ".join(done.output.split())


@pytest.mark.parametrize(
    "spoil",
    [
        lambda c: "not json {",
        lambda c: "[]",
        lambda c: json.dumps({**c, "format": "another"}),
        lambda c: json.dumps({**c, "points": []}),
        lambda c: json.dumps({k: v for k, v in c.items() if k != "sweep"}),
        lambda c: json.dumps({**c, "points": [{**c["points"][0], "backward": {"ms": 1}}]}),
        lambda c: json.dumps(
            {**c, "points": [{**c["points"][0], "forward": {"ms": "x", "mb": 1}}]}
        ),
        lambda c: json.dumps({**c, "sweep": {**c["sweep"], "surprise": 1}}),
    ],
)
def test_a_broken_file_is_named(spoil, tmp_path):
    path = made_up().write_json(tmp_path / "points.json")
    path.write_text(spoil(json.loads(path.read_text())))
    done = runner.invoke(app, ["bench", "complexity", "--from", str(path)])
    assert done.exit_code == 1, done.output
    assert "is no measurement of" in " ".join(done.output.split())
    assert not isinstance(done.exception, KeyError | TypeError)


def test_it_is_measured_with_torch_and_numpy_alone(tmp_path):
    code = (
        "import sys\n"
        "for name in ('matplotlib', 'rich', 'typer', 'PIL'): sys.modules[name] = None\n"
        f"sys.argv = ['complexity', '--json', {str(tmp_path / 'points.json')!r}, '--methods', "
        "'maml', '--ks', '1', '--image-size', '16', '--channels', '2', '--repeats', '1', "
        "'--device', 'cpu', '--threads', '1']\n"
        "import runpy; runpy.run_module('ibaml.complexity', run_name='__main__')\n"
    )
    alone = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, env=alone)
    assert read(tmp_path / "points.json").points[0].arm == Arm("maml", 1, 1, None)


def test_a_slope_and_labels_apart():
    assert slope([1, 2, 5], [3, 5, 11]) == pytest.approx(2)
    heights = spread([0.5, 0.1, 0.5, 0.52], 0.1)
    assert sorted(heights)[0] == 0.1
    ordered = sorted(heights)[1:]
    assert all(b - a == pytest.approx(0.1) for a, b in pairwise(ordered))
    assert heights[3] == max(heights)
