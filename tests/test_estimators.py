"""Are the estimators what scikit-learn expects, and are they right?"""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.datasets import load_iris
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

from ibaml import FewShotClassifier, FewShotRegressor


@parametrize_with_checks([FewShotClassifier(), FewShotRegressor()])
def test_scikit_learn_accepts_the_estimators(estimator, check):
    check(estimator)


def waves(tasks: int, each: int, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Related regressions: a slope that tasks share, a wave that they do not, and noise."""
    rng = np.random.default_rng(seed)
    x = rng.uniform(-2, 2, size=(tasks, each, 1))
    phase = rng.uniform(0, 6, size=(tasks, 1))
    y = 5 * x[..., 0] + np.sin(2 * x[..., 0] + phase) + 0.1 * rng.normal(size=(tasks, each))
    return x.reshape(-1, 1), y.ravel(), np.repeat(np.arange(tasks), each)


def test_a_regression_is_the_gaussian_process_of_its_beliefs():
    X, y, _ = waves(1, 12, 0)
    model = FewShotRegressor().fit(X, y)
    beliefs = model.beliefs_
    new = np.linspace(-3, 3, 7)[:, None]
    phi, at = (beliefs.features(torch.from_numpy(part)).numpy() for part in (X, new))
    free = beliefs.free.numpy()
    scale = np.exp(2 * np.r_[free[:-3], np.full(phi.shape[1] - len(free) + 3, free[-3])])
    noise = np.exp(2 * free[-1])
    gram = np.linalg.inv(phi * scale @ phi.T + noise * np.eye(len(X)))
    center, spread = float(beliefs.center[-1]), float(beliefs.spread[-1])
    cross = at * scale @ phi.T
    mean, std = model.predict(new, return_std=True)
    np.testing.assert_allclose(mean, center + spread * cross @ gram @ ((y - center) / spread))
    variance = (at * scale * at).sum(1) - (cross @ gram * cross).sum(1) + noise
    np.testing.assert_allclose(std, spread * np.sqrt(variance), rtol=1e-6)


def test_other_tasks_teach_a_regression_what_to_expect():
    taught = FewShotRegressor().meta_fit(*waves(20, 10, 1))
    untaught, errors, inside = FewShotRegressor(), [], []
    handed = FewShotRegressor(prior=taught.beliefs_)
    for seed in range(10):
        X, y, _ = waves(1, 40, 100 + seed)
        few, rest = slice(0, 3), slice(3, None)
        mean, std = taught.fit(X[few], y[few]).predict(X[rest], return_std=True)
        np.testing.assert_array_equal(handed.fit(X[few], y[few]).predict(X[rest]), mean)
        other = untaught.fit(X[few], y[few]).predict(X[rest])
        errors.append([np.mean((p - y[rest]) ** 2) for p in (mean, other)])
        inside.append(np.mean(np.abs(mean - y[rest]) < 1.96 * std))
    one, other = np.mean(errors, 0)
    assert one < 0.6 * other
    assert 0.85 < np.mean(inside) <= 1


def test_other_classes_teach_a_classifier_what_differs():
    """Classes differ in one feature of twelve; the others are loud."""
    rng = np.random.default_rng(0)

    def drawn(classes: int, each: int) -> tuple[np.ndarray, np.ndarray]:
        x = 5 * rng.normal(size=(classes, each, 12))
        x[..., 0] = rng.normal(size=(classes, 1)) * 3 + 0.3 * rng.normal(size=(classes, each))
        return x.reshape(-1, 12), np.repeat(np.arange(classes), each)

    X, y = drawn(24, 12)
    taught = FewShotClassifier().meta_fit(X, y % 6, groups=y // 6)
    accuracy = []
    for _ in range(10):
        X, y = drawn(3, 12)
        few = np.arange(len(y)) % 12 < 2
        accuracy.append(
            [m.fit(X[few], y[few]).score(X[~few], y[~few]) for m in (taught, FewShotClassifier())]
        )
    one, other = np.mean(accuracy, 0)
    assert one > other + 0.1
    with pytest.raises(ValueError, match="is for 12"):
        taught.fit(X[:, :3], y)


def test_a_prior_is_named_in_a_grid_and_everything_pickles(tmp_path):
    X, y = load_iris(return_X_y=True)
    path = FewShotClassifier().meta_fit(X[:100], y[:100]).prior_.save(tmp_path / "iris.prior")
    pipe = make_pipeline(StandardScaler(), FewShotClassifier())
    grid = {"fewshotclassifier__prior": [None, str(path)]}
    search = GridSearchCV(pipe, grid, cv=3).fit(X, y)
    assert search.best_score_ > 0.9
    again = pickle.loads(pickle.dumps(search.best_estimator_))
    np.testing.assert_array_equal(again.predict_proba(X), search.best_estimator_.predict_proba(X))
    assert clone(again).get_params()["fewshotclassifier"].get_params() == grid_of(search)
    model = FewShotClassifier().fit(X, y)
    assert (model.familiarity(X) < 0.05).mean() < 0.15
    assert (model.familiarity(X + 20) < 0.05).all()


def grid_of(search: GridSearchCV) -> dict[str, object]:
    return {"prior": search.best_params_["fewshotclassifier__prior"]}


def test_a_prior_that_is_not_there_is_named():
    with pytest.raises(ValueError, match="without a prior say none"):
        FewShotClassifier(prior="fotos").fit(np.eye(3), [0, 1, 2])
    with pytest.raises(ValueError, match="groups must be one per row"):
        FewShotRegressor().meta_fit(np.eye(3), np.arange(3.0), [1])
    with pytest.raises(ValueError, match="one class, and needs two"):
        FewShotClassifier().meta_fit(np.eye(3), [1, 1, 1])
