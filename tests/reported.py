"""What the tests of pages report on: tiny runs, a classifier and a reproduction, full of names that
try to be more than text. And a reader that checks a page."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, field
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import numpy as np
from PIL import Image

from ibaml.answers import Classifier
from ibaml.training import resolve, train
from runs import waves

HOSTILE = "</style><script>alert(\"1\")</script>\n<img src=x onerror='a()'>&amp;{{ 7 * 7 }}"
NAME = 'run "1" <b onclick=a()>'  # of a folder: no slash
_TINY = {
    "iterations": 2, "tasks": 2, "queries": 3, "val_every": 1, "val_tasks": 2, "log_every": 1,
    "tensorboard": False, "threads": 1,
}  # fmt: skip


def vectors_file(path: Path) -> Path:
    """Vectors of 30 classes, whose names are hostile."""
    rng = np.random.default_rng(0)
    centers = 2 * rng.normal(size=(30, 1, 6))
    x = (centers + 0.5 * rng.normal(size=(30, 8, 6))).astype(np.float32).reshape(240, 6)
    names = [f"{HOSTILE} {c:02d}" for c in range(30)]
    np.savez(path, x=x, y=np.repeat(names, 8))
    return path


def vectors_run(root: Path, name: str = NAME, **given: object) -> Path:
    """A run on them, whose log, command and verdict are hostile too."""
    file = root / "vectors.npz"
    if not file.exists():
        vectors_file(file)
    settings = {**_TINY, "data": str(file), "ways": 3, "model": "mlp", "hidden": "8", **given}
    run, _ = train(resolve(settings), root / name)
    with (run.path / "log.jsonl").open("a") as log:
        log.write(json.dumps({"note": HOSTILE}) + "\n")
    config = json.loads((run.path / "config.json").read_text())
    config["command"] = f"ibaml train {HOSTILE}"
    (run.path / "config.json").write_text(json.dumps(config))
    verdict = {
        "verdict": HOSTILE, "fault": HOSTILE, "command": HOSTILE,
        "findings": [{}, {"sentence": HOSTILE}], "readings": {HOSTILE: 2.5},
        "measured": {HOSTILE: {HOSTILE: [HOSTILE, 1.25]}},
    }  # fmt: skip
    (run.path / "doctor.json").write_text(json.dumps(verdict))
    return run.path


def pictures_run(root: Path, name: str = "glyphs") -> Path:
    """A run on pictures, with batch norm."""
    settings = {**_TINY, "data": "glyphs", "channels": 4, "ways": 3}
    return train(resolve(settings), root / name)[0].path


def waves_run(root: Path, name: str = "waves") -> Path:
    """A regression run."""
    return train(waves(iterations=2, val_every=1, log_every=1), root / name)[0].path


def classifier_file(root: Path) -> tuple[Path, Path]:
    """A saved classifier, and the folder of its examples. One of them is in the wrong class."""
    rng = np.random.default_rng(0)
    shop, folder = Classifier(source={"kind": HOSTILE}), root / "products"
    for c, name in enumerate((HOSTILE, "tea", "rice")):
        center = np.eye(40)[c]
        x = np.abs(center + 0.05 * rng.normal(size=(4, 40)))
        files = [f"{c}/{i} <i>.jpg" for i in range(4)]
        shop.add(x, [name] * 4, files)
        (folder / str(c)).mkdir(parents=True)
        for file in files:
            colors = rng.integers(0, 255, 3).tolist()
            Image.new("RGB", (60, 40), tuple(colors)).save(folder / file)
    shop.add(np.abs(np.eye(40)[:1]), ["rice"], ["2/wrong.jpg"])
    shutil.copy(folder / "0" / "0 <i>.jpg", folder / "2" / "wrong.jpg")
    return shop.save(root / "shop.ibaml"), folder


def reproduction(root: Path) -> Path:
    """A folder of two studies, one of them damaged in every way that a text can be."""
    lists = {key: [HOSTILE] for key in ("setup", "agrees", "differs", "notes")}
    result = {
        "title": HOSTILE, "command": HOSTILE, "machine": HOSTILE, "seed": 0, "seconds": 1.0,
        "files": ["fig.png", "../../secret.png", "gone.png", f"{HOSTILE}.csv".replace("/", "")],
        "table": [{HOSTILE: HOSTILE}], **lists,
    }  # fmt: skip
    (root / "a 100%? #1").mkdir(parents=True)
    (root / "a 100%? #1" / "result.json").write_text(json.dumps(result))
    Image.new("RGB", (300, 200), "white").save(root / "a 100%? #1" / "fig.png")
    (root / "b").mkdir()
    second = {"title": "Second", "agrees": ["it does \udcff"]}
    (root / "b" / "result.json").write_text(json.dumps(second))
    return root


VOID = {"meta", "img", "input", "br", "link", "hr"}
ADDRESSES = {"src", "href", "action", "data", "srcset", "poster", "formaction", "xlink:href"}


@dataclass
class Reader(HTMLParser):
    """Reads a page, and notes what it is made of.

    Attributes:
        tags: every element's name and attributes.
        text: the texts between them, without the style sheet.
        wrong: what is not well formed.
    """

    tags: list[tuple[str, dict[str, str | None]]] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    open: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if len(dict(attributes)) < len(attributes):
            self.wrong.append(f"<{tag}> has an attribute twice")
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        if not self.open or self.open.pop() != tag:
            self.wrong.append(f"</{tag}> closes nothing, or something else")

    def handle_data(self, data):
        if self.open and self.open[-1] != "style":
            self.text.append(data)

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


def read_page(path: Path) -> Reader:
    """A page that is well formed, complete in itself, harmless, and can be read aloud."""
    content = path.read_text("utf-8")
    page = Reader()
    page.feed(content)
    page.close()
    assert not page.wrong
    assert not page.open
    names = {tag for tag, _ in page.tags}
    assert not names & {"script", "iframe", "object", "embed", "base", "form", "link", "b", "i"}
    assert len(page.all("style")) == 1
    ids = [a["id"] for _, a in page.tags if "id" in a]
    assert len(ids) == len(set(ids))
    for tag, attributes in page.tags:
        assert not [n for n in attributes if n.startswith("on") or n == "style"], (tag, attributes)
        for name in ADDRESSES & set(attributes):
            value = attributes[name] or ""
            assert value.startswith(("#", "data:image/")), (tag, value[:80])
            if value.startswith("#"):
                assert value[1:] in ids
        for name in ("aria-labelledby", "for"):
            assert attributes.get(name, ids[0]) in ids
        if tag == "svg" and "aria-hidden" not in attributes:
            assert attributes["role"] == "img"
            assert attributes["aria-label"]
    assert all(image["alt"] for image in page.all("img"))
    policy = next(m["content"] for m in page.all("meta") if "http-equiv" in m)
    assert policy is not None
    assert policy.startswith("default-src 'none'; style-src 'sha256-")
    assert "script" not in policy
    assert "unsafe" not in policy
    levels = [int(tag[1]) for tag, _ in page.tags if tag in ("h1", "h2", "h3", "h4")]
    assert levels.count(1) == 1
    assert all(b - a <= 1 for a, b in pairwise(levels)), levels
    assert len(content) < 3_000_000
    return page
