"""How do belief, solver, gradient rule and objective work together around one module?"""

from ibaml.learner.meta_learner import MetaLearner

__all__ = ["MetaLearner"]
