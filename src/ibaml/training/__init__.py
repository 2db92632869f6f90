"""The loop: steps, checkpoints, logs, distribution."""

from ibaml.training.faults import TrainingError
from ibaml.training.loop import Outcome, Trainer
from ibaml.training.rules import resolve
from ibaml.training.run import Run, RunError, open_run
from ibaml.training.settings import Settings, SettingsError, read_toml
from ibaml.training.start import load, load_run, resume, train
from ibaml.training.watch import Step, Watcher

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
    "load",
    "load_run",
    "open_run",
    "read_toml",
    "resolve",
    "resume",
    "train",
]
