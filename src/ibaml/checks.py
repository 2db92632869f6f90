"""Which choices and tasks are refused? Options when a learner is built, tasks when first seen."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from ibaml.arguments import check_count, check_flag, check_number, check_part, check_word
from ibaml.energy import Likelihood, TaskEnergy
from ibaml.execution import Execution, Precision
from ibaml.gradient import GradientRule, Implicit, Reptile, Unrolled
from ibaml.objectives import Abml, Objective, TowardsSolution
from ibaml.solve import (
    Descent,
    DualNewton,
    GradientDescent,
    HeadNewton,
    NaturalDescent,
    PolyakDescent,
    Solver,
    no_step_sizes,
)
from ibaml.weights import Belief, Roles, head_module
from ibaml.words import EXECUTIONS, NOISE_KINDS, PRECISIONS

_LOG_VAR_LIMIT = 80.0  # exp(±88) leaves float32


def check_options(
    belief: Belief,
    solver: Solver,
    gradient: GradientRule,
    objective: Objective | None,
    likelihood: Likelihood,
    samples: int,
    noise: str,
    beta: float,
    init_log_var: float,
    learn_beta: bool = False,
) -> None:
    """Refuse invalid choices, and choices that cannot work together."""
    check_part("belief", belief)
    check_part("solver", solver)
    check_part("gradient", gradient)
    if objective is not None:
        check_part("objective", objective)
    check_count("samples", samples, 1)
    check_word("noise", noise, NOISE_KINDS)
    check_number("beta", beta, above=0)
    check_number("init_log_var", init_log_var, least=-_LOG_VAR_LIMIT, most=_LOG_VAR_LIMIT)
    learned = isinstance(solver, Descent) and solver.learn_lr
    if belief.in_dual != isinstance(solver, DualNewton):
        raise ValueError(
            "a full-covariance posterior and the solver DualNewton belong together: use "
            'posterior="full" and leave solver out, or another solver and posterior="diagonal"'
        )
    if belief.in_dual and not isinstance(gradient, Implicit):
        raise ValueError(
            'posterior="full" is differentiated implicitly, in its dual: leave gradient out'
        )
    if isinstance(gradient, Implicit):
        _check_stopping(belief, solver, gradient)
        if gradient.curvature.kind == "lemma" and not belief.is_diagonal_gaussian:
            raise ValueError('curvature "lemma" needs a diagonal Gaussian belief: use "energy"')
    if learned and not isinstance(gradient, Unrolled):
        raise ValueError(
            "a learned step size has gradient zero under every rule but the unrolled one (a "
            "solution does not depend on how it was found): use learn_lr=False or gradient="
            "Unrolled()"
        )
    if learn_beta:
        if belief.weight(1.0, 1) == belief.weight(2.0, 1):
            raise ValueError(f"learn_beta: the energy of {belief} does not depend on beta")
        if not isinstance(gradient, Implicit | Unrolled):
            raise ValueError(
                f"learn_beta: beta has gradient zero under {type(gradient).__name__}, which takes "
                "no derivative of the energy: use the implicit or the unrolled rule"
            )
    if isinstance(gradient, Reptile):
        if solver.steps == 0:
            raise ValueError("Reptile with steps=0 has no direction: the solution is the start")
        if not isinstance(objective, TowardsSolution | None):
            raise ValueError("Reptile has no meta-loss: leave objective out")
        if any(True for _ in likelihood.parameters()):
            raise ValueError(
                "Reptile has no gradient for the parameters of a likelihood: give it a fixed one "
                "(learn=False)"
            )
    elif isinstance(objective, TowardsSolution):
        raise ValueError(
            "TowardsSolution works with the Reptile rule alone: use "
            "gradient=Reptile(), or another objective"
        )
    if isinstance(gradient, Unrolled) and not isinstance(solver, Descent):
        raise ValueError(
            f"{type(solver).__name__} cannot be unrolled: use GradientDescent, NaturalDescent or "
            "Adam, or the implicit rule"
        )
    if isinstance(solver, HeadNewton) and not (belief.is_diagonal_gaussian and noise == "outputs"):
        raise ValueError(
            'HeadNewton needs a diagonal Gaussian belief and noise="outputs": give both, or use '
            "NewtonCG()"
        )
    if isinstance(solver, NaturalDescent) and not belief.is_diagonal_gaussian:
        raise ValueError("NaturalDescent moves log-variances: it needs a diagonal Gaussian belief")
    if isinstance(objective, Abml) and not belief.is_diagonal_gaussian:
        raise ValueError(
            "ABML's objective needs a diagonal Gaussian belief (its hyper-prior is over 1/d)"
        )


def _check_stopping(belief: Belief, solver: Solver, rule: Implicit) -> None:
    """Refuse an implicit rule that knows no prior and no start, or cannot know the start."""
    stopping = rule.stopping
    descent = solver if isinstance(solver, Descent) else None
    if stopping == "auto" and descent and type(descent).step_sizes is Descent.step_sizes:
        raise ValueError(no_step_sizes(descent))
    if belief.in_dual and stopping and stopping != "auto":
        raise ValueError(
            'stopping is not read by posterior="full", which is solved in closed form: leave it out'
        )
    if belief.has_prior:
        return
    if not stopping or (stopping == "auto" and descent is None):
        raise ValueError(
            "implicit differentiation needs a prior in the energy: without one the solution "
            "does not depend on the prior and the meta-gradient is exactly zero. Use lam > 0 "
            "(imaml), a Gaussian belief (ibaml), or the unrolled rule (maml); or descent and "
            'stopping="auto", which makes the start a prior'
        )
    if stopping == "auto" and descent and descent.tol is not None:
        raise ValueError(
            'stopping="auto" counts a task that reaches tol as solved, and without a prior its '
            "solution does not depend on where it started: leave tol out, or give stopping a number"
        )
    if rule.curvature.damping:
        raise ValueError(
            "damping is relative to the prior's precision, and the energy has no prior: leave it "
            "out, or give stopping a larger number"
        )


def check_running(
    execution: Execution, precision: Precision, capture: bool | None, diagnose: bool
) -> None:
    """Refuse invalid choices of how a learner runs."""
    check_word("execution", execution, EXECUTIONS)
    check_word("precision", precision, PRECISIONS)
    check_flag("capture", capture, or_none=True)
    check_flag("diagnose", diagnose)


def check_model(model: nn.Module, roles: Roles, gradient: GradientRule, tie_head: bool) -> None:
    """Refuse a model that does not fit the choices."""
    check_flag("tie_head", tie_head)
    if isinstance(gradient, Reptile) and roles.shared:
        raise ValueError(
            "Reptile moves a prior towards the tasks' solutions and has no gradient for shared "
            f'weights ({", ".join(roles.shared[:3])}, …): use adapt="all", or freeze them'
        )
    for name, layer in model.named_modules():
        if isinstance(layer, nn.modules.instancenorm._InstanceNorm) and layer.track_running_stats:
            raise ValueError(
                f"{name or type(layer).__name__}: instance norm with track_running_stats=True is "
                "not supported (its running statistics would silently replace the instance's): "
                "build it with track_running_stats=False"
            )
    if tie_head:
        name, head = head_module(model)
        if not roles.head:
            raise ValueError(
                f"tie_head ties the prior of the last linear layer ({name}), which is not adapted: "
                'use adapt="head" or adapt="all"'
            )
        own = {id(p) for p in head.parameters()}
        for other, layer in model.named_modules():
            if layer is not head and own & {id(p) for p in layer.parameters(recurse=False)}:
                raise ValueError(
                    f"tie_head: the last linear layer ({name}) shares a weight with {other}, whose "
                    "rows are not classes; untie them"
                )


def not_linear(belief: Belief, noise: str, linear: bool) -> str:
    """What is wrong if the network does not end in an adapted linear layer: a sentence for a
    warning, empty if nothing is. A belief about such a layer alone is refused."""
    if linear:
        return ""
    needs = (
        'the adapted weights to be those of one nn.Linear (adapt="head") that reads one vector per '
        "example and ends the network"
    )
    if belief.in_dual:
        raise ValueError(
            f'posterior="full" needs {needs}: use posterior="diagonal", or execution="auto"'
        )
    if noise == "outputs" and belief.has_output_moments:
        return f'noise="outputs" needs {needs}: antithetic noise on the weights is used instead'
    return ""


@torch.no_grad()
def check_tasks(
    energy: TaskEnergy, v: Tensor, classes: int | None, solver: Solver, adapts_head: bool
) -> None:
    """Refuse tasks whose inputs the model does not accept or whose targets do not fit its outputs,
    and a model that is random."""
    x, y = energy.x, energy.y
    dtype, device = v.dtype, v.device
    if x.device != device:
        raise ValueError(f"the tasks are on {x.device} and the model on {device}: move one")
    if x.is_floating_point() and x.dtype != dtype:
        raise ValueError(
            f"the tasks are {x.dtype} and the model is {dtype}: use batch.to({dtype}) or "
            "model.to(...)"
        )
    if energy.layout.rows and y.is_floating_point():
        raise ValueError("tie_head is for classification, but the targets are floating numbers")
    name = type(energy.model).__name__
    try:
        outputs, again = (replace(energy).outputs(v) for _ in range(2))  # without cached features
    except Exception as error:
        raise ValueError(
            f"the model {name} does not run on one task's support inputs, shape "
            f"{tuple(x.shape[1:])} {x.dtype}: {error}"
        ) from error
    if not torch.allclose(outputs, again, rtol=1e-3, atol=1e-4, equal_nan=True):
        raise ValueError(
            f"the model {name} is random: two passes over the same inputs differ (dropout outside "
            "an nn.Dropout?). A task's energy must be deterministic: switch the randomness off"
        )
    if outputs.shape[2] != x.shape[1]:
        raise ValueError(
            f"the model returned {outputs.shape[2]} outputs for {x.shape[1]} examples: its first "
            "dimension must be the examples"
        )
    if adapts_head and not energy.layout.rows:
        body, head = head_module(energy.model)
        if head.out_features != outputs.shape[-1]:
            raise ValueError(
                f'adapt="head" takes the last linear layer, {body} with {head.out_features} '
                f"outputs, and the model has {outputs.shape[-1]}: name the head, e.g. "
                'adapt="classifier"'
            )
    if energy.likelihood.takes_labels(y) and classes is not None and outputs.dim() == 4:
        if int(y.min()) < 0:
            raise ValueError(f"label {int(y.min())} is out of range: labels are 0 … ways − 1")
        if classes > outputs.shape[-1]:
            raise ValueError(
                f"label {classes - 1} is out of range: the model has {outputs.shape[-1]} outputs "
                "(labels are 0 … outputs − 1); build it with more ways, or use tie_head=True"
            )
    energy.nll(outputs)
    _warn_if_stiff(solver, energy)


def _warn_if_stiff(solver: Solver, energy: TaskEnergy) -> None:
    """Plain descent diverges where lr·κ·exp(−ρ) > 2: warn before it does."""
    if not isinstance(solver, GradientDescent | NaturalDescent) or solver.steps < 2:
        return
    if isinstance(solver, PolyakDescent):
        return  # its steps are never too long
    if isinstance(solver.lr, Mapping) or not energy.belief.is_diagonal_gaussian:
        return
    lowest = float(energy.meta.prior[1].min())
    kappa = float(energy.kappa)
    stiffness = solver.lr * kappa * math.exp(-lowest)
    if stiffness > 2:
        warnings.warn(
            f"adaptation will diverge: lr·κ·exp(−ρ) = {stiffness:.3g} exceeds 2 (lr = "
            f"{solver.lr:g}, κ = β/N = {kappa:.3g}, smallest prior log-variance "
            f"{lowest:.3g}); lower lr or beta, or raise init_log_var",
            RuntimeWarning,
            stacklevel=5,
        )
