"""Are the estimators what scikit-learn expects, and are they right?"""

from __future__ import annotations

from sklearn.utils.estimator_checks import parametrize_with_checks

from ibaml import FewShotClassifier, FewShotRegressor


@parametrize_with_checks([FewShotClassifier(), FewShotRegressor()])
def test_scikit_learn_accepts_the_estimators(estimator, check):
    check(estimator)
