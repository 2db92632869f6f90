"""Which H does the implicit rule invert, and which mixed derivative G belongs to it?

All three are  H = C + (1 + μ)·P  with C a curvature of the loss, P the Hessian of the prior's
penalty and μ the damping:

    energy   C the Hessian of the loss: H is the Hessian of E, nothing substituted
    ggn      C the generalized Gauss–Newton matrix JᵀΛJ, positive semi-definite for a convex loss
    lemma    the paper's Lemma 1, in (m, d), where stationarity was substituted into H and G
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, Protocol, cast

import torch
from torch import Tensor

from ibaml.arguments import check_number, check_word
from ibaml.energy import Energy, TaskEnergy, detached
from ibaml.weights import DiagonalPrecision, Precision, Preconditioner
from ibaml.words import CURVATURES, CurvatureKind

Kind = CurvatureKind
Block = Literal["all", "mean"]
KINDS = CURVATURES
BLOCKS: tuple[Block, ...] = ("all", "mean")


@dataclass(frozen=True)
class Curvature:
    """The choice of H.

    Args:
        kind: ``"energy"``, ``"ggn"`` or ``"lemma"``.
        damping: μ ≥ 0, relative to the prior's precision P. It enters both factors of the prior's
            gradient, so that μ → ∞ is the first-order rule in the mean. For an energy without a
            prior (`implicit_solve`) it is absolute: H + μI.
        block: ``"mean"`` applies C to the means alone; the rest of H is then P.
    """

    kind: Kind = "ggn"
    damping: float = 0.0
    block: Block = "all"

    def __post_init__(self) -> None:
        check_word("curvature", self.kind, KINDS)
        check_number("damping", self.damping, least=0)
        check_word("block", self.block, BLOCKS)

    def at(self, energy: Energy, v: Tensor, wanted: Sequence[int] = ()) -> Linearization:
        """Linearize ∇E at v.

        Args:
            wanted: positions in ``energy.theta`` that `Linearization.pull_back` will be asked for.
        """
        return {"energy": _Hessian, "ggn": _GaussNewton, "lemma": _Lemma}[self.kind](
            self, energy, v, wanted
        )


class Linearization(Protocol):
    """H at a point: products, a preconditioner, and gradients in θ."""

    loss_gradient: Tensor  # (T, dim), in the coordinates of v

    @property
    def diagonal(self) -> Tensor | None:
        """The diagonal of the prior's part of H; None if that part is not a diagonal matrix."""

    @property
    def precondition(self) -> Preconditioner | None:
        """The inverse of the prior's part of H, or an approximation."""

    def product(self, p: Tensor) -> Tensor:
        """H p, per task."""

    def to_coordinates(self, b: Tensor) -> Tensor:
        """A gradient in v, converted to the coordinates of H."""

    def pull_back(self, u: Tensor) -> list[Tensor | None]:
        """−(∂²E/∂v∂θ)ᵀu for the wanted tensors of θ; None where E does not depend on one."""


def vector_product(outputs: Tensor, inputs: Tensor, vector: Tensor) -> Tensor:
    """vectorᵀ ∂outputs/∂inputs, zero where there is no dependence; the graph is kept."""
    if not outputs.requires_grad:
        return torch.zeros_like(inputs)
    (product,) = torch.autograd.grad(outputs, inputs, vector, retain_graph=True, allow_unused=True)
    return torch.zeros_like(inputs) if product is None else product


class _Hessian:
    """∇²loss + (1 + μ)P; one graph of ∇loss serves all products and the mixed derivative."""

    def __init__(self, choice: Curvature, energy: Energy, v: Tensor, wanted: Sequence[int]) -> None:
        self.choice = choice
        self.wanted = tuple(wanted)
        theta = [t.detach() for t in energy.theta]
        self.leaves = {i: theta[i].clone().requires_grad_() for i in wanted}
        # an energy without a graph is used as it is, so that its cached features are reused
        graph_free = not wanted and not any(t.requires_grad for t in energy.theta)
        bound = tuple(self.leaves.get(i, t) for i, t in enumerate(theta))
        self.energy = energy if graph_free else energy.bind(bound)
        with torch.enable_grad():
            self.v = v.detach().clone().requires_grad_()
            self._build()
        precision = self._precision(v.detach())
        self.damped = None if precision is None else precision.times(1 + choice.damping)
        self.mask: Tensor | None = None
        if choice.block == "mean" and isinstance(energy, TaskEnergy):
            self.mask = torch.zeros_like(v[:1])
            energy.part(self.mask, "mean").fill_(1)

    def _build(self) -> None:
        self._differentiate(self.energy.loss(self.v))

    def _differentiate(self, loss: Tensor) -> None:
        (self.gradient,) = torch.autograd.grad(loss.sum(), self.v, create_graph=True)
        self.loss_gradient = self.gradient.detach()

    def _precision(self, v: Tensor) -> Precision | None:
        return self.energy.precision(v)

    @property
    def diagonal(self) -> Tensor | None:
        return None if self.damped is None else self.damped.diagonal

    @property
    def precondition(self) -> Preconditioner | None:
        return None if self.damped is None else self.damped.precondition

    def curvature(self, p: Tensor) -> Tensor:
        return vector_product(self.gradient, self.v, p)

    def product(self, p: Tensor) -> Tensor:
        if self.mask is not None:
            c = self.curvature(p * self.mask) * self.mask
        else:
            c = self.curvature(p)
        return c + (self.choice.damping * p if self.damped is None else self.damped.product(p))

    def to_coordinates(self, b: Tensor) -> Tensor:
        return b

    def pull_back(self, u: Tensor) -> list[Tensor | None]:
        """The loss's part by the graph of its gradient, the penalty's part from the energy."""
        in_loss = [i for i in self.wanted if i not in self.energy.penalized]
        gradients: dict[int, Tensor | None] = {}
        if in_loss and self.gradient.requires_grad:
            leaves = [self.leaves[i] for i in in_loss]
            products = torch.autograd.grad(
                self.gradient, leaves, -u, retain_graph=True, allow_unused=True
            )
            gradients = dict(zip(in_loss, products, strict=True))
        scale = 1 + self.choice.damping
        for i, g in self._penalty_gradient(u).items():
            loss_part = gradients.get(i)
            gradients[i] = scale * g if loss_part is None else loss_part + scale * g
        return [gradients.get(i) for i in self.wanted]

    def _penalty_gradient(self, u: Tensor) -> dict[int, Tensor]:
        return self.energy.penalty_gradient(self.v.detach(), u, self.wanted)


class _GaussNewton(_Hessian):
    """JᵀΛJ + (1 + μ)P, with J the Jacobian of the outputs and Λ the loss's Hessian in them."""

    def _build(self) -> None:
        if not isinstance(self.energy, TaskEnergy):
            raise ValueError(
                'curvature "ggn" needs an energy that is a loss of outputs; for a plain function '
                'use curvature="energy"'
            )
        outputs = self.energy.outputs(self.v)
        self.outputs = outputs
        if set(self.wanted) - self.energy.penalized:
            # the mixed derivative is exact, so it needs the gradient's own graph
            self._differentiate(self.energy.output_loss(outputs))
        # Jᵀw is linear in w, so its derivative in w is the product J p
        self.cotangent = torch.zeros_like(outputs, requires_grad=True)
        (self.transposed,) = torch.autograd.grad(outputs, self.v, self.cotangent, create_graph=True)
        self.point = outputs.detach().requires_grad_()
        (self.output_gradient,) = torch.autograd.grad(
            detached(self.energy).output_loss(self.point).sum(), self.point, create_graph=True
        )

    @cached_property
    def loss_gradient(self) -> Tensor:  # type: ignore[override]
        """Computed only when asked for: no product needs it."""
        return vector_product(self.outputs, self.v, self.output_gradient.detach())

    def curvature(self, p: Tensor) -> Tensor:
        output_change = vector_product(self.transposed, self.cotangent, p)
        output_cotangent = vector_product(self.output_gradient, self.point, output_change)
        return vector_product(self.outputs, self.v, output_cotangent)


class _Lemma(_Hessian):
    """Lemma 1: H = ∇²ℓ + κ·diag(1/d, ½(1/d + 2∇_d ℓ/κ)²) in (m, d), and its own G."""

    def _build(self) -> None:
        energy = self.energy
        if not (isinstance(energy, TaskEnergy) and energy.belief.is_diagonal_gaussian):
            raise ValueError('curvature "lemma" needs a diagonal Gaussian belief; use "energy"')
        m, rho = self.v.detach().chunk(2, -1)
        self.log_var = rho
        self.v = torch.cat([m, rho.exp()], -1).requires_grad_()  # (m_t, d_t)
        mean, var = self.v.chunk(2, -1)
        self._differentiate(energy.loss(torch.cat([mean, var.log()], -1)))
        grad_m, grad_d = self.loss_gradient.chunk(2, -1)
        self.mean_gradient, self.var_gradient = grad_m, grad_d
        self.loss_gradient = torch.cat([grad_m, grad_d * rho.exp()], -1)
        self.kappa = detached(energy).kappa

    def _precision(self, v: Tensor) -> Precision:
        prior = cast(TaskEnergy, self.energy).meta.prior
        tau = (-prior[1].detach()).exp().expand_as(self.log_var)
        solved = tau + 2 * self.var_gradient / self.kappa  # 1/d_t at a stationary point
        return DiagonalPrecision(self.kappa * torch.cat([tau, solved.square() / 2], -1))

    def to_coordinates(self, b: Tensor) -> Tensor:
        b_m, b_rho = b.chunk(2, -1)
        return torch.cat([b_m, b_rho * (-self.log_var).exp()], -1)

    def _penalty_gradient(self, u: Tensor) -> dict[int, Tensor]:
        energy = cast(TaskEnergy, self.energy)
        rho = energy.meta.prior[1].detach()
        u_m, u_d = u.chunk(2, -1)
        tau = (-rho).exp()
        g_m = self.kappa * tau * u_m
        g_rho = -self.mean_gradient * u_m + self.kappa * tau * u_d / 2  # g_ρ = d·g_d
        # the lemma substitutes in m and ρ alone; the rest (a learned β) is done in (m, ρ)
        v = torch.cat([self.v.detach().chunk(2, -1)[0], self.log_var], -1)
        rest = [i for i in self.wanted if i > 1]
        others = energy.penalty_gradient(v, self.to_coordinates(u), rest)
        return {0: g_m.sum(0), 1: g_rho.sum(0)} | others
