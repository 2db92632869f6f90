"""How are predictions of a thousand tasks kept in a JSON file? As arrays, in base 64."""

from __future__ import annotations

import base64
import zlib
from typing import Any

import numpy as np

from ibaml.evaluation.scores import ClassScores

_FIELDS = {"nll": "<f4", "confidence": "<f4", "correct": "<u1", "brier": "<f4"}


def packed(scores: ClassScores) -> dict[str, Any]:
    """Scores for JSON; nll and Brier score are rounded to float32."""
    arrays = {name: np.asarray(getattr(scores, name), kind) for name, kind in _FIELDS.items()}
    return {
        "keys": list(scores.keys),
        "shape": list(scores.nll.shape),
        **{n: base64.b64encode(zlib.compress(a.tobytes())).decode() for n, a in arrays.items()},
    }


def unpacked(content: dict[str, Any]) -> ClassScores:
    """The scores from `packed`."""
    arrays = {
        name: np.frombuffer(zlib.decompress(base64.b64decode(content[name])), kind)
        for name, kind in _FIELDS.items()
    }
    shaped = {name: a.reshape(content["shape"]) for name, a in arrays.items()}
    correct = shaped.pop("correct").astype(bool)
    return ClassScores(
        keys=tuple(content["keys"]),
        correct=correct,
        nll=shaped["nll"].astype(np.float64),
        confidence=shaped["confidence"].astype(np.float64),
        brier=shaped["brier"].astype(np.float64),
    )
