"""On which tasks is a run judged? Its own, or those that the protocol names instead."""

from __future__ import annotations

from dataclasses import replace

from ibaml.assessment.protocol import Protocol
from ibaml.fields import SettingsError
from ibaml.kinds import QUERIES
from ibaml.machine import pick_device
from ibaml.tasks import TaskSource
from ibaml.tasks.sources.decode import Progress
from ibaml.training.build import open_tasks
from ibaml.training.rules import data_kind, is_regression, refuse_unread_data
from ibaml.training.run import Run
from ibaml.training.settings import FIELDS


def open_test(run: Run, protocol: Protocol, progress: Progress | None = None) -> TaskSource:
    """The tasks that a run is judged on."""
    settings = run.settings
    changed = {
        name: value
        for name in ("ways", "shots", "first_rows", "queries", "data", "root")
        if (value := getattr(protocol, name)) is not None
    }
    kind = data_kind({**vars(settings), **changed})
    if kind.reads("queries"):
        changed.setdefault("queries", QUERIES)
    if "data" in changed:  # settings of the run's own data do not apply to other data
        own = ("root", "splits", "class_level", "image_size", *kind.unread)
        changed = {**{name: FIELDS[name].default for name in own}, **changed}
        if kind.reads("image_size") and len(run.data["example_shape"]) == 3:
            changed["image_size"] = run.data["example_shape"][-1]
    if "ways" in changed and settings.regression:
        raise SettingsError(f"ways is for classification, and {run.path} is regression")
    if "ways" in changed and changed["ways"] != settings.ways and not settings.tie_head:
        raise SettingsError(
            f"{run.path} was trained {settings.ways}-way and its head has a prior for each class: "
            "other ways need a run trained with --tie-head"
        )
    settings = replace(settings, **changed)
    refuse_unread_data(vars(settings))
    if settings.ways is None and not is_regression(vars(settings)):
        raise SettingsError(f"{run.path} is regression, and {settings.data} is not")
    source = open_tasks(settings, pick_device(protocol.device), progress)
    ours, theirs = tuple(run.data["example_shape"]), source.example_shape
    if ours != theirs or (source.ways is None) != run.settings.regression:
        raise SettingsError(
            f"{source.name} does not fit {run.path}: "
            + (
                f"one input has shape {theirs}, and the run was trained on {ours}"
                if ours != theirs
                else "one is regression and the other is not"
            )
        )
    source.batches(protocol.split, [0])  # a missing split or too few classes fail now
    return source
