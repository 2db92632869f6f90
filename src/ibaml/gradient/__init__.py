"""How do meta-parameters learn from a solution? Unrolled, first order, implicit, Reptile."""

from ibaml.gradient.base import GradientRule, Record
from ibaml.gradient.first_order import FirstOrder, Reptile
from ibaml.gradient.implicit import Implicit, implicit_solve
from ibaml.gradient.unrolled import Unrolled

__all__ = [
    "FirstOrder",
    "GradientRule",
    "Implicit",
    "Record",
    "Reptile",
    "Unrolled",
    "implicit_solve",
]
