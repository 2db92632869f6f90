"""Pages of `ibaml report` in a real browser: a run on pictures, a regression run, several runs with
hostile names, a classifier, a reproduction. Nothing runs, nothing is fetched, everything can be
read, by eye, by keyboard and aloud."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ibaml.cli import app
from reported import classifier_file, pictures_run, reproduction, vectors_run, waves_run

KINDS = ("pictures", "waves", "several", "classifier", "reproduction")


@pytest.fixture(scope="module")
def pages(tmp_path_factory) -> dict[str, Path]:
    """The pages; those of IBAML_PAGES, a folder of KIND.html, if it is given."""
    root = tmp_path_factory.mktemp("pages")
    if given := os.environ.get("IBAML_PAGES"):
        return {file.stem: file for file in sorted(Path(given).glob("*.html"))}
    shop, products = classifier_file(root)
    several = vectors_run(root), vectors_run(root, "other", method="maml")
    subjects = {
        "pictures": (pictures_run(root),),
        "waves": (waves_run(root),),
        "several": several,
        "classifier": (shop, "--pictures", products),
        "reproduction": (reproduction(root / "paper"),),
    }
    for kind, words in subjects.items():
        out = root / f"{kind}.html"
        command = ["report", *map(str, words), "--out", str(out), "--tasks", "5"]
        done = CliRunner().invoke(app, command)
        assert done.exit_code == 0, done.output
    return {kind: root / f"{kind}.html" for kind in KINDS}


@pytest.mark.parametrize("kind", KINDS)
def test_a_page_can_be_read_in_every_size_and_scheme(visit, look, pages, kind):
    if kind not in pages:
        pytest.skip(f"no {kind}.html was given")
    seen = visit(pages[kind], **look)
    seen.check_accessible()
    seen.check_fits()
    seen.shoot(f"report-{kind}")
    seen.page.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
    seen.check_accessible()
    seen.check_fits()


def color(seen) -> str:
    return seen.page.evaluate("getComputedStyle(document.body).backgroundColor")


def dark(seen) -> bool:
    return sum(map(int, re.findall(r"\d+", color(seen))[:3])) < 384


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colors_follow_the_system_until_a_person_chooses_without_any_script(visit, pages, scheme):
    seen = visit(next(iter(pages.values())), scheme=scheme)
    assert dark(seen) == (scheme == "dark")
    for chosen in ("light", "dark"):
        seen.page.get_by_label(chosen, exact=True).check(force=True)
        assert dark(seen) == (chosen == "dark")
        seen.check_accessible()
    seen.page.get_by_label("auto", exact=True).check(force=True)
    assert dark(seen) == (scheme == "dark")


def test_the_drawings_change_with_the_colors(visit, pages):
    seen = visit(next(iter(pages.values())))
    ink = "getComputedStyle(document.querySelector('figure svg[role=img] text')).fill"
    before = seen.page.evaluate(ink)
    seen.page.get_by_label("dark", exact=True).check(force=True)
    assert seen.page.evaluate(ink) != before


def test_a_keyboard_reaches_the_content_the_colors_and_what_is_folded(visit, pages):
    seen = visit(next(iter(pages.values())))
    keyboard = seen.page.keyboard
    keyboard.press("Tab")
    assert seen.page.evaluate("document.activeElement.className") == "skip"
    assert seen.page.get_by_text("Skip to the content").is_visible()
    keyboard.press("Enter")
    assert seen.page.evaluate("document.activeElement.id") == "content"
    seen.page.get_by_label("auto", exact=True).focus()
    keyboard.press("ArrowRight")
    keyboard.press("ArrowRight")
    assert dark(seen)
    first = seen.page.locator("summary").first
    first.focus()
    keyboard.press("Enter")
    assert seen.page.locator("details").first.get_attribute("open") is not None


def test_a_page_is_whole_where_no_script_may_run(visit, pages):
    seen = visit(next(iter(pages.values())), scripts=False)
    assert seen.page.get_by_role("heading", name="Do it again").is_visible()
