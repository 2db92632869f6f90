"""How does a network learn features before its first task? As a plain classifier of all training
classes, whose last layer is then thrown away.

A stopped run goes on with the next batch, from a file of this phase's own.
"""

from __future__ import annotations

import copy
import math
import shlex
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ibaml.files import write_whole
from ibaml.learner import MetaLearner
from ibaml.machine import pick_device
from ibaml.seeding import mix
from ibaml.tasks import Augment, Dataset, EpisodeTasks, TaskSource
from ibaml.tasks.passes import Passes
from ibaml.training.build import build_network
from ibaml.training.checkpoint import CheckpointError, pack, under, unpack
from ibaml.training.faults import Diverged
from ibaml.training.outer import optimizer_tensors, restore_optimizer
from ibaml.training.run import Run, RunError
from ibaml.training.settings import Settings
from ibaml.training.signals import StopRequest
from ibaml.training.watch import Watcher
from ibaml.untrusted import ARTIFACT, Refused, content
from ibaml.weights import head_module

FILE = "pretraining.safetensors"  # in the run folder
LABEL_SMOOTHING = 0.1
_BATCH, _RATE, _MOMENTUM, _DECAY, _CLIP = 64, 0.05, 0.9, 5e-4, 5.0
_HEAD = 13  # the stream of the classifier's first weights
_LINES = 50  # of the log
_SECONDS = 60.0  # between checkpoints


def pretrain(
    model: nn.Module,
    data: Dataset,
    *,
    epochs: int = 60,
    label_smoothing: float = LABEL_SMOOTHING,
    rotations: bool = False,
    augment: Augment | None = None,
    seed: int = 0,
    device: torch.device | str = "cpu",
    on_epoch: Callable[[int, float, float], None] = lambda epoch, loss, accuracy: None,
) -> nn.Module:
    """Train the layers before the model's head, the last linear one, in a plain classifier of the
    training classes; the head stays as it is. Returns the model itself.

    Stochastic gradient descent with Nesterov's momentum, weight decay, and a step size that falls
    to zero.

    Args:
        epochs: passes over all examples of the training classes.
        label_smoothing: the share of every label that is spread over all classes.
        rotations: learn quarter turns of the classes as classes of their own.
        augment: random flips, crops, colors; None: as suits the data.
        device: where to train; the model stays where it is.
        on_epoch: called after every epoch with its number, its loss and its accuracy.

    >>> import ibaml
    >>> model = ibaml.nn.conv4(5, channels=16, in_channels=1, image_size=28)
    >>> model = pretrain(model, ibaml.tasks.glyphs(), epochs=10)                   # doctest: +SKIP
    >>> learner = ibaml.methods.ibaml(model)
    """
    reference = next(model.parameters())
    passes = Passes(
        data, _BATCH, seed, rotations, augment or usual_augment(data), device, reference.dtype
    )
    phase = Pretraining(model, passes, epochs, label_smoothing)
    while not phase.done:
        phase.advance()
        if phase.step % passes.steps == 0:
            on_epoch(phase.step // passes.steps, *phase.figures())
    phase.give(dict(model.state_dict()))
    return model


def usual_augment(data: Dataset) -> Augment | None:
    """Shifts of images; of color images also mirrored ones and other colors."""
    if not data.is_image:
        return None
    colored = data.examples.shape[1] == 3
    side = data.examples.shape[-1]
    return Augment(flip=colored, crop=side // 10, color=0.4 if colored else 0.0)


class Pretraining:
    """A classifier with the model's layers and a head of its own, and how far its training is."""

    def __init__(
        self,
        model: nn.Module,
        passes: Passes,
        epochs: int,
        label_smoothing: float,
        *,
        bfloat16: bool = False,
    ) -> None:
        self.passes, self.epochs, self.label_smoothing = passes, epochs, label_smoothing
        self.device, self.bfloat16 = torch.device(passes.device), bfloat16
        self.network = copy.deepcopy(model).to(self.device)
        self.head, layer = head_module(self.network)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(mix(passes.seed, _HEAD))
            head = nn.Linear(layer.in_features, passes.classes, dtype=passes.dtype)
        parent, _, name = self.head.rpartition(".")
        setattr(self.network.get_submodule(parent), name, head.to(self.device))
        self.network.train()
        self.parameters = [p for p in self.network.parameters() if p.requires_grad]
        self.optimizer = torch.optim.SGD(
            self.parameters, _RATE, momentum=_MOMENTUM, nesterov=True, weight_decay=_DECAY
        )
        self.step = 0
        self._sums = torch.zeros(3, dtype=torch.float64, device=self.device)

    @property
    def total(self) -> int:
        """Batches of all epochs."""
        return self.epochs * self.passes.steps

    @property
    def done(self) -> bool:
        return self.step >= self.total

    def advance(self) -> None:
        """Learn from the next batch. Nothing waits for the device."""
        x, y = self.passes.examples(self.step)
        rate = _RATE * (1 + math.cos(math.pi * self.step / self.total)) / 2
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.bfloat16):
            outputs = self.network(x)
        loss = F.cross_entropy(outputs.to(x.dtype), y, label_smoothing=self.label_smoothing)
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.parameters, _CLIP)
        self.optimizer.step()
        right = (outputs.argmax(-1) == y).double().mean()
        self._sums += torch.stack([loss.detach().double(), right, torch.ones_like(right)])
        self.step += 1

    def figures(self) -> tuple[float, float]:
        """Mean loss and accuracy since this was last asked; `Diverged` if they are not finite."""
        loss, right, count = self._sums.tolist()
        self._sums.zero_()
        if not math.isfinite(loss):
            raise Diverged(
                f"pre-training diverged before batch {self.step}: the loss is not finite. Is the "
                "network normalized (--norm batch)? Or leave pretrain out"
            )
        return loss / max(count, 1), right / max(count, 1)

    def give(self, to: dict[str, Tensor]) -> None:
        """Copy what was learned into the tensors of these names, but for those of the head."""
        with torch.no_grad():
            for name, value in self.network.state_dict().items():
                if not name.startswith(f"{self.head}."):
                    to[name].copy_(value)

    def tensors(self) -> dict[str, Tensor]:
        """All that the next batch depends on; at the end, what was learned."""
        state = {f"network/{n}": t for n, t in self.network.state_dict().items()}
        if not self.done:
            of_optimizer = optimizer_tensors(self.optimizer)
            state.update((f"optimiser/{n}", t) for n, t in of_optimizer.items())
        return {**state, "sums": self._sums}

    def restore(self, step: int, tensors: dict[str, Tensor]) -> None:
        self.network.load_state_dict(under("network", tensors))
        self.step = step
        self._sums.copy_(tensors["sums"])
        if step > 0 and not self.done:
            restore_optimizer(self.optimizer, under("optimiser", tensors))


def identity(settings: Settings) -> dict[str, Any]:
    """The settings that features depend on: runs of the same data that agree in them may share the
    file of this phase."""
    names = (
        "pretrain", "label_smoothing", "rotations", "seed", "dtype", "precision", "model",
        "channels", "hidden", "norm",
    )  # fmt: skip
    return {name: getattr(settings, name) for name in names}


def pretrain_run(
    run: Run, learner: MetaLearner, tasks: TaskSource, watchers: Sequence[Watcher]
) -> int | None:
    """Do this phase of a run, or what is left of it. Returns the signal that stopped it, if any."""
    settings = run.settings
    assert isinstance(tasks, EpisodeTasks)
    assert settings.label_smoothing is not None
    network = build_network(settings, tasks.example_shape)
    passes = Passes(
        tasks.data, _BATCH, settings.seed, settings.rotations, usual_augment(tasks.data),
        pick_device(settings.device), tasks.dtype,
    )  # fmt: skip
    phase = Pretraining(
        network, passes, settings.pretrain, settings.label_smoothing,
        bfloat16=settings.precision == "bfloat16",
    )  # fmt: skip
    of = {"data": tasks.digest, **identity(settings)}
    _restore(run, phase, of)
    stop, saved = StopRequest(), time.monotonic()
    every = passes.steps * max(1, -(-settings.pretrain // _LINES))
    with stop.listening():
        while not phase.done and not stop.signal(1):
            phase.advance()
            told = phase.step % every == 0 or phase.done
            figures = phase.figures() if told else None
            if phase.done or (told and time.monotonic() - saved > _SECONDS):
                _save(run, phase, of)
                saved = time.monotonic()
            if figures is not None:
                epoch = phase.step // passes.steps
                for watcher in watchers:
                    watcher.message(
                        f"pre-training: epoch {epoch} of {phase.epochs}, {passes.classes} classes, "
                        f"loss {figures[0]:.3f}, accuracy {100 * figures[1]:.1f} %"
                    )
    if not phase.done:
        _save(run, phase, of)
        return stop.signal(1)
    own = learner.state_dict()
    phase.give({name: own[f"model.{name}"] for name in network.state_dict()})
    return None


def _save(run: Run, phase: Pretraining, of: dict[str, Any]) -> None:
    try:
        write_whole(run.path / FILE, pack(phase.tensors(), {"step": phase.step, "of": of}))
    except OSError as error:
        raise RunError(
            f"{run.path / FILE} could not be written ({error.strerror or error}): make room, then: "
            f"ibaml train --resume {shlex.quote(str(run.path))}"
        ) from error


def _restore(run: Run, phase: Pretraining, of: dict[str, Any]) -> None:
    file = run.path / FILE
    if not file.exists():
        return
    try:
        tensors, facts = unpack(content(file, ARTIFACT))
        if facts.get("of") != of:
            raise CheckpointError("it is of other settings or data")
        phase.restore(int(facts["step"]), tensors)
    except (CheckpointError, Refused, KeyError, TypeError, ValueError, RuntimeError) as error:
        reason = str(error).split("\n")[0]
        raise RunError(
            f"{file} cannot be continued ({reason}): move it away, and pre-training begins anew"
        ) from error
