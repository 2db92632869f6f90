"""docs/extending.md as a person would follow it: its parts pass the tests it writes for them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import ibaml

PAGE = Path(__file__).parent.parent / "docs" / "extending.md"
SOURCE = "\n".join(re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL))
_written: dict[str, Any] = {"__name__": __name__}
exec(compile(SOURCE, str(PAGE), "exec", dont_inherit=True), _written)


class TestOneVariance(_written["TestOneVariance"]):
    pass


class TestMomentum(_written["TestMomentum"]):
    pass


class TestLaplace(_written["TestLaplace"]):
    pass


def test_the_linear_solver_solves_what_its_preconditioner_is_near():
    diagonal = torch.linspace(1, 9, 5, dtype=torch.float64)
    b = torch.ones(2, 5, dtype=torch.float64)
    solution = _written["Richardson"](60)(lambda u: 1.2 * diagonal * u, b, lambda r: r / diagonal)
    assert solution.value[0].tolist() == pytest.approx((1 / (1.2 * diagonal)).tolist())
    assert float(solution.residual.max()) <= 1e-12


def test_the_method_learns_around_the_backbone(tmp_path):
    """The two of them together, saved and loaded with the module passed in."""
    torch.manual_seed(0)
    model = _written["Rows"](8, ways=3)
    learner = _written["bayesian_fomaml"](model, adapt="head", tie_head=True)
    centers = torch.randn(2, 3, 1, 1, 8, 8)
    x = centers + 0.3 * torch.randn(2, 3, 4, 1, 8, 8)
    y = torch.arange(3)[:, None].expand(2, 3, 4)
    parts = x[:, :, :2], y[:, :, :2], x[:, :, 2:], y[:, :, 2:]
    batch = ibaml.TaskBatch(*(t.flatten(1, 2) for t in parts))
    learner(batch).backward()
    assert all(bool(p.grad.abs().sum() > 0) for p in learner.parameters())
    posterior = learner.adapt(batch.support_x[0], batch.support_y[0])
    expected = posterior.predict_proba(batch.query_x[0])
    loaded = ibaml.load(learner.save(tmp_path / "own.ibaml"), model=_written["Rows"](8, ways=3))
    again = loaded.adapt(batch.support_x[0], batch.support_y[0])
    assert again.predict_proba(batch.query_x[0]).tolist() == expected.tolist()
