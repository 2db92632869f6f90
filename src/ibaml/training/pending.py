"""What did an iteration do? Its figures are read a step late, so that nobody waits for the device.

On a CPU they are there at once; the order of events is the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ibaml.diagnostics import Diagnostics
from ibaml.training.signals import SIGNALS
from ibaml.training.watch import Step


class Reading:
    """Numbers on their way from the device to the host: a copy into pinned memory, and an event
    that says when it is done."""

    def __init__(self, values: Tensor) -> None:
        self._done: torch.cuda.Event | None = None
        self._host = values
        if values.is_cuda:
            self._host = torch.empty_like(values, device="cpu", pin_memory=True)
            self._host.copy_(values, non_blocking=True)
            self._done = torch.cuda.Event()
            self._done.record(torch.cuda.current_stream(values.device))

    @property
    def ready(self) -> bool:
        """Whether the numbers have arrived."""
        return self._done is None or self._done.query()

    def numbers(self) -> list[float]:
        """The numbers, once they have arrived."""
        if self._done is not None:
            self._done.synchronize()
        return self._host.tolist()


@dataclass(frozen=True)
class Pending:
    """An iteration that was launched, and whose figures nobody has looked at.

    Attributes:
        step: its number; 1 is the first.
        names: of the diagnostics, if this iteration is logged.
        diagnostics: of its last call in this process, if there was one here.
        gradients: the meta-gradient that it left, clipped.
        stale: whether its loss is of weights that were given up meanwhile.
    """

    step: int
    rate: float
    reading: Reading
    names: tuple[str, ...] = ()
    diagnostics: Diagnostics | None = None
    gradients: Mapping[str, Tensor | None] | None = None
    stale: bool = False

    @classmethod
    def of(
        cls,
        step: int,
        rate: float,
        figures: Sequence[Tensor],
        diagnostics: Diagnostics | None,
        gradients: Mapping[str, Tensor | None],
        *,
        logged: bool,
    ) -> Pending:
        """The iteration, with the figures `figures` on their way: loss, tasks that took part, tasks
        left out, the norm of the gradient, and how many processes caught each signal."""
        told = dict(_means(diagnostics)) if logged and diagnostics is not None else {}
        values = torch.stack([t.double() for t in (*figures, *told.values())])
        return cls(step, rate, Reading(values), tuple(told), diagnostics, gradients)

    @classmethod
    def read(cls, facts: Any) -> Pending | None:
        """From a checkpoint's facts."""
        if facts is None:
            return None
        values = [math.nan if n is None else float(n) for n in facts["figures"]]
        if len(values) != _FIGURES + len(facts["names"]):
            raise ValueError("the figures of its last iteration are incomplete")
        return cls(
            int(facts["step"]),
            float(facts["rate"]),
            Reading(torch.tensor(values, dtype=torch.float64)),
            tuple(str(name) for name in facts["names"]),
            stale=bool(facts["stale"]),
        )

    def facts(self) -> dict[str, Any]:
        """For a checkpoint: the iteration is part of the weights and nobody has looked at it yet.
        (Infinity stands as NaN: neither is finite.)"""
        figures = [n if math.isfinite(n) else None for n in self.reading.numbers()]
        return {
            "step": self.step, "rate": self.rate, "figures": figures, "names": self.names,
            "stale": self.stale,
        }  # fmt: skip

    def report(self) -> tuple[Step, list[float]]:
        """What the iteration did, and how many processes caught each signal."""
        numbers = self.reading.numbers()
        end = len(numbers) - len(self.names)
        loss, taking_part, without, norm, *caught = numbers[:end]
        told = dict(zip(self.names, numbers[end:], strict=True))
        blocks = {n.removeprefix(_BLOCK): v for n, v in told.items() if n.startswith(_BLOCK)}
        tasks, moved = int(taking_part + without), taking_part > 0 and math.isfinite(norm)
        report = Step(
            self.step, loss, tasks, int(without), norm, moved, self.rate,
            told.get("cg_residual"), told.get("unsolved"), blocks or None,
        )  # fmt: skip
        return report, caught


_FIGURES = 4 + len(SIGNALS)
_BLOCK = "gradient/"  # before the name of a block


def _means(diagnostics: Diagnostics) -> Iterable[tuple[str, Tensor]]:
    """The means over tasks of what is logged."""
    if (residual := diagnostics.cg_residual) is not None:
        yield "cg_residual", residual.nanmean()
    if (unsolved := diagnostics.unsolved) is not None:
        yield "unsolved", unsolved.double().mean()
    for name, norm in (diagnostics.gradient_norm or {}).items():
        yield f"{_BLOCK}{name}", norm.nanmean()


class Idle:
    """Whether the device waits for the host: it has finished an iteration before the next one has
    been given to it."""

    SKIPPED, COUNTED = 20, 100  # iterations: first ones are slow for other reasons

    def __init__(self) -> None:
        self._seen = 0
        self._idle = 0

    def sees(self, pending: Pending, tasks: int) -> str | None:
        """Take note of an iteration, when the next one has just been launched. Returns a sentence
        for a person, once, if the device was idle in most of them."""
        self._seen += 1
        if self._seen <= self.SKIPPED:
            return None
        self._idle += pending.reading.ready
        if self._seen != self.SKIPPED + self.COUNTED or 2 * self._idle <= self.COUNTED:
            return None
        return (
            f"the device waits for the host in {100 * self._idle // self.COUNTED} % of the "
            f"iterations: raise --tasks (now {tasks}), which costs it little. A run of as many "
            "tasks then has fewer iterations."
        )
