"""What is a query, given a few examples of each class, and when is the answer not to be trusted?

>>> from ibaml.answers import Classifier
>>> shop = Classifier.load("shop.ibaml")                                          # doctest: +SKIP
"""

from ibaml.answers.calibrate import calibrate, fit_prior
from ibaml.answers.classifier import UNKNOWN, Answers, Classifier
from ibaml.answers.head import Head
from ibaml.answers.prior import Prior, packaged
from ibaml.answers.promises import Promises

__all__ = [
    "UNKNOWN", "Answers", "Classifier", "Head", "Prior", "Promises", "calibrate", "fit_prior",
    "packaged",
]  # fmt: skip
