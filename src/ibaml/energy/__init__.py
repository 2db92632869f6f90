"""What a task minimises: the energy E(v, θ), its likelihood and its noise."""

from ibaml.energy.base import Energy, detached
from ibaml.energy.double import in_double
from ibaml.energy.likelihood import (
    ByTarget,
    Categorical,
    Custom,
    Gaussian,
    Likelihood,
    NllFunction,
    as_likelihood,
)
from ibaml.energy.noise import NOISE_KINDS, NoiseKind, Stream, draw_noise, task_roots
from ibaml.energy.plain import PlainEnergy, Structure
from ibaml.energy.task import TaskEnergy, Theta

__all__ = [
    "NOISE_KINDS",
    "ByTarget",
    "Categorical",
    "Custom",
    "Energy",
    "Gaussian",
    "Likelihood",
    "NllFunction",
    "NoiseKind",
    "PlainEnergy",
    "Stream",
    "Structure",
    "TaskEnergy",
    "Theta",
    "as_likelihood",
    "detached",
    "draw_noise",
    "in_double",
    "task_roots",
]
