"""How is each dataset read from the layout in which it is published?"""

from ibaml.tasks.sources.cifar import cifar100
from ibaml.tasks.sources.cub import cub
from ibaml.tasks.sources.folder import image_folder, image_list
from ibaml.tasks.sources.miniimagenet import miniimagenet
from ibaml.tasks.sources.omniglot import omniglot
from ibaml.tasks.sources.wrapped import from_dataset

__all__ = [
    "cifar100",
    "cub",
    "from_dataset",
    "image_folder",
    "image_list",
    "miniimagenet",
    "omniglot",
]
