"""How good is a trained run, by itself and beside others?

`protocol` says how it is judged, `tasks` on which tasks, `judge` does it, `files` and `pictures`
save the results, `stored` reads them again, `comparison` puts several runs side by side, `heads`
puts simple heads beside them (`simple_heads` has these). The parts are loaded when they are used:
the protocol and `heads_options`, which the command line shows, need no torch.
"""

from typing import TYPE_CHECKING

from ibaml.lazy import lazily

if TYPE_CHECKING:
    from ibaml.assessment.comparison import comparable, differences, write_comparison
    from ibaml.assessment.files import plain, write_assessment
    from ibaml.assessment.heads import Compared, compare_heads, write_heads
    from ibaml.assessment.heads_options import HeadsOptions
    from ibaml.assessment.judge import Assessment, assess, assess_learner, norm_protocols
    from ibaml.assessment.pictures import draw_assessment, draw_predictions, draw_waves
    from ibaml.assessment.protocol import Protocol
    from ibaml.assessment.stored import Stored, read_assessment
    from ibaml.assessment.tasks import open_test
else:
    __getattr__, __dir__ = lazily(
        __name__,
        {
            "comparison": ("comparable", "differences", "write_comparison"),
            "files": ("plain", "write_assessment"),
            "heads": ("Compared", "compare_heads", "write_heads"),
            "heads_options": ("HeadsOptions",),
            "judge": ("Assessment", "assess", "assess_learner", "norm_protocols"),
            "pictures": ("draw_assessment", "draw_predictions", "draw_waves"),
            "protocol": ("Protocol",),
            "stored": ("Stored", "read_assessment"),
            "tasks": ("open_test",),
        },
    )

__all__ = [
    "Assessment",
    "Compared",
    "HeadsOptions",
    "Protocol",
    "Stored",
    "assess",
    "assess_learner",
    "comparable",
    "compare_heads",
    "differences",
    "draw_assessment",
    "draw_predictions",
    "draw_waves",
    "norm_protocols",
    "open_test",
    "plain",
    "read_assessment",
    "write_assessment",
    "write_comparison",
    "write_heads",
]
