"""Do the examples run? Shortened here; `make release-check` runs every one as it is printed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
SHORTER = {  # what is printed, and what takes seconds less
    "sinusoids": {"steps = 500": "steps = 4"},
    "own_module": {"range(150)": "range(3)"},
    "transformer": {"steps = 100": "steps = 2"},
    "table": {"steps = 150": "steps = 2"},
    "plain_loop": {"steps=100": "steps=2"},
    "weight_decay": {"steps = 15\n": "steps = 1\n", "linspace(-9, -1, 5": "linspace(-5, -5, 1"},
    "active_labelling": {"order[:400]": "order[:305]"},
    "photographs": {},
}  # fmt: skip
PROCESSES = {"with_torchrun", "with_fabric", "with_accelerate"}  # by `make release-check`


def test_every_example_is_run_somewhere():
    assert {path.stem for path in EXAMPLES} == set(SHORTER) | PROCESSES


def test_every_example_is_one_screen_and_shown_on_the_site():
    pages = "".join(path.read_text() for path in (ROOT / "docs").glob("*.md"))
    for path in EXAMPLES:
        assert len(path.read_text().splitlines()) <= 85, path.name
        assert f"examples/{path.name}" in pages, path.name


@pytest.mark.parametrize("name", SHORTER)
def test_an_example_runs(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("IBAML_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("sys.argv", [name])
    path = ROOT / f"examples/{name}.py"
    text = path.read_text()
    for printed, short in SHORTER[name].items():
        assert printed in text, f"{path.name} no longer says {printed!r}"
        text = text.replace(printed, short)
    exec(compile(text, path, "exec"), {"__name__": "__main__"})
    printed = capsys.readouterr().out
    assert re.search(r"\d", printed), "an example prints what it found out"
    assert not re.search(r"\bnan\b|\binf\b", printed)
