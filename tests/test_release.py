"""Does the check of a release see what is wrong? (`make release-check` looks at the real site.)"""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import ibaml

ROOT = Path(__file__).parent.parent


def links(site: Path) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, ROOT / "release/links.py", site]
    return subprocess.run(words, capture_output=True, text=True)


def test_broken_links_of_a_site_are_named(tmp_path):
    other = '<h1 id="here">x</h1><a href="index.html">back</a>'
    (tmp_path / "other.html").write_text(other)
    good = '<a href="other.html#here"></a><a href="https://nowhere.invalid/"></a><a href="#"></a>'
    (tmp_path / "index.html").write_text(good)
    assert links(tmp_path).returncode == 0
    bad = '<a href="other.html#there"></a><img src="no.png">'
    (tmp_path / "index.html").write_text(bad)
    done = links(tmp_path)
    assert done.returncode == 1
    assert "other.html#there leads to no place" in done.stdout
    assert "no.png leads to no file" in done.stdout


def test_every_page_says_the_same_version():
    version = ibaml.__version__
    assert f"version: {version}\n" in (ROOT / "CITATION.cff").read_text()
    changelog = (ROOT / "CHANGELOG.md").read_text()
    assert re.search(r"^## (\S+)", changelog, re.MULTILINE)[1] == version


def test_the_supported_pythons_are_those_that_are_claimed():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    claimed = re.findall(r"Python :: (3\.\d+)", " ".join(project["classifiers"]))
    assert claimed[0] == project["requires-python"].removeprefix(">=")
    assert all(url.startswith("https://") for url in project["urls"].values())


def test_every_page_has_a_place_in_the_navigation():
    docs = ROOT / "docs"
    listed = set((docs / "index.md").read_text().split())
    pages = {p.relative_to(docs).with_suffix("").as_posix() for p in docs.rglob("*.md")}
    missing = pages - listed - {"index"}
    assert not missing, f"docs/index.md does not list {sorted(missing)}"
