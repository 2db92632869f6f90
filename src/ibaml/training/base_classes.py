"""What do the base classes give a run before its first step? For vectors, the map of the network
(`ibaml.nn.discriminant`), the prior and the temperature, in closed form or by cross-fitting
(`ibaml.heads.from_base`)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import nn

from ibaml.heads.from_base import fit
from ibaml.nn import Discriminant
from ibaml.tasks import EpisodeTasks, Inputs, TaskSource
from ibaml.tasks.sources.decode import Progress
from ibaml.training.settings import Settings


def start_from_base(
    settings: Settings, network: nn.Module, tasks: TaskSource, progress: Progress | None = None
) -> Settings:
    """The settings with the temperature from the training classes, if none was given; the network
    takes its map from them. Networks without such a map stay as they are."""
    if not isinstance(network, Discriminant) or not isinstance(tasks, EpisodeTasks):
        return settings
    data, prepare = tasks.data, Inputs.of(tasks)
    assert prepare is not None
    rows = np.isin(data.labels, data.members("train"))
    found = fit(
        prepare(data.examples[rows]).flatten(1),
        torch.from_numpy(np.asarray(data.labels[rows])).long(),
        seed=settings.seed,
        on_step=progress or (lambda done, total: None),
    )
    network.take(found.center, found.map, found.between)
    if settings.posterior != "class_means" or settings.temperature is not None:
        return settings
    return replace(settings, temperature=f"{found.temperature:.6g}")
