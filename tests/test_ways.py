"""Are the two lists of CONTRIBUTING.md true? Each names functions in the order of their first call.

A list may have several parts, with text between them: calls are counted anew in each part, which
begins when its first function is called after the part before.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from typer.testing import CliRunner

import ibaml
from ibaml.cli import app

SOURCE = Path(ibaml.__file__).parent
PAGE = (Path(__file__).parent.parent / "CONTRIBUTING.md").read_text()


def parts(heading: str) -> list[list[str]]:
    """The functions that each numbered list below a heading names, as ``file.py:function``."""
    (section,) = re.findall(rf"^## {re.escape(heading)}.*?\n(.*?)(?=^## |\Z)", PAGE, re.M | re.S)
    lists = re.findall(r"(?:^\d+\. .*\n)+", section, re.M)
    return [re.findall(r"^\d+\. `([\w/]+\.py:[\w.]+)`", items, re.M) for items in lists]


@contextmanager
def recording() -> Iterator[list[str]]:
    """Every call of one of our functions in this thread, in order."""
    calls: list[str] = []

    def note(frame, event, _):
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(str(SOURCE)):
            path = Path(code.co_filename).relative_to(SOURCE).as_posix()
            calls.append(f"{path}:{code.co_qualname}")

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        yield calls
    finally:
        sys.setprofile(before)


def assert_visited(calls: list[str], named: list[list[str]]) -> None:
    """Every named function is called, and first calls have the order of the list."""
    everything = [name for part in named for name in part]
    assert len(set(everything)) == len(everything) > 10
    assert not set(everything) - set(calls), "named on the page and never called"
    begins: list[int] = []
    for part in named:
        begins.append(calls.index(part[0], begins[-1] if begins else 0))
    ends = [*begins[1:], len(calls)]
    for part, begin, end in zip(named, begins, ends, strict=True):
        first_calls = dict.fromkeys(name for name in calls[begin:end] if name in part)
        assert list(first_calls) == part


def test_the_way_of_one_task(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("IBAML_CACHE", str(tmp_path / "cache"))
    rng = np.random.default_rng(0)
    for number in range(320):
        picture = Path(f"photos/{number % 20}/{number}.png")
        picture.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (8, 8, 3), dtype=np.uint8)).save(picture)
    train = "train --data photos/ --out runs/photos --ways 3 --image-size 16 --channels 2"
    train += " --queries 2 --tasks 1 --iterations 1 --val-every 0 --no-tensorboard"
    with recording() as calls:
        for command in (train, "evaluate runs/photos --queries 2 --tasks 2"):
            result = CliRunner().invoke(app, command.split())
            assert result.exit_code == 0, result.output
    assert_visited(calls, parts("The way of one task"))


def test_the_way_of_one_gradient():
    torch.manual_seed(0)
    learner = ibaml.methods.ibaml(ibaml.nn.mlp(2, 3), steps=1, noise="antithetic")
    x, y = torch.randn(1, 6, 2), torch.arange(6).remainder(3)[None]
    loss = learner(ibaml.TaskBatch(x, y, x + 0.1, y))
    with recording() as calls:
        loss.backward()
    assert_visited(calls, parts("The way of one gradient"))
    assert all(p.grad is not None and p.grad.isfinite().all() for p in learner.parameters())
    assert any(bool(p.grad.any()) for p in learner.parameters())
