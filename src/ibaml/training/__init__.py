"""How does a training run go? Settings, steps, checkpoints, logs, several processes."""

from typing import TYPE_CHECKING

from ibaml.lazy import lazily

if TYPE_CHECKING:
    from ibaml.training.build import describe_source
    from ibaml.training.faults import TrainingError
    from ibaml.training.loop import Outcome, Trainer
    from ibaml.training.pretraining import pretrain
    from ibaml.training.rules import resolve
    from ibaml.training.run import Run, RunError, create_run, open_run
    from ibaml.training.settings import Settings, SettingsError, read_toml
    from ibaml.training.start import load, load_run, resume, train
    from ibaml.training.together import broadcast, sum_gradients
    from ibaml.training.watch import Step, Watcher
else:
    __getattr__, __dir__ = lazily(
        __name__,
        {
            "build": ("describe_source",),
            "faults": ("TrainingError",),
            "loop": ("Outcome", "Trainer"),
            "pretraining": ("pretrain",),
            "rules": ("resolve",),
            "run": ("Run", "RunError", "create_run", "open_run"),
            "settings": ("Settings", "SettingsError", "read_toml"),
            "start": ("load", "load_run", "resume", "train"),
            "together": ("broadcast", "sum_gradients"),
            "watch": ("Step", "Watcher"),
        },
    )

__all__ = [
    "Outcome",
    "Run",
    "RunError",
    "Settings",
    "SettingsError",
    "Step",
    "Trainer",
    "TrainingError",
    "Watcher",
    "broadcast",
    "create_run",
    "describe_source",
    "load",
    "load_run",
    "open_run",
    "pretrain",
    "read_toml",
    "resolve",
    "resume",
    "sum_gradients",
    "train",
]
