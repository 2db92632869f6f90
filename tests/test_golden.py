"""Golden runs: the losses of 50 meta-steps in float64, every option given, are those of before.

`python tests/test_golden.py > tests/golden.json` writes them anew (only where they should change).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ibaml

COMMON: dict[str, Any] = {"steps": 3, "lr": 0.1, "execution": "loop"}
BAYES = {"samples": 2, "noise": "antithetic", "beta": 0.01, "init_log_var": -6.0}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "maml": ("maml", COMMON),
    "fomaml": ("fomaml", COMMON),
    "reptile": ("reptile", COMMON),
    "imaml": (
        "imaml",
        {**COMMON, "lam": 0.5, "cg_steps": 5, "curvature": "energy", "damping": 0.1},
    ),
    "abml": ("abml", {**COMMON, **BAYES, "objective": ibaml.Abml(tasks=100)}),
    "ibaml": (
        "ibaml",
        {**COMMON, **BAYES, "cg_steps": 5, "curvature": "ggn", "damping": 0.0, "block": "all"},
    ),
    "ibaml head": (
        "ibaml",
        {
            "solver": ibaml.NewtonCG(4), "execution": "loop", "adapt": "head", **BAYES,
            "gradient": ibaml.Implicit(ibaml.Curvature("energy"), ibaml.ConjugateGradient(8)),
        },
    ),
}  # fmt: skip


def batch(step: int) -> ibaml.TaskBatch:
    rng = torch.Generator().manual_seed(step)
    centers = torch.randn(3, 3, 1, 1, 6, 6, generator=rng, dtype=torch.float64)
    x = centers + 0.7 * torch.randn(3, 3, 5, 1, 6, 6, generator=rng, dtype=torch.float64)
    y = torch.arange(3)[None, :, None].expand(3, 3, 5)
    return ibaml.TaskBatch(
        x[:, :, :2].flatten(1, 2), y[:, :, :2].flatten(1, 2),
        x[:, :, 2:].flatten(1, 2), y[:, :, 2:].flatten(1, 2),
    )  # fmt: skip


def losses(name: str) -> list[float]:
    method, options = CASES[name]
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Tanh(), nn.Flatten(), nn.Linear(64, 3)
    ).double()
    if "adapt" not in options:
        options = {**options, "adapt": "all"}
    learner = getattr(ibaml.methods, method)(net, likelihood=ibaml.Categorical(), **options)
    optimizer = torch.optim.Adam(learner.parameters(), lr=0.01)
    values = []
    for step in range(50):
        optimizer.zero_grad()
        loss = learner(batch(step), torch.Generator().manual_seed(step))
        loss.backward()
        optimizer.step()
        values.append(float(loss.detach()))
    return values


@pytest.mark.parametrize("name", CASES)
def test_losses_are_those_of_before(name):
    golden = json.loads((Path(__file__).parent / "golden.json").read_text())[name]
    actual, expected = (torch.tensor(x, dtype=torch.float64) for x in (losses(name), golden))
    torch.testing.assert_close(actual, expected, rtol=1e-8, atol=1e-10)


if __name__ == "__main__":
    print(json.dumps({name: losses(name) for name in CASES}, indent=1))
