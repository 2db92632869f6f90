"""Second-order MAML by learn2learn: `MAML.clone` and `adapt`, as in its documentation.

Version 0.2.0 does not build on Python 3.11 and later (its C files were generated for older ones),
and importing it asks for gym and torchvision. Its MAML needs neither, so where the package is only
unpacked in a folder, `maml.py` is imported by itself.
"""

from __future__ import annotations

import importlib
import sys
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from contenders.case import Case, Gradients, Step, gradients_of, nll


def prepare(case: Case) -> Step:
    maml = _maml()(case.own_net(), lr=case.lr)

    def step() -> Gradients:
        maml.zero_grad()
        for x, y, query_x, query_y in case.tasks():
            learner = maml.clone()
            for _ in range(case.steps):
                learner.adapt(nll(learner(x), y))
            (nll(learner(query_x), query_y) / len(case.batch)).backward()
        return gradients_of(maml.module)

    return step


def _maml() -> Any:
    try:
        import learn2learn

        return learn2learn.algorithms.MAML
    except (ImportError, AttributeError):
        return _maml_alone()


def _maml_alone() -> Any:
    spec = PathFinder.find_spec("learn2learn")
    if spec is None or spec.origin is None:
        raise ImportError("learn2learn is not installed, and in no --peers folder")
    for name in [n for n in sys.modules if n.split(".")[0] == "learn2learn"]:
        del sys.modules[name]  # what the failed import left
    root = Path(spec.origin).parent
    packages = {"learn2learn": root, "learn2learn.algorithms": root / "algorithms"}
    for name, folder in packages.items():
        package = ModuleType(name)
        package.__path__ = [str(folder)]
        sys.modules[name] = package
    return importlib.import_module("learn2learn.algorithms.maml").MAML
