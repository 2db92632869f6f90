"""What does a task minimize? The energy E(v, θ), with its likelihood and its noise."""

from ibaml.energy.base import Energy, detached
from ibaml.energy.double import in_double as in_double
from ibaml.energy.likelihood import ByTarget as ByTarget
from ibaml.energy.likelihood import Categorical, Gaussian, Likelihood, NllFunction
from ibaml.energy.likelihood import Custom as Custom
from ibaml.energy.likelihood import as_likelihood as as_likelihood
from ibaml.energy.noise import NoiseKind
from ibaml.energy.noise import Stream as Stream
from ibaml.energy.noise import draw_noise as draw_noise
from ibaml.energy.noise import task_roots as task_roots
from ibaml.energy.plain import PlainEnergy as PlainEnergy
from ibaml.energy.plain import Structure as Structure
from ibaml.energy.task import MetaParameters, TaskEnergy
from ibaml.energy.task import gaussian_nll as gaussian_nll

# the others are for other rooms, not public (docs/api.md)
__all__ = [
    "Categorical",
    "Energy",
    "Gaussian",
    "Likelihood",
    "MetaParameters",
    "NllFunction",
    "NoiseKind",
    "TaskEnergy",
    "detached",
]
