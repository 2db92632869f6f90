"""How is ``H u = b`` solved with products only? These files know H as a function, nothing else."""

from ibaml.linalg.cg import ConjugateGradient
from ibaml.linalg.dense import Dense, dense_matrix
from ibaml.linalg.neumann import Neumann
from ibaml.linalg.result import LinearSolution, LinearSolver, MatVec, Reason
from ibaml.linalg.result import all_done as all_done  # for other rooms, not public
from ibaml.linalg.result import is_recorded as is_recorded

__all__ = [
    "ConjugateGradient",
    "Dense",
    "LinearSolution",
    "LinearSolver",
    "MatVec",
    "Neumann",
    "Reason",
    "dense_matrix",
]
