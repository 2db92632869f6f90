"""Where do tasks come from? Datasets, splits, episodes, synthetic families."""

from typing import TYPE_CHECKING

from ibaml.lazy import lazily

if TYPE_CHECKING:
    from ibaml.tasks.augment import Augment
    from ibaml.tasks.batch import TaskBatch
    from ibaml.tasks.catalog import glyphs, open_data
    from ibaml.tasks.dataset import Dataset, feature_vectors
    from ibaml.tasks.episodes import Episodes
    from ibaml.tasks.errors import DataError, DataWarning
    from ibaml.tasks.inputs import Inputs
    from ibaml.tasks.keyed import EpisodeTasks, SinusoidTasks, TableTasks, TaskSource
    from ibaml.tasks.sources.cifar import cifar100
    from ibaml.tasks.sources.cub import cub
    from ibaml.tasks.sources.folder import image_folder, image_list
    from ibaml.tasks.sources.miniimagenet import miniimagenet
    from ibaml.tasks.sources.omniglot import omniglot
    from ibaml.tasks.sources.wrapped import from_dataset
    from ibaml.tasks.synthetic import LinearRegression, Sinusoids
    from ibaml.tasks.table import Table
else:
    __getattr__, __dir__ = lazily(
        __name__,
        {
            "augment": ("Augment",),
            "batch": ("TaskBatch",),
            "catalog": ("glyphs", "open_data"),
            "dataset": ("Dataset", "feature_vectors"),
            "episodes": ("Episodes",),
            "errors": ("DataError", "DataWarning"),
            "inputs": ("Inputs",),
            "keyed": ("EpisodeTasks", "SinusoidTasks", "TableTasks", "TaskSource"),
            "sources": (
                "cifar100",
                "cub",
                "from_dataset",
                "image_folder",
                "image_list",
                "miniimagenet",
                "omniglot",
            ),
            "synthetic": ("LinearRegression", "Sinusoids"),
            "table": ("Table",),
        },
    )

__all__ = [
    "Augment",
    "DataError",
    "DataWarning",
    "Dataset",
    "EpisodeTasks",
    "Episodes",
    "Inputs",
    "LinearRegression",
    "SinusoidTasks",
    "Sinusoids",
    "Table",
    "TableTasks",
    "TaskBatch",
    "TaskSource",
    "cifar100",
    "cub",
    "feature_vectors",
    "from_dataset",
    "glyphs",
    "image_folder",
    "image_list",
    "miniimagenet",
    "omniglot",
    "open_data",
]
