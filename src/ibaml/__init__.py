"""Implicit Bayesian meta-learning: learn a prior over a network's weights from many small tasks.

>>> import ibaml, torch
>>> learner = ibaml.methods.ibaml(ibaml.nn.mlp(1, 1), steps=5, samples=4)
>>> batch = ibaml.tasks.Sinusoids().batch(seed=0, keys=range(8), support=5, query=10)
>>> learner(batch).backward()
"""

from typing import TYPE_CHECKING

from ibaml import forks as _forks  # noqa: F401  (loaded for what it registers)
from ibaml._version import __version__
from ibaml.lazy import lazily

if TYPE_CHECKING:
    from ibaml import (
        energy,
        evaluation,
        gradient,
        linalg,
        methods,
        nn,
        objectives,
        report,
        solve,
        tasks,
        testing,
        training,
        weights,
    )
    from ibaml.answers import Classifier, Prior
    from ibaml.artifact import load_posterior
    from ibaml.curvature import Curvature
    from ibaml.diagnostics import Diagnostics
    from ibaml.doctor.checkup import Checkup, check
    from ibaml.energy import Categorical, Gaussian, Likelihood
    from ibaml.estimators import FewShotClassifier, FewShotRegressor
    from ibaml.gradient import FirstOrder, Implicit, Record, Reptile, Unrolled, implicit_solve
    from ibaml.learner import MetaLearner
    from ibaml.linalg import ConjugateGradient, Dense, Neumann, Reason
    from ibaml.objectives import Abml, PredictiveNll, QueryNll
    from ibaml.posterior import Posterior, Posteriors
    from ibaml.recommended import recommend
    from ibaml.solve import (
        Adam,
        DualNewton,
        GradientDescent,
        HeadNewton,
        NaturalDescent,
        NewtonCG,
        PolyakDescent,
    )
    from ibaml.tasks import TaskBatch
    from ibaml.tasks.embedding import Embed
    from ibaml.training.start import load
    from ibaml.weights import (
        Belief,
        ClassMeans,
        DiagonalGaussian,
        FullGaussian,
        LowRankGaussian,
        Point,
    )
else:
    __getattr__, __dir__ = lazily(
        __name__,
        {
            "answers": ("Classifier", "Prior"),
            "artifact": ("load_posterior",),
            "curvature": ("Curvature",),
            "diagnostics": ("Diagnostics",),
            "doctor.checkup": ("Checkup", "check"),
            "energy": ("Categorical", "Gaussian", "Likelihood"),
            "estimators": ("FewShotClassifier", "FewShotRegressor"),
            "gradient": (
                "FirstOrder",
                "Implicit",
                "Record",
                "Reptile",
                "Unrolled",
                "implicit_solve",
            ),
            "learner": ("MetaLearner",),
            "linalg": ("ConjugateGradient", "Dense", "Neumann", "Reason"),
            "objectives": ("Abml", "PredictiveNll", "QueryNll"),
            "posterior": ("Posterior", "Posteriors"),
            "recommended": ("recommend",),
            "solve": (
                "Adam",
                "DualNewton",
                "GradientDescent",
                "HeadNewton",
                "NaturalDescent",
                "NewtonCG",
                "PolyakDescent",
            ),
            "tasks": ("TaskBatch",),
            "tasks.embedding": ("Embed",),
            "training.start": ("load",),
            "weights": (
                "Belief",
                "ClassMeans",
                "DiagonalGaussian",
                "FullGaussian",
                "LowRankGaussian",
                "Point",
            ),
        },
        modules=(
            "energy",
            "evaluation",
            "gradient",
            "linalg",
            "methods",
            "nn",
            "objectives",
            "report",
            "solve",
            "tasks",
            "testing",
            "training",
            "weights",
        ),
    )

__all__ = [
    "Abml",
    "Adam",
    "Belief",
    "Categorical",
    "Checkup",
    "ClassMeans",
    "Classifier",
    "ConjugateGradient",
    "Curvature",
    "Dense",
    "Diagnostics",
    "DiagonalGaussian",
    "DualNewton",
    "Embed",
    "FewShotClassifier",
    "FewShotRegressor",
    "FirstOrder",
    "FullGaussian",
    "Gaussian",
    "GradientDescent",
    "HeadNewton",
    "Implicit",
    "Likelihood",
    "LowRankGaussian",
    "MetaLearner",
    "NaturalDescent",
    "Neumann",
    "NewtonCG",
    "Point",
    "PolyakDescent",
    "Posterior",
    "Posteriors",
    "PredictiveNll",
    "Prior",
    "QueryNll",
    "Reason",
    "Record",
    "Reptile",
    "TaskBatch",
    "Unrolled",
    "__version__",
    "check",
    "energy",
    "evaluation",
    "gradient",
    "implicit_solve",
    "linalg",
    "load",
    "load_posterior",
    "methods",
    "nn",
    "objectives",
    "recommend",
    "report",
    "solve",
    "tasks",
    "testing",
    "training",
    "weights",
]
