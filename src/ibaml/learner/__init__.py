"""How do the parts stand around one module?"""

from ibaml.learner.meta_learner import MetaLearner

__all__ = ["MetaLearner"]
