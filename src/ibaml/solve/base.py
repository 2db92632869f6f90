"""What is a solver, what does it return, and which loop do all first-order solvers share?"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Protocol

import torch
from torch import Tensor

from ibaml.arguments import check_count, check_flag, check_number
from ibaml.energy import Energy
from ibaml.linalg import Reason, all_done
from ibaml.weights import Slot

Rate = float | Mapping[str, float]
_TOO_MUCH = 10  # an energy that grew by this factor was not minimized


@dataclass(frozen=True)
class Solution:
    """A solution of every task and what happened on the way, per task.

    ``gradient`` and ``energy_after`` are those at the last iterate; None if not asked for (a
    ``tol`` asks too). A task whose iterates stopped being finite, or whose energy grew far too
    large, is ``diverged`` and has its start as value. ``path`` is how many whole steps descent
    took, shortened ones as parts of one; None for other solvers.
    """

    value: Tensor
    steps: Tensor
    reason: Tensor
    energy_before: Tensor
    energy_after: Tensor | None
    gradient: Tensor | None
    path: Tensor | None = None

    @property
    def diverged(self) -> Tensor:
        return (self.reason == Reason.NONFINITE) | (self.reason == Reason.DIVERGED)


class Solver(Protocol):
    """Minimize an energy from a start. Solvers are frozen dataclasses; their fields are options."""

    @property
    def steps(self) -> int: ...

    def solve(
        self, energy: Energy, start: Tensor, *, rate: Tensor | None = None, examine: bool = True
    ) -> Solution:
        """Minimize ``energy`` without a graph.

        Args:
            rate: step sizes (dim,) that replace the solver's own (learned step sizes).
            examine: evaluate E and ∇E at the solution (one more evaluation).
        """


@dataclass(frozen=True)
class Progress:
    """The state of a first-order solver: the iterate, its memory (moments), the record so far."""

    v: Tensor
    memory: tuple[Tensor, ...]
    steps: Tensor
    reason: Tensor
    energy_before: Tensor
    grew_too_much: Tensor  # whether the energy grew far too large on the way
    path: Tensor  # the sum of the shares of their step sizes that steps took
    energy: Tensor  # E at the iterate before; ∞ at the start
    longest: Tensor  # the largest share of its step size that a step may take


def energy_and_gradient(
    energy: Energy, v: Tensor, create_graph: bool = False
) -> tuple[Tensor, Tensor]:
    """E (T,) and ∇E (T, dim) at v."""
    with torch.enable_grad():
        if not v.requires_grad:
            v = v.detach().requires_grad_()
        value = energy(v)
        (gradient,) = torch.autograd.grad(value.sum(), v, create_graph=create_graph)
    return (value, gradient) if create_graph else (value.detach(), gradient)


def resolve_rate(rate: Rate, slots: tuple[Slot, ...], like: Tensor) -> Tensor | float:
    """The step sizes: a number as it is; patterns over slot names (the first match counts) as a
    vector (dim,)."""
    if not isinstance(rate, Mapping):
        return rate
    vector = like.new_empty(like.shape[-1])
    used = set()
    for name, begin, end in slots:
        for pattern, value in rate.items():
            if fnmatchcase(name, pattern):
                vector[begin:end] = value
                used.add(pattern)
                break
        else:
            raise ValueError(
                f'lr gives no step size for {name!r}: add it, or a last entry "*" for the rest'
            )
    if unused := set(rate) - used:
        names = [name for name, _, _ in slots]
        pattern = sorted(unused)[0]
        near = get_close_matches(pattern, names, n=1, cutoff=0.3) or names[:1]
        raise ValueError(f"lr: no weight matches {pattern!r} (did you mean {near[0]!r}?)")
    return vector


def check_rate(rate: Rate) -> None:
    if isinstance(rate, Mapping):
        for pattern, value in rate.items():
            check_number(f"lr[{pattern!r}]", value, above=0)
    else:
        check_number("lr", rate, above=0)


def no_step_sizes(solver: Descent) -> str:
    """What to say of a solver whose steps are not step sizes times ∇E."""
    return (
        f'stopping="auto" needs step sizes, which GradientDescent and NaturalDescent have and '
        f"{type(solver).__name__} has not (its steps depend on all gradients before): give "
        "stopping a number, or None for tasks that are solved"
    )


@dataclass(frozen=True)
class Descent(ABC):
    """The loop of the first-order solvers: exactly ``steps`` steps, unless ``tol`` is given.

    Args:
        steps: K.
        lr: a step size, or step sizes by pattern over the names of the weights, e.g.
            ``{"head.*": 0.1, "log_var.*": 1.0, "*": 0.01}``; log-variances are ``log_var.NAME``.
        tol: stop a task at ‖∇E‖ ≤ tol (this waits for the device at every step).
        learn_lr: meta-learn one step size for each adapted tensor, starting from ``lr`` (only
            with the unrolled rule, where it has a gradient).
        fresh_noise: draw new noise at every step. The energy is then no longer one function, as
            the implicit rule assumes.
    """

    steps: int = 5
    lr: Rate = 0.01
    tol: float | None = None
    learn_lr: bool = False
    fresh_noise: bool = False

    def __post_init__(self) -> None:
        check_count("steps", self.steps, 0)
        if self.tol is not None:
            check_number("tol", self.tol, above=0)
        check_rate(self.lr)
        check_flag("learn_lr", self.learn_lr)
        check_flag("fresh_noise", self.fresh_noise)

    def memory(self, v: Tensor) -> tuple[Tensor, ...]:
        """The solver's initial memory (its state besides the iterate)."""
        return ()

    @abstractmethod
    def move(
        self,
        energy: Energy,
        v: Tensor,
        gradient: Tensor,
        memory: tuple[Tensor, ...],
        step: int,
        rate: Tensor | float,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """One step: the next iterate and memory."""

    def share(
        self, energy: Energy, value: Tensor, gradient: Tensor, rate: Tensor | float
    ) -> Tensor | None:
        """Which share of its step size ``rate`` each task takes, (T,); None: all of it."""
        return None

    def longest(self, value: Tensor, progress: Progress) -> Tensor:
        """The largest share that each task may take from here on, (T,), where E is ``value``."""
        return progress.longest

    def step_sizes(self, energy: Energy, v: Tensor, rate: Tensor | None = None) -> Tensor | float:
        """The step size of every coordinate: near a solution one step is v ← v − step·∇E(v). Only
        solvers that have one override this.

        Args:
            rate: step sizes (dim,) that replace the solver's own.
        """
        raise ValueError(no_step_sizes(self))

    def begin(self, start: Tensor) -> Progress:
        tasks = start.shape[0]
        zeros = torch.zeros(tasks, dtype=torch.long, device=start.device)
        return Progress(
            v=start,
            memory=self.memory(start),
            steps=zeros,
            reason=torch.full_like(zeros, Reason.STEPS),
            energy_before=start.new_full((tasks,), float("nan")),
            grew_too_much=torch.zeros_like(zeros, dtype=torch.bool),
            path=start.new_zeros(tasks),
            energy=start.new_full((tasks,), float("inf")),
            longest=start.new_ones(tasks),
        )

    def advance(
        self,
        energy: Energy,
        progress: Progress,
        until: int,
        first: int = 0,
        *,
        rate: Tensor | None = None,
        create_graph: bool = False,
    ) -> Progress:
        """Take steps ``first`` … ``until`` − 1; with ``create_graph`` they are differentiable."""
        step_sizes = resolve_rate(self.lr, energy.slots, progress.v) if rate is None else rate
        for step in range(first, until):
            active = progress.reason == Reason.STEPS
            if self.tol is not None and all_done(active):
                break
            v = progress.v if create_graph else progress.v.detach()
            step_energy = energy.resample(step) if self.fresh_noise else energy
            if create_graph and not v.requires_grad:
                v = v.detach().requires_grad_()
            value, gradient = energy_and_gradient(step_energy, v, create_graph)
            reason = progress.reason
            if self.tol is not None:
                done = active & (gradient.detach().norm(dim=-1) <= self.tol)
                reason = torch.where(done, Reason.CONVERGED, reason)
            with torch.set_grad_enabled(create_graph):
                old = progress.memory
                longest = self.longest(value.detach(), progress)
                share = self.share(step_energy, value, gradient, step_sizes)
                share = None if share is None else torch.minimum(share, longest)
                sizes = step_sizes if share is None else share[:, None] * step_sizes
                moved, memory = self.move(step_energy, v, gradient, old, step, sizes)
                finite = moved.detach().isfinite().all(-1)
                reason = torch.where((reason == Reason.STEPS) & ~finite, Reason.NONFINITE, reason)
                is_moving = (reason == Reason.STEPS)[:, None]
                value = value.detach()
                before = value if step == 0 else progress.energy_before
                walked = torch.ones_like(value) if share is None else share.detach()
                progress = Progress(
                    v=torch.where(is_moving, moved, v),
                    memory=tuple(
                        torch.where(is_moving, a, b) for a, b in zip(memory, old, strict=True)
                    ),
                    steps=progress.steps + is_moving[:, 0],
                    reason=reason,
                    energy_before=before,
                    grew_too_much=(value > before + _TOO_MUCH * (1 + before.abs()))
                    | ~value.isfinite(),
                    path=progress.path + torch.where(is_moving[:, 0], walked, 0.0),
                    energy=value,
                    longest=longest,
                )
        return progress

    def finish(self, energy: Energy, start: Tensor, progress: Progress, examine: bool) -> Solution:
        """The solution: diverged tasks return to their start; E and ∇E if asked for."""
        after = gradient = None
        reason = progress.reason
        value = progress.v
        before = progress.energy_before
        reason = torch.where(
            progress.grew_too_much & (reason == Reason.STEPS), Reason.DIVERGED, reason
        )
        if examine or self.steps == 0 or self.tol is not None:
            after, gradient = energy_and_gradient(energy, value.detach())
            before = after if self.steps == 0 else before
            if self.tol is not None:
                small = gradient.norm(dim=-1) <= self.tol
                reason = torch.where((reason == Reason.STEPS) & small, Reason.CONVERGED, reason)
        path = progress.path.detach()
        solution = Solution(value, progress.steps, reason, before, after, gradient, path)
        return replace(solution, value=torch.where(solution.diverged[:, None], start, value))

    def solve(
        self, energy: Energy, start: Tensor, *, rate: Tensor | None = None, examine: bool = True
    ) -> Solution:
        start = start.detach()
        progress = self.advance(energy, self.begin(start), self.steps, rate=rate)
        progress = replace(progress, v=progress.v.detach())
        return self.finish(energy, start, progress, examine)
