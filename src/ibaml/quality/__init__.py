"""Which method is best on your data, each with its best settings?

`options` says what is compared and how, `arms` which methods with which settings to choose from,
`jobs` trains, chooses and tests them, `table` makes the table. The options need no torch.
"""

from typing import TYPE_CHECKING

from ibaml.lazy import lazily

if TYPE_CHECKING:
    from ibaml.quality.jobs import Comparison, compare
    from ibaml.quality.options import QualityOptions
    from ibaml.quality.table import write, written
else:
    __getattr__, __dir__ = lazily(
        __name__,
        {
            "jobs": ("Comparison", "compare"),
            "options": ("QualityOptions",),
            "table": ("write", "written"),
        },
    )

__all__ = ["Comparison", "QualityOptions", "compare", "write", "written"]
