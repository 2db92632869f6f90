"""Is a meta-step recorded and replayed? On an accelerator, unless something prevents it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ibaml.capture import Captures, Work, stops_early
from ibaml.execution import Runner
from ibaml.metastep import MetaStep, wants_gradients
from ibaml.tasks import TaskBatch
from ibaml.weights import FullGaussian

if TYPE_CHECKING:
    from ibaml.learner.meta_learner import MetaLearner


def can_record(device: torch.device) -> bool:
    """Whether a device can record meta-steps at all."""
    return device.type == "cuda"


def replayed(
    learner: MetaLearner,
    work: Work,
    captures: Captures,
    batch: TaskBatch,
    seed: int,
    run: Runner,
) -> MetaStep | None:
    """The meta-step by replay, if it was (or can be) recorded."""
    if learner.capture is False or not torch.is_grad_enabled() or wants_gradients(batch):
        return None
    if learner.capture is None and stops_early(learner.solver) and run.head is None:
        return None
    belief = learner.belief
    if isinstance(belief, FullGaussian) and belief.inference == "variational":
        if learner.capture:
            raise ValueError(
                'capture=True is not for inference="variational", whose dense systems need the '
                "host: leave capture out"
            )
        return None
    if not can_record(batch.support_x.device):
        if learner.capture:
            raise ValueError("capture=True needs a CUDA device: move model and tasks to it")
        return None
    choices = (
        belief, learner.solver, learner.gradient, learner.objective, learner.samples,
        learner.noise, learner.beta, learner.diagnose, learner.training, run,
    )  # fmt: skip
    return captures.step(learner, work, choices, batch, seed, bool(learner.capture))
