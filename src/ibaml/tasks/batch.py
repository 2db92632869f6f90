"""What does a learner read? A batch of tasks, checked when it is made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class TaskBatch:
    """T tasks of equal size, each with a support set (to adapt on) and a query set (to test on).

    Args:
        support_x: inputs (T, N, …).
        support_y: targets (T, N) of class labels 0 … W−1, or floating (T, N, …) for regression.
        query_x: inputs (T, M, …), with examples of the same shape as in the support set.
        query_y: targets (T, M, …).
        keys: one integer per task that seeds its noise, 0 … T−1 unless given.
        validate: check shapes, labels and values (this waits for the device).
        classes: the number of classes, the largest label + 1 unless given; None for regression.

    Tasks of different sizes go into separate batches.

    >>> x = torch.randn(4, 10, 3)
    >>> len(TaskBatch(x, x.sum(-1), x, x.sum(-1)))
    4
    """

    support_x: Tensor
    support_y: Tensor
    query_x: Tensor
    query_y: Tensor
    keys: Sequence[int] | Tensor | None = None
    validate: bool = True
    classes: int | None = None

    def __post_init__(self) -> None:
        keys = self.keys
        if keys is None:
            keys = range(len(self.support_x))
        elif isinstance(keys, Tensor):
            keys = keys.tolist()
        object.__setattr__(self, "keys", tuple(int(k) for k in keys))
        if self.validate:
            _check(self)
        if self.classes is None and not self.support_y.is_floating_point():
            largest = torch.maximum(self.support_y.max(), self.query_y.max())
            object.__setattr__(self, "classes", int(largest) + 1)

    def __len__(self) -> int:
        return self.support_x.shape[0]

    @property
    def task_keys(self) -> tuple[int, ...]:
        assert isinstance(self.keys, tuple)
        return self.keys

    def to(
        self, *targets: torch.device | str | torch.dtype, non_blocking: bool = False
    ) -> TaskBatch:
        """The batch on a device, in a dtype, or both; a dtype applies to floating tensors only."""

        def move(t: Tensor) -> Tensor:
            for target in targets:
                if not isinstance(target, torch.dtype) or t.is_floating_point():
                    t = t.to(target, non_blocking=non_blocking)
            return t

        return TaskBatch(
            move(self.support_x),
            move(self.support_y),
            move(self.query_x),
            move(self.query_y),
            self.keys,
            validate=False,
            classes=self.classes,
        )

    def clone(self) -> TaskBatch:
        """The same tasks in copied tensors."""
        return TaskBatch(
            self.support_x.clone(),
            self.support_y.clone(),
            self.query_x.clone(),
            self.query_y.clone(),
            self.keys,
            validate=False,
            classes=self.classes,
        )

    def select(self, tasks: Sequence[int] | slice | Tensor) -> TaskBatch:
        """Some of the tasks, with their keys."""
        index = torch.arange(len(self))[tasks] if isinstance(tasks, slice) else tasks
        index = torch.as_tensor(index)
        index = index.nonzero()[:, 0] if index.dtype == torch.bool else index.long()
        keys = [self.task_keys[i] for i in index.tolist()]
        index = index.to(self.support_x.device)
        return TaskBatch(
            self.support_x[index],
            self.support_y[index],
            self.query_x[index],
            self.query_y[index],
            keys,
            validate=False,
            classes=self.classes,
        )


def _check(batch: TaskBatch) -> None:
    fields = {
        name: getattr(batch, name) for name in ("support_x", "support_y", "query_x", "query_y")
    }
    for name, t in fields.items():
        if not isinstance(t, Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(t).__name__}")
        if t.dim() < 2:
            raise ValueError(
                f"{name} needs the dimensions (tasks, examples, …), got shape {tuple(t.shape)}"
            )
        if 0 in t.shape[:2]:
            raise ValueError(f"{name} has no tasks or no examples: shape {tuple(t.shape)}")
        if 0 in t.shape:
            raise ValueError(f"one example of {name} is empty: shape {tuple(t.shape)}")
        if name.endswith("_y") and not t.is_floating_point() and t.shape[2:] == (1,):
            raise ValueError(
                f"{name} has shape {tuple(t.shape)}, and class labels are (tasks, examples): give "
                f"{name}.squeeze(-1)"
            )

    def shapes(a: str, b: str) -> str:
        return f"{a} has shape {tuple(fields[a].shape)}, {b} has shape {tuple(fields[b].shape)}"

    for name in ("support_y", "query_x", "query_y"):
        if fields[name].shape[0] != len(batch):
            raise ValueError(f"the number of tasks differs: {shapes('support_x', name)}")
    for x, y in (("support_x", "support_y"), ("query_x", "query_y")):
        if fields[x].shape[1] != fields[y].shape[1]:
            raise ValueError(f"the number of examples differs: {shapes(x, y)}")
    for a, b in (("support_x", "query_x"), ("support_y", "query_y")):
        if fields[a].shape[2:] != fields[b].shape[2:]:
            raise ValueError(f"one example differs in shape: {shapes(a, b)}")
        if fields[a].dtype != fields[b].dtype:
            raise ValueError(f"mixed dtypes: {a} is {fields[a].dtype}, {b} is {fields[b].dtype}")
    devices = {name: t.device for name, t in fields.items()}
    if len(set(devices.values())) > 1:
        listing = ", ".join(f"{name} on {device}" for name, device in devices.items())
        raise ValueError(f"mixed devices: {listing}; move the batch with .to(device)")
    for x, y in (("support_x", "support_y"), ("query_x", "query_y")):
        both = fields[x].is_floating_point() and fields[y].is_floating_point()
        if both and fields[x].dtype != fields[y].dtype:
            raise ValueError(f"mixed dtypes: {x} is {fields[x].dtype}, {y} is {fields[y].dtype}")
    for name, t in fields.items():
        if t.is_complex():
            raise ValueError(f"{name} is complex; real inputs and targets are needed")
        if t.is_floating_point() and not bool(t.isfinite().all()):
            bad = (~t.isfinite()).flatten(1).any(1).nonzero()[0].item()
            raise ValueError(f"{name} holds a NaN or an infinity (first in task {bad})")
    if len(batch.task_keys) != len(batch):
        raise ValueError(f"keys has {len(batch.task_keys)} entries for {len(batch)} tasks")
    if not fields["support_y"].is_floating_point():
        _check_labels(fields["support_y"], fields["query_y"])
        top = int(torch.maximum(fields["support_y"].max(), fields["query_y"].max()))
        if batch.classes is not None and top >= batch.classes:
            raise ValueError(f"label {top} is out of range for classes={batch.classes}")


def _check_labels(support: Tensor, query: Tensor) -> None:
    for name, y in (("support_y", support), ("query_y", query)):
        low = int(y.min())
        if low < 0:
            raise ValueError(f"{name} has label {low}; labels are 0 … ways − 1")
    top, most = int(support.max()), int(query.max())
    if top >= support.shape[1] and support.dim() == 2:
        raise ValueError(
            f"support_y has label {top} with {support.shape[1]} examples a task, so some class "
            "has none; number the classes of every task 0 … ways − 1 (targets that are not labels: "
            "make them floating, or pass validate=False)"
        )
    if most > top:
        raise ValueError(
            f"query_y has label {most}, out of range: the largest label in support_y is {top}"
        )
