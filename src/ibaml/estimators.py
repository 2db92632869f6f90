"""How does a person use ibaml as a scikit-learn estimator?

>>> from sklearn.datasets import load_iris
>>> X, y = load_iris(return_X_y=True)
>>> FewShotClassifier().fit(X[::10], y[::10]).score(X, y) > 0.9
True
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Self

import numpy as np
import torch

from ibaml.answers import Head, Prior, fit_prior
from ibaml.extras import missing, need
from ibaml.regressing import Beliefs, believed, fit_beliefs

if missing("sklearn") is None:
    from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
    from sklearn.utils.multiclass import check_classification_targets
    from sklearn.utils.validation import check_is_fitted, validate_data
else:

    class BaseEstimator:  # type: ignore[no-redef]
        """So that the names exist where scikit-learn does not; an object says what is missing."""

        def __new__(cls, *given: Any, **named: Any) -> Self:
            need("sklearn")
            return super().__new__(cls)

    class ClassifierMixin:  # type: ignore[no-redef]
        """Nothing."""

    class RegressorMixin:  # type: ignore[no-redef]
        """Nothing."""


class FewShotClassifier(ClassifierMixin, BaseEstimator):
    """A classifier for a few examples of each class, with calibrated probabilities.

    Args:
        prior: what is known of classes before: the name of a prior of the package, a path to a
            file or a run of `ibaml train`, or None for nothing but the examples.

    Attributes:
        classes_: the labels, sorted.
        prior_: the prior in use; None for none. `meta_fit` sets it too.
        head_: what answers.
    """

    def __init__(self, prior: str | Path | None = None) -> None:
        self.prior = prior

    def meta_fit(self, X: Any, y: Any, groups: Any = None) -> Self:
        """Learn a prior from other classes, for all calls of `fit` on this object. Labels of
        different groups are different classes. `prior_.save(path)` keeps it."""
        X, y = validate_data(self, X, y, dtype=np.float64)
        check_classification_targets(y)
        names = y.astype(str) if groups is None else _paired(groups, y)
        found, index = np.unique(names, return_inverse=True)
        if len(found) < 2:
            raise ValueError("meta_fit learns how classes differ: y has one class, and needs two")
        vectors = torch.tensor(X, dtype=torch.float32)
        self.prior_: Prior | None = fit_prior(
            vectors, torch.from_numpy(index), "meta_fit", tasks=60
        )
        self.met_ = True
        return self

    def fit(self, X: Any, y: Any) -> Self:
        """Take the examples: X (n, F) and their labels."""
        X, y = validate_data(self, X, y, dtype=np.float64)
        check_classification_targets(y)
        self.classes_, index = np.unique(y, return_inverse=True)
        if not getattr(self, "met_", False):
            self.prior_ = None if self.prior is None else Prior.open(self.prior)
        if self.prior_ is not None and self.prior_.features != X.shape[1]:
            raise ValueError(
                f"X has {X.shape[1]} features, but the prior {self.prior_.name} is for "
                f"{self.prior_.features}"
            )
        vectors, labels = torch.tensor(X, dtype=torch.float32), torch.from_numpy(index)
        with torch.no_grad():
            self.head_ = Head.of(self.prior_, vectors, labels, len(self.classes_))
        return self

    def predict_proba(self, X: Any) -> np.ndarray:
        """The probabilities of `classes_`, (m, C)."""
        check_is_fitted(self, "head_")
        X = validate_data(self, X, reset=False, dtype=np.float64)
        with torch.no_grad():
            z = self.head_.prior.mapped(torch.tensor(X, dtype=torch.float32))
            log_p = self.head_.log_probabilities(z).double()
        p = log_p.exp().numpy()
        result: np.ndarray = p / p.sum(1, keepdims=True)
        return result

    def predict(self, X: Any) -> np.ndarray:
        """The likeliest labels, (m,)."""
        check_is_fitted(self, "head_")
        labels: np.ndarray = self.classes_[self.predict_proba(X).argmax(1)]
        return labels

    def familiarity(self, X: Any) -> np.ndarray:
        """Which share of the examples of known classes looks less familiar, (m,): below 0.05 is
        *unknown* at 5 % false alarms. NaN where that is not known."""
        check_is_fitted(self, "head_")
        X = validate_data(self, X, reset=False, dtype=np.float64)
        with torch.no_grad():
            return self.head_.familiar(
                self.head_.prior.mapped(torch.tensor(X, dtype=torch.float32))
            )


class FewShotRegressor(RegressorMixin, BaseEstimator):
    """Bayesian regression from a few examples, with a standard deviation for every answer. For up
    to about a thousand examples, whose cube its time grows with.

    Args:
        prior: None to choose the beliefs by the examples' evidence, or beliefs that `meta_fit`
            learned, ``other.beliefs_``.

    Attributes:
        beliefs_: the beliefs in use.
        posterior_: what answers.
    """

    def __init__(self, prior: Beliefs | None = None) -> None:
        self.prior = prior

    def meta_fit(self, X: Any, y: Any, groups: Any) -> Self:
        """Learn beliefs from other tasks, one a group, for all calls of `fit` on this object."""
        X, y = validate_data(self, X, y, dtype=np.float64, y_numeric=True)
        groups = np.asarray(groups)
        if groups.shape != y.shape:
            raise ValueError(f"groups must be one per row, {y.shape}; got shape {groups.shape}")
        _, index = np.unique(groups, return_inverse=True)
        self.beliefs_ = fit_beliefs(torch.tensor(X), torch.tensor(y, dtype=torch.float64), index)
        self.met_ = True
        return self

    def fit(self, X: Any, y: Any) -> Self:
        """Take the examples: X (n, F) and numbers y (n,)."""
        X, y = validate_data(self, X, y, dtype=np.float64, y_numeric=True)
        x, target = torch.tensor(X), torch.tensor(np.asarray(y, dtype=np.float64))
        if not getattr(self, "met_", False):
            self.beliefs_ = fit_beliefs(x, target) if self.prior is None else self.prior
        self.posterior_ = believed(self.beliefs_, x, target)
        return self

    def predict(self, X: Any, return_std: bool = False) -> Any:
        """Means (m,), and with ``return_std`` also the standard deviations of new measurements."""
        check_is_fitted(self, "posterior_")
        X = validate_data(self, X, reset=False, dtype=np.float64)
        mean, std = self.posterior_(torch.tensor(X))
        return (mean.numpy(), std.numpy()) if return_std else mean.numpy()


def _paired(groups: Any, y: np.ndarray) -> np.ndarray:
    """A name for each label of each group."""
    groups = np.asarray(groups)
    if groups.shape != y.shape:
        raise ValueError(f"groups must be one per row, {y.shape}; got shape {groups.shape}")
    return np.array([f"{g}\n{label}" for g, label in zip(groups, y, strict=True)])
