"""How fast is a whole run, and where does its time go?

`options` says what is measured, `runs` measures runs of `ibaml train`, `floor` says how fast their
network alone could be, `start` times the command up to the first step, and `generated` makes data
for all of it. The options need no torch.
"""

from typing import TYPE_CHECKING

from ibaml.lazy import lazily

if TYPE_CHECKING:
    from ibaml.speed.measure import Measured, measure, written
    from ibaml.speed.options import SpeedOptions
else:
    __getattr__, __dir__ = lazily(
        __name__,
        {"measure": ("Measured", "measure", "written"), "options": ("SpeedOptions",)},
    )

__all__ = ["Measured", "SpeedOptions", "measure", "written"]
