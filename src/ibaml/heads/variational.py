"""Which full-covariance Gaussian over a linear head has the least E?

Its (a, Λ) (see `ibaml.heads.dual`) are expectations under itself,

    a_n = y_n − E_q π(z_n),      Λ_n = E_q [diag π − ππᵀ](z_n),

taken over fixed points. Found by repeating them from the Laplace approximation, with a Newton step
for a; differentiated by the implicit rule of the whole fixed point. O((NC)³) a round.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ibaml.heads.dual import (
    DualPosterior,
    check_task,
    laplace,
    safe_length,
    spread_by,
    tolerance,
)
from ibaml.heads.inverse import DenseInverse
from ibaml.heads.points import gaussian_points, place
from ibaml.heads.prior import HeadPrior
from ibaml.linalg import Reason


def variational(
    prior: HeadPrior,
    features: Tensor,
    labels: Tensor,
    classes: int,
    beta: Tensor | float = 1.0,
    rounds: int = 100,
    tol: float | None = None,
    points: int = 512,
) -> DualPosterior:
    """The Gaussian with the least Σ_n E_q nll + β·KL, for every task.

    Arguments as for `ibaml.heads.dual.laplace`; ``rounds`` at most, and ``points`` for the
    expectations. ``residual`` is the most that a number of (a, Λ), all between −1 and 1, moved in
    the last round.
    """
    check_task(features, labels, classes)
    start = prior.logits(features, classes)
    gram = prior.gram(features, features) / beta
    target = torch.nn.functional.one_hot(labels.long(), classes).to(features.dtype)
    fixed = gaussian_points(points, classes, features.dtype, features.device)
    limit = tolerance(tol, features.dtype)

    def again(state: Tensor, start: Tensor, gram: Tensor, beta: Tensor | float) -> Tensor:
        return _pack(*_round(*_unpack(state, target), start, gram, target, fixed, beta))

    with torch.no_grad():
        first = laplace(prior, features, labels, classes, beta)
        probabilities = (start + spread_by(gram, first.dual)).softmax(-1)
        curvature = torch.diag_embed(probabilities) - _outer(probabilities[..., None, :])
        solution = repeat(
            lambda state: again(state, start, gram, beta),
            _pack(first.dual, curvature),
            rounds,
            limit,
        )
    out = again(solution.value, start, gram, beta)
    if out.requires_grad:
        held = beta.detach() if torch.is_tensor(beta) else beta
        inside = solution.value.detach().requires_grad_()
        with torch.enable_grad():
            outside = again(inside, start.detach(), gram.detach(), held)
        out.register_hook(lambda grad: _adjoint(outside, inside, grad, rounds, limit))
    dual, curvature = _unpack(out, target)
    inverse = DenseInverse.at(gram, curvature)
    return DualPosterior(
        prior,
        features,
        dual,
        inverse,
        beta,
        solution.steps,
        solution.residual,
        solution.reason,
    )


def _round(
    dual: Tensor,
    curvature: Tensor,
    start: Tensor,
    gram: Tensor,
    target: Tensor,
    points: Tensor,
    beta: Tensor | float,
) -> tuple[Tensor, Tensor]:
    """(a, Λ) once more. ∂a′/∂a = 0 at the solution, as Λ is the derivative of E π in the mean."""
    inverse = DenseInverse.at(gram, curvature)
    own = torch.diag_embed(gram.diagonal(dim1=-2, dim2=-1).expand(-1, target.shape[-1], -1).mT)
    covariance = beta * (own - inverse.quadratic(gram))
    probabilities = place(start + spread_by(gram, dual), covariance, points).softmax(-1)
    mean = probabilities.mean(-2)
    rest = dual + mean - target
    change = inverse.times(spread_by(gram, rest)) - rest
    length = safe_length(spread_by(gram, change).detach())
    dual = dual + length[:, None, None] * change
    return dual, torch.diag_embed(mean) - _outer(probabilities)


def _outer(probabilities: Tensor) -> Tensor:
    """Mean over points of ππᵀ, (…, C, C), for (…, S, C)."""
    return probabilities.mT @ probabilities / probabilities.shape[-2]


@dataclass(frozen=True)
class Repeated:
    """A fixed point, per task: value (T, n), rounds taken, the last change, why it stopped."""

    value: Tensor
    steps: Tensor
    residual: Tensor
    reason: Tensor


def repeat(again: Callable[[Tensor], Tensor], state: Tensor, rounds: int, tol: float) -> Repeated:
    """A solution of state = again(state), to ``tol`` in every number; who is done or ill rests.

    Each round goes part of the way, per task: less after a change that grew, more after others.
    """
    part = torch.full_like(state[:, 0], 0.7)
    taken = torch.zeros(len(state), dtype=torch.long, device=state.device)
    residual = torch.full_like(state[:, 0], torch.inf)
    reason = torch.full_like(taken, int(Reason.STEPS))
    for _ in range(rounds):
        active = reason == Reason.STEPS
        after = again(state)
        size = (after - state).abs().amax(-1)
        fine = active & size.isfinite()
        part = torch.where(size > residual, 0.7 * part, 1.05 * part).clamp(0.1, 1)
        state = torch.where(fine[:, None], state + part[:, None] * (after - state), state)
        taken = taken + fine
        residual = torch.where(fine, size, residual)
        reason = torch.where(fine & (size <= tol), int(Reason.CONVERGED), reason)
        reason = torch.where(active & ~fine, int(Reason.NONFINITE), reason)
        if reason.device.type == "cpu" and bool((reason != Reason.STEPS).all()):
            break
    return Repeated(state, taken, residual, reason)


def _adjoint(outside: Tensor, inside: Tensor, grad: Tensor, rounds: int, tol: float) -> Tensor:
    """(I − Jᵀ)⁻¹·grad for J = ∂outside/∂inside: it converges as fast as the rounds did."""

    def again(adjoint: Tensor) -> Tensor:
        (back,) = torch.autograd.grad(outside, inside, adjoint, retain_graph=True)
        return grad + back

    scale = grad.abs().amax(-1, keepdim=True).clamp_min(torch.finfo(grad.dtype).tiny)
    return repeat(lambda a: again(a * scale) / scale, grad / scale, rounds, tol).value * scale


def _pack(dual: Tensor, curvature: Tensor) -> Tensor:
    return torch.cat([dual.flatten(1), curvature.flatten(1)], 1)


def _unpack(state: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
    tasks, examples, classes = like.shape
    dual, curvature = state.split([examples * classes, examples * classes**2], 1)
    return dual.reshape(like.shape), curvature.reshape(tasks, examples, classes, classes)
