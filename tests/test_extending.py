"""docs/extending.md as a person would follow it: its parts pass the tests it writes for them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

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
