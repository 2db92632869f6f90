"""How is a task solved? (energy, start) -> solution, with a record of what happened."""

from ibaml.solve.adam import Adam
from ibaml.solve.base import Descent, Progress, Rate, Solution, Solver, energy_and_gradient
from ibaml.solve.base import no_step_sizes as no_step_sizes  # for other rooms, not public
from ibaml.solve.base import resolve_rate as resolve_rate  # for other rooms, not public
from ibaml.solve.dual import DualNewton
from ibaml.solve.dual import before_examples as before_examples
from ibaml.solve.gradient_descent import GradientDescent, NaturalDescent
from ibaml.solve.head import HeadNewton
from ibaml.solve.newton_cg import NewtonCG
from ibaml.solve.polyak import PolyakDescent

__all__ = [
    "Adam",
    "Descent",
    "DualNewton",
    "GradientDescent",
    "HeadNewton",
    "NaturalDescent",
    "NewtonCG",
    "PolyakDescent",
    "Progress",
    "Rate",
    "Solution",
    "Solver",
    "energy_and_gradient",
]
