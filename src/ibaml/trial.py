"""Does a fast strategy agree with the loop, for this model and these tasks?

Outputs and first derivatives are compared, relative to the loop's own rounding error. A strategy
that fails here is set aside; the loop is the last choice.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from ibaml.energy import TaskEnergy, in_double
from ibaml.execution import Execution, Runner, Unfoldable

_ROUNDING = 10.0  # up to this many times the loop's own error counts as equal


def settle(
    energy: TaskEnergy, start: Tensor, chosen: Runner, execution: Execution
) -> tuple[Runner, str]:
    """The fastest way to run weight sets that agrees with the loop: the chosen runner, or a plainer
    one. A strategy that was named in ``execution`` and does not agree raises. Returns also a
    sentence on what was set aside and why, empty if nothing was."""
    plain = chosen.plain()
    set_aside = ""
    for runner in (chosen, chosen.looped(), plain):
        if runner == plain and execution in ("auto", "loop"):
            return runner, set_aside
        reason = "its outputs or derivatives differ from the loop's"
        try:
            if agrees_with_loop(replace(energy, run=runner), start):
                return runner, set_aside
        except Unfoldable as error:
            reason = f"there is no rule for {error}"
        except Exception as error:  # the loop ran, so the strategy is at fault
            reason = (str(error).splitlines() or [type(error).__name__])[0]
        set_aside = set_aside or f"{runner.strategy}: {reason}"
        if execution != "auto":
            break
    raise ValueError(
        f'execution="{execution}" does not work for this model ({reason}): use execution="auto"'
    )


def agrees_with_loop(energy: TaskEnergy, v: Tensor) -> bool:
    """Whether the energy's runner gives the same outputs as the loop, and the same derivative of
    them in every weight, at weights other than the network's own. This detects a forward that reads
    the head's weights elsewhere, mixes channels that a fold separates, or has a custom
    derivative."""
    wave = torch.arange(v.shape[-1], device=v.device, dtype=v.dtype).sin()
    away = v + wave * 0.1
    loop = replace(energy, run=energy.run.plain())
    try:
        outputs, slopes = _outputs_and_slopes(loop, away)
    except Exception:
        return True  # check_tasks explains a model that does not run at all
    fast, fast_slopes = _outputs_and_slopes(energy, away)
    if fast.shape != outputs.shape:
        return False
    if not outputs.numel():
        return True
    # a device's convolutions may round to 10 bits, bfloat16 to 8, and derivatives amplify that
    if energy.run.precision is not None:
        share, slope_share = 0.1, 0.5
    elif v.dtype == torch.float64:
        share, slope_share = 1e-3, 1e-5
    else:
        share, slope_share = (2e-2, 0.3) if v.is_cuda else (1e-3, 3e-2)
    scale = share * (outputs.abs().amax().nan_to_num() + 1e-6)
    close = ((fast - outputs).abs() <= scale).logical_or(outputs.isnan())
    if not bool(close.all()):
        return False
    floor = 1e-3 * max((float(g.norm()) for g in slopes), default=0.0)
    if not math.isfinite(floor):
        return True
    # where a derivative is zero (a bias before batch norm) the loop's is rounding error alone
    rounding = _rounding(loop, away, outputs, slopes, scale)
    return all(
        float((a - b).norm()) <= slope_share * (float(b.norm()) + floor) + _ROUNDING * error
        for a, b, error in zip(fast_slopes, slopes, rounding, strict=True)
    )


def _rounding(
    energy: TaskEnergy, v: Tensor, outputs: Tensor, slopes: list[Tensor], scale: Tensor
) -> list[float]:
    """How far derivatives are from those in double precision; 0 if the model does not run in double
    precision, or computes another function there."""
    nothing = [0.0] * len(slopes)
    double = in_double(energy)
    if double is None:
        return nothing
    try:
        same, exact = _outputs_and_slopes(double, v.double())
    except Exception:
        return nothing
    if same.shape != outputs.shape or not bool(((same - outputs).abs() <= scale).all()):
        return nothing
    return [float((a - b).norm()) for a, b in zip(slopes, exact, strict=True)]


def _outputs_and_slopes(energy: TaskEnergy, v: Tensor) -> tuple[Tensor, list[Tensor]]:
    """The outputs, and a derivative of them in every slot of v and tensor of θ."""
    with torch.enable_grad():
        v = v.detach().requires_grad_()
        theta = [t.detach().requires_grad_() for t in energy.theta]
        outputs = energy.bind(tuple(theta)).outputs(v)
        wave = torch.arange(outputs.numel(), device=v.device, dtype=outputs.dtype).cos()
        tensors = (v, *theta)
        if not outputs.requires_grad:
            return outputs, [torch.zeros_like(t) for t in tensors]
        wave = wave.view_as(outputs)
        slopes = torch.autograd.grad(outputs, tensors, wave, materialize_grads=True)
    return outputs.detach(), [*(slopes[0][:, a:b] for _, a, b in energy.slots), *slopes[1:]]
