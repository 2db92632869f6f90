"""What does a meta-gradient cost, in time and memory, as K and L grow?

`sweep` says what is measured, `measure` how, `result` what was found and its files, `findings` what
it means. ``python -m ibaml.complexity`` measures where only torch and numpy are at hand.
"""

from ibaml.complexity.findings import Finding, findings, written
from ibaml.complexity.measure import measure, picture_tasks
from ibaml.complexity.result import Cost, Measured, Point, read
from ibaml.complexity.sweep import NAMES, Arm, Sweep

__all__ = [
    "NAMES",
    "Arm",
    "Cost",
    "Finding",
    "Measured",
    "Point",
    "Sweep",
    "findings",
    "measure",
    "picture_tasks",
    "read",
    "written",
]
