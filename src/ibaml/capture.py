"""How is a whole meta-step recorded as one CUDA graph, and replayed for batches of the same kind?

A meta-step is thousands of small kernels, and the host takes longer to launch them one by one than
the accelerator takes to run them. A recording holds the loss and all its gradients.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from ibaml.energy import task_roots
from ibaml.execution import held
from ibaml.metastep import (
    MetaStep,
    Reads,
    map_tensors,
    reaches_outside,
    with_gradient,
    zero_unless_finite,
)
from ibaml.solve import NewtonCG, Solver
from ibaml.tasks import TaskBatch

WARM_UPS = 2  # calls of a kind before it is recorded: by then cuDNN has chosen its kernels
_MAX_RECORDINGS = 2  # how many recordings are kept, each with the memory of its meta-step


Work = Callable[[TaskBatch, Tensor], MetaStep]


def stops_early(solver: Solver) -> bool:
    """Whether a solver reads values to stop early. In a recording it takes all its steps, which is
    cheap only if the head alone is adapted."""
    return isinstance(solver, NewtonCG) or getattr(solver, "tol", None) is not None


class Captures:
    """The recorded meta-steps of one learner.

    Attributes:
        refused: why a meta-step could not be recorded; None if none failed.
    """

    def __init__(self) -> None:
        self.refused: str | None = None
        self._recordings: deque[_Captured] = deque(maxlen=_MAX_RECORDINGS)
        self._seen: deque[tuple[Any, ...]] = deque(maxlen=8)

    def __bool__(self) -> bool:
        return bool(self._recordings)

    def step(
        self,
        learner: nn.Module,
        work: Work,
        choices: tuple[Any, ...],
        batch: TaskBatch,
        seed: int,
        required: bool,
    ) -> MetaStep | None:
        """The meta-step of the batch by replay; None if it has to run as usual.

        Args:
            work: the meta-step as a function of the batch and its tasks' roots, which reads the
                learner's parameters and reads no values on the host.
            choices: what the work depends on besides tensors; another value is another kind.
            insist: raise the error that prevents a recording.
        """
        kind = (*_described(batch), *_addresses(learner), *_flags(), *choices)
        for captured in self._recordings:
            if captured.kind == kind:
                return captured.replay(batch, seed)
        self._seen.append(kind)
        if self.refused is not None or self._seen.count(kind) <= WARM_UPS:
            return None
        if len(self._recordings) == _MAX_RECORDINGS:
            self._recordings.popleft()
        try:
            self._recordings.append(_Captured(kind, learner, work, batch, seed))
        except RuntimeError as error:
            if required:
                raise
            self.refused = str(error).splitlines()[0]
            warnings.warn(
                f"meta-steps cannot be recorded, so they run without replay, which is slower: "
                f"{self.refused} (capture=False does not try)",
                RuntimeWarning,
                stacklevel=2,
            )
            return None
        return self._recordings[-1].replay(batch, seed)


class _Captured:
    """A recording for one kind of batch, with its own batch, into which others are copied."""

    def __init__(
        self, kind: tuple[Any, ...], learner: nn.Module, work: Work, batch: TaskBatch, seed: int
    ) -> None:
        self.kind = kind
        self._batch = batch.clone()
        self._roots = task_roots(seed, batch.task_keys, batch.support_x.device)
        self._parameters = [p for p in learner.parameters() if p.requires_grad]
        self._recording = Recording(learner, work, self._batch, self._roots)

    def replay(self, batch: TaskBatch, seed: int) -> MetaStep:
        pairs = zip(_tensors(self._batch), _tensors(batch), strict=True)
        for mine, theirs in pairs:
            mine.copy_(theirs, non_blocking=True)
        self._roots.copy_(task_roots(seed, batch.task_keys, self._roots.device))
        recording = self._recording
        recording.replay()
        # the next replay overwrites these
        step: MetaStep = map_tensors(Tensor.clone, recording.step)
        return with_gradient(step, recording.flat.clone(), recording.present, self._parameters)


class Recording:
    """One meta-step as a CUDA graph.

    Attributes:
        step: its results, overwritten by every replay.
        flat: the gradients of the parameters that have one, in one vector, overwritten likewise.
        present: which parameters have one.

    Args:
        backward: False records only the loss.
    """

    def __init__(
        self,
        learner: nn.Module,
        work: Work,
        batch: TaskBatch,
        roots: Tensor,
        *,
        backward: bool = True,
    ) -> None:
        named = {n: p for n, p in learner.named_parameters() if p.requires_grad}
        # new leaves, so that no recorded tensor belongs to a graph outside
        leaves = {n: p.detach().requires_grad_() for n, p in named.items()}
        swapped = {f"learner.{n}": leaf for n, leaf in leaves.items()}
        gradients: tuple[Tensor | None, ...] = ()
        self.graph = torch.cuda.CUDAGraph()
        with record(self.graph, roots.device):
            with held(*learner.children()):
                step = functional_call(_Work(learner, work), swapped, (batch, roots))
            if reaches_outside(step.loss, list(leaves.values())):
                raise RuntimeError("the loss depends on tensors that are not the learner's")
            if backward:
                gradients = torch.autograd.grad(step.loss, list(leaves.values()), allow_unused=True)
            gradients, all_finite = zero_unless_finite(gradients, step)
            step.left_out.logical_or_(~all_finite)
            flat = [g.reshape(-1) for g in gradients if g is not None]
            self.flat = torch.cat(flat) if flat else step.loss.new_zeros(0)
        self.present = [g is not None for g in gradients]
        self.step: MetaStep = map_tensors(Tensor.detach, replace(step, reads=Reads()))

    def replay(self) -> None:
        """Run the step again with the current values of the batch, roots and parameters."""
        self.graph.replay()


@contextmanager
def record(graph: torch.cuda.CUDAGraph, device: torch.device) -> Iterator[None]:
    """Record the operations inside, on a stream of the given device (torch's default is a stream of
    whichever device was current first). After a failure the current stream is restored, which torch
    before 2.12 does not do."""
    with torch.cuda.device(device):
        before = torch.cuda.current_stream()
        try:
            with torch.cuda.graph(graph, stream=_side_stream(device)):
                yield
        except BaseException:
            torch.cuda.set_stream(before)
            raise


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


class _Work(nn.Module):
    """The learner's meta-step as a module, so that its parameters can be swapped."""

    def __init__(self, learner: nn.Module, work: Work) -> None:
        super().__init__()
        self.learner = learner
        self._work = work

    def forward(self, batch: TaskBatch, roots: Tensor) -> MetaStep:
        return self._work(batch, roots)


def _tensors(batch: TaskBatch) -> tuple[Tensor, ...]:
    return batch.support_x, batch.support_y, batch.query_x, batch.query_y


def _described(batch: TaskBatch) -> tuple[Any, ...]:
    return *((t.shape, t.dtype, t.device) for t in _tensors(batch)), batch.classes


def _addresses(learner: nn.Module) -> tuple[Any, ...]:
    """The addresses of the learner's tensors, from which a recording reads them."""
    return tuple(
        (t.data_ptr(), t.requires_grad)
        for module in learner.modules()
        for t in (*module.parameters(recurse=False), *module.buffers(recurse=False))
    )


def _flags() -> tuple[Any, ...]:
    return (
        torch.backends.cudnn.allow_tf32,
        torch.backends.cuda.matmul.allow_tf32,
        torch.backends.cudnn.enabled,
        torch.is_autocast_enabled("cuda"),
        torch.are_deterministic_algorithms_enabled(),
    )
