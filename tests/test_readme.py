"""The README's first snippet, executed as it is printed, and with its one word changed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import ibaml

README = (Path(__file__).parent.parent / "README.md").read_text()
SNIPPET = re.search(r"## In Python\n\n```python\n(.*?)```", README, re.DOTALL)[1]
METHODS = ("maml", "fomaml", "reptile", "imaml", "abml")


def test_the_snippet_learns_and_its_file_predicts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    names: dict = {}
    exec(SNIPPET, names)
    probabilities, new = names["probabilities"], names["new"]
    assert probabilities.shape == (75, 5)
    batch = ibaml.tasks.Episodes(names["data"], "test").batch(range(20))
    found = names["learner"].adapt_all(batch).predict_proba(batch.query_x)
    accuracy = (found.argmax(-1) == batch.query_y).double().mean()
    assert accuracy > 0.55  # before training: 44 %
    again = ibaml.load_posterior("classifier.ibaml").predict_proba(new.query_x[0])
    torch.testing.assert_close(again, probabilities, rtol=0, atol=1e-6)


@pytest.mark.parametrize("method", METHODS)
def test_every_method_runs_with_the_one_word_changed(method, tmp_path, monkeypatch):
    assert f"`{method}`" in README
    monkeypatch.chdir(tmp_path)
    text = SNIPPET.replace("ibaml.methods.ibaml(", f"ibaml.methods.{method}(")
    assert text != SNIPPET
    text = re.sub(r"steps = \d+", "steps = 2", text).replace("tasks=8", "tasks=2")  # but short
    names: dict = {}
    exec(text, names)
    assert names["probabilities"].sum(-1).allclose(torch.ones(75))
    assert all(p.isfinite().all() for p in names["learner"].parameters())
