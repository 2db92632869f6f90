"""How good is a trained run, by itself and beside others?

`protocol` says how it is judged, `tasks` by which tasks, `judge` does it, `files` and `pictures`
keep what was found, `comparison` puts several runs side by side. The parts are loaded when they are
asked for: the protocol alone, which the command line shows, needs no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ibaml.assessment.comparison import comparable, differences, write_comparison
    from ibaml.assessment.files import plain, write_assessment
    from ibaml.assessment.judge import Assessment, assess, assess_learner, norm_protocols
    from ibaml.assessment.pictures import draw_assessment, draw_predictions, draw_waves
    from ibaml.assessment.protocol import Protocol
    from ibaml.assessment.tasks import open_test

_HOMES = {
    **dict.fromkeys(
        (
            "comparable",
            "differences",
            "write_comparison",
        ),
        "comparison",
    ),
    **dict.fromkeys(
        (
            "plain",
            "write_assessment",
        ),
        "files",
    ),
    **dict.fromkeys(
        (
            "Assessment",
            "assess",
            "assess_learner",
            "norm_protocols",
        ),
        "judge",
    ),
    **dict.fromkeys(
        (
            "draw_assessment",
            "draw_predictions",
            "draw_waves",
        ),
        "pictures",
    ),
    **dict.fromkeys(("Protocol",), "protocol"),
    **dict.fromkeys(("open_test",), "tasks"),
}
__all__ = [
    "Assessment",
    "Protocol",
    "assess",
    "assess_learner",
    "comparable",
    "differences",
    "draw_assessment",
    "draw_predictions",
    "draw_waves",
    "norm_protocols",
    "open_test",
    "plain",
    "write_assessment",
    "write_comparison",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
