"""What is believed about the weights, and which weights there is a belief about."""

from ibaml.weights.belief import Belief, Prior
from ibaml.weights.gaussian import DiagonalGaussian
from ibaml.weights.layout import Layout, Slot
from ibaml.weights.point import Point
from ibaml.weights.roles import Roles, Selection, assign_roles, head_module

__all__ = [
    "Belief",
    "DiagonalGaussian",
    "Layout",
    "Point",
    "Prior",
    "Roles",
    "Selection",
    "Slot",
    "assign_roles",
    "head_module",
]
