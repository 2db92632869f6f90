"""How ``H u = b`` is solved with products only; this room knows nothing but a matvec."""

from ibaml.linalg.cg import ConjugateGradient
from ibaml.linalg.dense import Dense, dense_matrix
from ibaml.linalg.neumann import Neumann
from ibaml.linalg.result import LinearSolution, LinearSolver, MatVec, Reason, all_done

__all__ = [
    "ConjugateGradient",
    "Dense",
    "LinearSolution",
    "LinearSolver",
    "MatVec",
    "Neumann",
    "Reason",
    "all_done",
    "dense_matrix",
]
