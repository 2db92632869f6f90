"""Does a model have the second derivatives that a gradient rule needs? Autograd does not tell."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ibaml.curvature import Curvature
from ibaml.energy import TaskEnergy, in_double
from ibaml.gradient import GradientRule, Implicit, Unrolled

_SECOND = 0.02  # a larger relative error of a product is not rounding
_FIRST_ORDER = (
    "Write its backward pass in differentiable operations (no once_differentiable, no detach), or "
    "use a rule without second derivatives (methods.fomaml, methods.reptile, "
    "gradient=FirstOrder())"
)


def check_second_derivatives(energy: TaskEnergy, v: Tensor, rule: GradientRule) -> str:
    """What is wrong with the second derivatives that a gradient rule needs; empty if nothing is.

    Autograd gives no error for an operation whose backward pass is not differentiable itself; a
    difference quotient of first derivatives reveals it. It is taken in double precision, with a
    step too short to meet a kink. A model that does not run in double precision, or whose first
    derivatives are not those of its outputs (a straight-through estimator), is not judged.
    """
    if not isinstance(rule, Implicit | Unrolled):
        return ""
    double = in_double(replace(energy, run=energy.run.plain()))
    if double is None:
        return ""
    gauss_newton = isinstance(rule, Implicit) and rule.curvature.kind == "ggn"
    wave = torch.arange(v.shape[-1], device=v.device, dtype=torch.float64)
    error = math.inf
    for phase in (0.0, 1.0):  # one point may be at a kink by bad luck
        at, u = v.double() + 0.1 * (wave + phase).sin(), (2 * wave + phase).cos()[None]
        if not _is_smooth(double, at, u):
            continue
        try:
            error = min(error, _products_error(double, at, u, gauss_newton))
        except RuntimeError as problem:
            if "deriv" not in str(problem) and "differentia" not in str(problem):
                return ""  # another error, such as too little memory
            raise ValueError(
                f"{_no_second_derivative(energy)} ({str(problem).splitlines()[0]}). {_FIRST_ORDER}"
            ) from problem
        if error <= _SECOND:
            return ""
    if error == math.inf:
        return ""  # no point was suitable
    return (
        f"{_no_second_derivative(energy)}: products with the curvature are {100 * error:.0f} % off "
        f"a difference quotient, so the meta-gradient is wrong too. {_FIRST_ORDER}"
    )


def _no_second_derivative(energy: TaskEnergy) -> str:
    return (
        f"an operation of {type(energy.model).__name__} (or of its likelihood) has no correct "
        "second derivative"
    )


def _products_error(energy: TaskEnergy, v: Tensor, u: Tensor, gauss_newton: bool) -> float:
    """The largest relative error of a product with u, compared with its difference quotient."""
    theta = energy.theta
    step = 1e-9 * (1 + float(v.abs().mean())) / float(u.square().mean().sqrt())

    def slopes(v: Tensor) -> list[Tensor]:
        """The loss's first derivatives in v and in every tensor of θ."""
        leaves = [t.detach().clone().requires_grad_() for t in (v, *theta)]
        loss = energy.bind(tuple(leaves[1:])).loss(leaves[0]).sum()
        return _or_zeros(torch.autograd.grad(loss, leaves, allow_unused=True), leaves)

    with torch.enable_grad():
        leaves = [t.detach().clone().requires_grad_() for t in (v, *theta)]
        loss = energy.bind(tuple(leaves[1:])).loss(leaves[0]).sum()
        (slope,) = torch.autograd.grad(loss, leaves[0], create_graph=True, allow_unused=True)
        gradients: Sequence[Tensor | None] = [None] * len(leaves)
        if slope is not None and slope.requires_grad:
            gradients = torch.autograd.grad(slope, leaves, u.expand_as(slope), allow_unused=True)
        products = _or_zeros(gradients, leaves)
        both = []
        for h in (step, 4 * step):
            pairs = zip(slopes(v + h * u), slopes(v - h * u), strict=True)
            both.append([(up - down) / (2 * h) for up, down in pairs])
        if gauss_newton:  # only the product in v differs, the mixed ones are the same
            products[0] = Curvature("ggn").at(energy, v).product(u) - _prior_product(energy, v, u)
            for h, quotients in zip((step, 4 * step), both, strict=True):
                quotients[0] = _gauss_newton_quotient(energy, v, u, h)
    quotients, others = both
    if _relative(quotients, others) > _SECOND:
        return math.inf  # rounding (a part in single precision) or a kink: no judgment
    return _relative(products, quotients)


def _relative(products: Sequence[Tensor], quotients: Sequence[Tensor]) -> float:
    """The largest relative difference, tensor by tensor."""
    most = max(float(q.norm()) for q in quotients)
    return max(
        float((p - q).norm()) / (float(q.norm()) + 1e-2 * most + 1e-12)
        for p, q in zip(products, quotients, strict=True)
    )


def _is_smooth(energy: TaskEnergy, at: Tensor, u: Tensor) -> bool:
    """Whether the loss's first derivative matches its values, to double precision."""
    step = 1e-8 * (1 + float(at.abs().mean()))
    try:
        with torch.enable_grad():
            leaf = at.detach().clone().requires_grad_()
            (slope,) = torch.autograd.grad(energy.loss(leaf).sum(), leaf)
        with torch.no_grad():
            up, down = (float(energy.loss(at + sign * step * u).sum()) for sign in (1, -1))
    except Exception:
        return False
    slope_along, quotient = float((slope * u).sum()), (up - down) / (2 * step)
    return abs(slope_along - quotient) <= 1e-3 * float(slope.norm() * u.norm()) / u.numel() ** 0.5


def _prior_product(energy: TaskEnergy, v: Tensor, u: Tensor) -> Tensor:
    precision = energy.precision(v)
    return torch.zeros_like(u) if precision is None else precision.product(u)


def _gauss_newton_quotient(energy: TaskEnergy, v: Tensor, u: Tensor, step: float) -> Tensor:
    """JᵀΛJu by a difference quotient of the outputs, and first derivatives in v alone."""
    v = v.detach().clone().requires_grad_()
    outputs = energy.outputs(v)
    with torch.no_grad():
        output_change = (energy.outputs(v + step * u) - energy.outputs(v - step * u)) / (2 * step)
    if not outputs.requires_grad:
        return torch.zeros_like(v)

    def slope(point: Tensor) -> Tensor:
        point = point.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(energy.output_loss(point).sum(), point)
        return gradient

    ahead, behind = (slope(outputs + sign * step * output_change) for sign in (1, -1))
    gradient_change = (ahead - behind) / (2 * step)
    (gradient,) = torch.autograd.grad(outputs, v, gradient_change, allow_unused=True)
    return torch.zeros_like(v) if gradient is None else gradient


def _or_zeros(gradients: Sequence[Tensor | None], like: Sequence[Tensor]) -> list[Tensor]:
    return [torch.zeros_like(t) if g is None else g for g, t in zip(gradients, like, strict=True)]
