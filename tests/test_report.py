"""Pictures: written whole or not at all, and they show what they say."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from PIL import Image

from ibaml.evaluation import ClassScores, Interval
from ibaml.report import (
    Fit,
    draw_comparison,
    draw_episode,
    draw_fits,
    draw_reliability,
    draw_selective,
)
from ibaml.report.calibration import reliability_figure
from test_scores import by_hand, classes, regression

RED, GREEN = (0xC0, 0x39, 0x2B), (0x2E, 0x8B, 0x57)


def episode(ways: int = 3, queries: int = 2) -> tuple[torch.Tensor, torch.Tensor, list[str]]:
    return torch.zeros(ways, 1, 1, 8, 8), torch.ones(ways, queries, 1, 8, 8), ["a", "b", "c$"]


def fit() -> Fit:
    x = torch.linspace(0, 1, 9)[:, None]
    return Fit("1 example", x, x.sin(), x, x, x[:1], x[:1])


DRAW = {
    "fits": lambda path: draw_fits([("iBaML", [fit()])], path, "h"),
    "episode": lambda path: draw_episode(*episode(), path, "h"),
    "reliability": lambda path: draw_reliability({"A": classes(), "B": classes(1)}, path, "h"),
    "selective": lambda path: draw_selective({"A $x": classes(), "B": classes(1)}, path, "h"),
    "comparison": lambda path: draw_comparison({"A $x": classes().summary()}, path, "h"),
    "regression": lambda path: draw_comparison({"A": regression().summary()}, path, "h"),
}


def pixels(path) -> np.ndarray:
    return np.asarray(Image.open(path).convert("RGB")).reshape(-1, 3)


def count(path, color: tuple[int, int, int]) -> int:
    return int((pixels(path) == color).all(-1).sum())


@pytest.mark.parametrize("kind", DRAW)
def test_a_picture_is_written(kind, tmp_path):
    path = tmp_path / "new" / "picture.png"
    assert DRAW[kind](path) == path
    assert pixels(path).std() > 5
    assert [p.name for p in path.parent.iterdir()] == ["picture.png"]


def test_a_failure_leaves_the_old_picture(tmp_path, monkeypatch):
    path = tmp_path / "picture.png"
    path.write_bytes(b"old")

    def fail(figure, where, **options):
        where.write(b"half")
        raise OSError("the disk is already full")

    monkeypatch.setattr(Figure, "savefig", fail)
    with pytest.raises(OSError, match="the disk is already full"):
        DRAW["selective"](path)
    assert path.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["picture.png"]


def test_two_who_draw_one_picture_at_once_do_not_disturb_each_other(tmp_path, monkeypatch):
    path, drawn, others = tmp_path / "picture.png", Figure.savefig, ["fits"]

    def interrupted(figure, where, **options):
        drawn(figure, where, **options)
        if others:
            DRAW[others.pop()](path)

    monkeypatch.setattr(Figure, "savefig", interrupted)
    DRAW["selective"](path)
    DRAW["selective"](alone := tmp_path / "alone.png")
    assert path.read_bytes() == alone.read_bytes()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["alone.png", "picture.png"]


@pytest.mark.parametrize("name", ["picture", "picture.xyz"])
def test_an_unknown_kind_of_picture_is_named(name, tmp_path):
    with pytest.raises(ValueError, match=rf"{name}: a picture's name ends in .*\.png"):
        DRAW["fits"](tmp_path / name)


def test_importing_the_room_imports_no_matplotlib():
    code = "import ibaml.report, sys; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


class TestEpisode:
    def draw(self, tmp_path, answers):
        probabilities = 0.1 + 0.7 * torch.nn.functional.one_hot(torch.tensor(answers), 3)
        return draw_episode(*episode(), tmp_path / "e.png", "h", probabilities=probabilities)

    def test_green_where_right_and_red_where_wrong(self, tmp_path):
        right = self.draw(tmp_path, [[0, 0], [1, 1], [2, 2]])
        assert (count(right, GREEN) > 1000, count(right, RED)) == (True, 0)
        wrong = self.draw(tmp_path, [[1, 1], [0, 0], [0, 0]])
        assert (count(wrong, GREEN), count(wrong, RED) > 1000) == (0, True)
        plain = DRAW["episode"](tmp_path / "plain.png")
        assert (count(plain, GREEN), count(plain, RED)) == (0, 0)

    @pytest.mark.parametrize("shape", [(3, 1, 3), (2, 2, 3), (3, 2, 2), (3, 2)])
    def test_a_wrong_shape_is_named(self, shape, tmp_path):
        with pytest.raises(ValueError, match=r"probabilities must be .* \(3, 2, 3 or more\)"):
            draw_episode(*episode(), tmp_path / "e.png", "h", probabilities=torch.rand(shape))


class TestReliability:
    """Eight answers of confidence 0.5: six right, or two."""

    def figure(self, right: int) -> Figure:
        return reliability_figure({"A": by_hand([0.5] * 8, np.arange(8) < right)}, "h")

    def test_the_solid_bar_is_the_accuracy_and_the_gap_to_the_confidence_is_hatched(self):
        for right in (6, 2):
            patches = self.figure(right).axes[0].patches
            solid = [p.get_height() for p in patches if not p.get_hatch()]
            assert solid == pytest.approx([right / 8 if b == 7 else 0 for b in range(16)])
            hatched = [p.get_bbox() for p in patches if p.get_hatch()]
            (gap,) = (box for box in hatched if box.height > 0)
            assert (gap.y0, gap.y1) == pytest.approx(sorted((0.5, right / 8)))

    def test_the_legend_says_which_gap_is_which(self):
        for right, said in ((6, "underconfident"), (2, "overconfident")):
            handles, labels = self.figure(right).axes[0].get_legend_handles_labels()
            shown = [
                label
                for handle, label in zip(handles, labels, strict=True)
                if any(p.get_hatch() and p.get_bbox().height > 0 for p in handle.get_children())
            ]
            assert shown == [f"gap: {said}"]


@pytest.mark.parametrize("draw", [draw_reliability, draw_selective])
def test_scores_that_are_no_classification_are_named(draw, tmp_path):
    with pytest.raises(ValueError, match="'B' are RegressionScores: confidence is of"):
        draw({"A": classes(), "B": regression()}, tmp_path / "p.png", "h")
    with pytest.raises(ValueError, match="scores: nothing to draw, give at least one learner's"):
        draw({}, tmp_path / "p.png", "h")


def test_one_task_alone_can_be_drawn(tmp_path):
    one = ClassScores.of([0], torch.tensor([[[0.9, 0.1], [1.0, 0.0]]]), torch.tensor([[0, 1]]))
    alone = draw_reliability({"A": one}, tmp_path / "r.png", "h")
    beside = {"A": one.summary(), "B": classes().summary()}
    for path in (alone, draw_comparison(beside, tmp_path / "c.png", "h")):
        assert pixels(path).std() > 5


class TestComparison:
    def test_figures_that_differ_are_named(self, tmp_path):
        one = Interval(0.5, 0.4, 0.6)
        with pytest.raises(ValueError, match="'A' and 'B' differ in 'nll'"):
            draw_comparison({"A": {"ece": one, "nll": one}, "B": {"ece": one}}, tmp_path, "h")
        with pytest.raises(ValueError, match="summaries: nothing to draw, give at least one"):
            draw_comparison({}, tmp_path / "c.png", "h")

    def test_the_error_may_be_of_a_target_with_any_name(self, tmp_path):
        summaries = {"A": regression().summary()}
        named = draw_comparison(summaries, tmp_path / "n.png", "h", "price $")
        plain = draw_comparison(summaries, tmp_path / "p.png", "h")
        assert named.read_bytes() != plain.read_bytes()
