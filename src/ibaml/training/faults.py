"""Why can a run not continue? Which quantity is at fault, in which layer, and what to lower."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from ibaml.diagnostics import Diagnostics
from ibaml.learner import MetaLearner
from ibaml.training.settings import Settings


class TrainingError(RuntimeError):
    """A run stopped; the message says why and what to change."""


class Diverged(TrainingError):
    """Training produced numbers that are not finite, or lost what it had learned."""


class OutOfMemory(TrainingError):
    """A meta-step did not fit into memory, in this process or another."""


def diagnose(
    learner: MetaLearner,
    settings: Settings,
    diagnostics: Diagnostics | None,
    gradients: Mapping[str, Tensor | None] | None,
) -> str:
    """What went wrong in an iteration, from the diagnostics of its last call (if there was one in
    this process) and the meta-gradient that it left; and in the weights as they are now."""
    sentences = []
    if diagnostics is not None and bool(diagnostics.left_out.any()):
        sentences.append(_inner(learner, diagnostics, settings))
    if nonfinite := _first_nonfinite((gradients or {}).items()):
        name, value = nonfinite
        sentences.append(
            f"the meta-gradient of {name} is {value}: lower meta_lr (now {settings.meta_lr:g}) or "
            f"clip (now {settings.clip:g})"
        )
    if nonfinite := _first_nonfinite((n, p.detach()) for n, p in learner.named_parameters()):
        sentences.append(
            f"the meta-parameter {nonfinite[0]} is {nonfinite[1]}: go back to a checkpoint"
        )
    return " ".join(f"{sentence[0].upper()}{sentence[1:]}." for sentence in sentences)


def _inner(learner: MetaLearner, diagnostics: Diagnostics, settings: Settings) -> str:
    """Why tasks were left out of the last iteration, and what to change."""
    left_out, total = int(diagnostics.left_out.sum()), len(diagnostics.keys)
    solution = diagnostics.record.solution
    assert solution is not None
    reasons = {
        diagnostics.reason[t].sentence for t in range(total) if bool(diagnostics.left_out[t])
    }
    text = f"{left_out} of {total} tasks were left out of the last iteration"
    if bool(solution.diverged.any()):
        text += f": adaptation {' and '.join(sorted(reasons))}"
        layer = _steepest(learner, solution.gradient, diagnostics.left_out)
        if layer is not None:
            text += f", first in {layer}"
        bayes = settings.init_log_var is not None
        if settings.inner_lr is not None:
            text += f"; lower inner_lr (now {settings.inner_lr:g})"
            if bayes:
                name = "lam" if settings.beta is None else "beta"
                text += (
                    f", or raise init_log_var (now {settings.init_log_var:g}), or lower {name} "
                    f"(now {getattr(settings, name):g}): descent needs lr·κ·exp(−ρ) below 2, with "
                    "κ = β/N"
                )
        else:
            text += f"; lower meta_lr (now {settings.meta_lr:g})"
            text += f" or steps (now {settings.steps})" if settings.steps else ""
    else:
        text += (
            ": adaptation succeeded but the meta-loss is not finite. Check the query data. "
            f"Lower meta_lr (now {settings.meta_lr:g})"
        )
    return text


def _steepest(learner: MetaLearner, gradient: Tensor | None, left_out: Tensor) -> str | None:
    """The weights whose ∇E is not finite, or largest, among the tasks left out."""
    slots = learner.layout.slots(learner.belief.blocks(learner.layout.size))
    if gradient is None or gradient.shape[-1] != slots[-1][2]:
        return None
    bad_gradient = gradient[left_out]
    sizes = {name: bad_gradient[:, begin:end].norm() for name, begin, end in slots}
    for name, size in sizes.items():
        if not bool(size.isfinite()):
            return f"{name} (its gradient is not finite)"
    name = max(sizes, key=lambda n: float(sizes[n]))
    return f"{name} (‖∇E‖ = {float(sizes[name]):.1e})"


def _first_nonfinite(named: Iterable[tuple[str, Tensor | None]]) -> tuple[str, str] | None:
    for name, tensor in named:
        if tensor is not None and not bool(torch.isfinite(tensor).all()):
            return name, "NaN" if bool(tensor.isnan().any()) else "infinite"
    return None


def out_of_memory(error: BaseException) -> bool:
    """Whether an error means that memory ran out, and is not a sentence of ours about it."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    if isinstance(error, TrainingError) or not isinstance(error, RuntimeError):
        return False
    return any(words in str(error) for words in _NO_MEMORY)


_NO_MEMORY = (
    "DefaultCPUAllocator",
    "not enough memory",
    "out of memory",  # of the driver, outside torch's allocator
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
)


def what_to_lower(settings: Settings) -> str:
    """The settings to lower to save memory, the most effective first."""
    names = []
    if settings.micro_batch is None or settings.micro_batch > 1:
        names.append("micro_batch (results stay the same)")
    if settings.queries is not None:
        names.append("queries")
    if settings.samples is not None and settings.samples > 1:
        names.append("samples")
    if settings.method in ("maml", "abml") and settings.steps:
        names.append("steps (or use ibaml or imaml, whose memory does not grow with it)")
    if settings.adapt != "head":
        names.append('or use adapt = "head"')
    if settings.channels is not None:
        names.append("channels")
    return ", ".join(names)


def unsolved(diagnostics: Diagnostics | None) -> str:
    """A sentence if the linear systems of a gradient were not solved, else empty."""
    if diagnostics is None:
        return ""
    unsolved, residual = diagnostics.unsolved, diagnostics.cg_residual
    if unsolved is None or residual is None or not bool(unsolved.any()):
        return ""
    return (
        f"The linear systems behind the meta-gradient are not solved in "
        f"{100 * float(unsolved.double().mean()):.0f} % of the tasks (relative residual up to "
        f"{float(residual[unsolved].max()):.1g}): raise cg_steps, or damping. "
    )


def first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:120]
