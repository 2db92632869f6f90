"""How good and how calibrated are predictions? Figures with intervals over tasks."""

from ibaml.evaluation.calibration import Reliability, bin_sums, ece, mce, reliability
from ibaml.evaluation.compare import paired
from ibaml.evaluation.intervals import Interval, bootstrap, bootstrap_difference, mean_interval
from ibaml.evaluation.predict import fit_temperature, score_tasks
from ibaml.evaluation.scores import ClassScores, RegressionScores, Scores

__all__ = [
    "ClassScores",
    "Interval",
    "RegressionScores",
    "Reliability",
    "Scores",
    "bin_sums",
    "bootstrap",
    "bootstrap_difference",
    "ece",
    "fit_temperature",
    "mce",
    "mean_interval",
    "paired",
    "reliability",
    "score_tasks",
]
