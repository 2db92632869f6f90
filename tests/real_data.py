"""The real datasets, where IBAML_DATA says they are; tests that need them skip elsewhere."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

DATA = Path(os.environ.get("IBAML_DATA", "nowhere"))
real = pytest.mark.skipif(
    not (DATA / "omniglot").exists(),
    reason="IBAML_DATA is not set: the real Omniglot and Caltech-101 are not read",
)
