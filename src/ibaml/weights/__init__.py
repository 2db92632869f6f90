"""Which beliefs about the weights are there, and which weights do they cover?"""

from ibaml.weights.belief import Belief, Prior, Start
from ibaml.weights.full import ClassMeans, FullGaussian
from ibaml.weights.full import SimpleHead as SimpleHead
from ibaml.weights.gaussian import DiagonalGaussian
from ibaml.weights.layout import Layout, Slot
from ibaml.weights.low_rank import LowRankGaussian
from ibaml.weights.point import Point
from ibaml.weights.precision import DiagonalPrecision, Precision, Preconditioner
from ibaml.weights.prior import PriorParameters as PriorParameters
from ibaml.weights.prior import parameter_key as parameter_key
from ibaml.weights.roles import Roles, Selection, assign_roles, head_module

# the others are for other rooms, not public (docs/api.md)
__all__ = [
    "Belief",
    "ClassMeans",
    "DiagonalGaussian",
    "DiagonalPrecision",
    "FullGaussian",
    "Layout",
    "LowRankGaussian",
    "Point",
    "Precision",
    "Preconditioner",
    "Prior",
    "Roles",
    "Selection",
    "Slot",
    "Start",
    "assign_roles",
    "head_module",
]
