"""Where tasks come from: datasets, splits, episodes, synthetic families."""

from ibaml.tasks.batch import TaskBatch
from ibaml.tasks.synthetic import Sinusoids

__all__ = ["Sinusoids", "TaskBatch"]
