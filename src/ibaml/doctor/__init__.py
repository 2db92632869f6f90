"""What is wrong with a learner or a run, and which setting is to be changed?

`answers` says how good answers are, `variants` makes learners that differ in one setting, `measure`
puts what they gain beside the figures of prior, batch norm and gradient (`gradients`), `data` looks
for leaks and shuffled labels, `facts` reads the run's folder, `verdict` is the table of findings,
`checkup` the result. Files are read; nothing is trained or changed.
"""

from typing import TYPE_CHECKING

from ibaml.lazy import lazily

if TYPE_CHECKING:
    from ibaml.doctor.checkup import FILE, Checkup, check, examine
    from ibaml.doctor.verdict import RULES, Finding
else:
    __getattr__, __dir__ = lazily(
        __name__,
        {"checkup": ("FILE", "Checkup", "check", "examine"), "verdict": ("RULES", "Finding")},
    )

__all__ = ["FILE", "RULES", "Checkup", "Finding", "check", "examine"]
