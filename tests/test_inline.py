"""Drawings of a page: known elements alone, the page's colors, and the figures that they say."""

from __future__ import annotations

import re
from statistics import median
from xml.etree import ElementTree

import numpy as np
import pytest

from ibaml.evaluation import Interval
from ibaml.report import charts
from ibaml.report.figure import NAMES, blank, line_names, line_styles
from ibaml.report.inline import inline_svg
from test_scores import by_hand, classes

HOSTILE = '</text><script>alert(1)</script>"&\n$x$'
DRAWN = {
    "curves": lambda: charts.curves("nll", [([1, 2], [1.0, 0.5])], [([1], [2.0])], [2], share=True),
    "reliability": lambda: charts.reliability_chart(classes()),
    "coverage": lambda: charts.coverage_chart([classes(), classes(1)]),
    "spread": lambda: charts.spread_chart([np.arange(5.0)], "x", share=True),
    "intervals": lambda: charts.intervals_chart([Interval(1, 0, 2), Interval(1, -np.inf, 2)], "x"),
    "ranges": lambda: charts.ranges_chart([(-5.0, -4.0, -3.0)], "x", -5.0),
    "spectrum": lambda: charts.spectrum_chart(np.array([1.0, 2.0])),
    "fit": lambda: charts.fit_chart(*[np.arange(3.0)] * 3, (np.ones(1), np.ones(1)), ([0], [0])),
}


def parsed(kind: str) -> ElementTree.Element:
    return ElementTree.fromstring(inline_svg(DRAWN[kind](), f"a-{kind}", f"what {kind} shows"))


@pytest.mark.parametrize("kind", DRAWN)
def test_a_drawing_has_known_elements_colors_of_the_page_and_whole_references(kind):
    root = parsed(kind)
    assert (root.get("role"), root.get("aria-label")) == ("img", f"what {kind} shows")
    ids = [e.get("id") for e in root.iter() if e.get("id")]
    assert len(ids) == len(set(ids))
    assert all(one.startswith(f"a-{kind}-") for one in ids)
    for element in root.iter():
        assert element.tag in {
            "svg", "g", "path", "text", "tspan", "rect", "use", "defs", "clipPath"
        }  # fmt: skip
        assert not {"style", "class", "onload"} & set(element.attrib)
        for name in ("fill", "stroke"):
            said = element.get(name, "none")
            assert said == "none" or re.fullmatch(r"var\(--(ink|paper|\w+)\)", said), said
        if (link := element.get("href")) is not None:
            assert link[1:] in ids
        if (clip := element.get("clip-path")) is not None:
            assert re.fullmatch(r"url\(#(.+)\)", clip)[1] in ids
    assert "http" not in ElementTree.tostring(root, encoding="unicode")


def test_a_text_in_a_drawing_stays_one():
    figure = blank(2, 2)
    figure.subplots().set_title(HOSTILE, parse_math=False)
    text = inline_svg(figure, "a", HOSTILE)
    root = ElementTree.fromstring(text)
    assert "<script" not in text
    assert root.get("aria-label") is not None
    shown = "".join("".join(element.itertext()) for element in root.iter("text"))
    assert "</text><script>alert(1)</script>" in shown


def test_the_same_figure_gives_the_same_drawing_and_a_name_is_a_word():
    first, second = (inline_svg(DRAWN["coverage"](), "a", "b") for _ in range(2))
    assert first == second
    for name in ("", "A", "a b", 'a"', "1"):
        with pytest.raises(ValueError, match="name must be a word"):
            inline_svg(DRAWN["fit"](), name, "b")


def test_legends_have_the_colors_of_the_lines():
    for (color, dash), (name, again), _ in zip(line_styles(), line_names(), range(9), strict=False):
        assert (NAMES[color], dash) == (name, again)


def test_the_reliability_chart_ends_its_bars_at_the_accuracy():
    axis = charts.reliability_chart(by_hand([0.5] * 8, np.arange(8) < 2)).axes[0]
    solid = [p for p in axis.patches if np.isfinite(p.get_height())]
    (bar,) = (p for p in solid if p.get_y() == 0 and p.get_height() > 0)
    assert bar.get_height() == pytest.approx(2 / 8)
    (gap,) = (p.get_bbox() for p in solid if p.get_y() > 0)
    assert (gap.y0, gap.y1) == pytest.approx((0.25, 0.5))  # too sure


def test_the_coverage_chart_draws_the_selective_curve():
    scores = classes()
    (line,) = charts.coverage_chart([scores], 20).axes[0].lines
    coverage, accuracy = scores.selective(20)
    np.testing.assert_allclose(line.get_xdata(), coverage)
    np.testing.assert_allclose(line.get_ydata(), accuracy)


def test_a_running_median_is_of_as_many_values_on_both_sides():
    values = [9.0, 1.0, 5.0, 2.0, 8.0, 3.0, 7.0]
    smooth = charts.running_median(values, 5)
    assert smooth == [
        9.0, median([9.0, 1.0, 5.0]), *(median(values[i - 2 : i + 3]) for i in (2, 3, 4)),
        median([8.0, 3.0, 7.0]), 7.0,
    ]  # fmt: skip


def test_the_best_weights_are_ringed():
    lines = charts.curves("nll", [([10, 20, 30], [3.0, 1.0, 2.0])], best=[20]).axes[0].lines
    rings = [line for line in lines if line.get_markerfacecolor() == "none"]
    assert [(r.get_xdata()[0], r.get_ydata()[0]) for r in rings] == [(20, 1.0)]
