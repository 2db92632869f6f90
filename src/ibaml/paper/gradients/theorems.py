"""What do Theorems 1 and 2 promise, given the constants of their assumptions?

In the paper's coordinates, v_t = (m_t, d_t) and θ = (m, d), with its summed loss (κ = 1). With
M = max{D_max, 2D_max²} and W = max{1/D_min, 1/(2D_min²)} the proofs (A.2, A.3) give

    explicit   ‖g − g*‖ ≤ F·ε + A·δ         F  = B·J + C + A·J²·F_Δ,  J = (1 + ρ)·W/σ
    implicit   ‖ĝ − g*‖ ≤ F·ε + G′·δ′       G′ = (1 + ρ)·W
    F_Δ = D²M + E·M·(1 + ρ) + D·(1 + 2Mρ)² + 4DM·(1 + 2Mρ)·(1 + ρ).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields


@dataclass(frozen=True)
class Constants:
    """The constants of Assumptions 2–5 and ρ_t, by the paper's letters.

    Attributes:
        a, b, c: the meta-loss is A-Lipschitz and B-smooth in v, its ∇₂ C-Lipschitz.
        d, e: the expected nll is D-smooth with an E-Lipschitz Hessian.
        sigma: the smallest singular value of H at v̂ and at the optimum.
        rho: ρ_t, the largest entry of the nll's gradient at v̂ and at the optimum; Remark 3 puts a
            Lipschitz constant of the nll in its place.
        d_min, d_max: the prior variances' range.
    """

    a: float
    b: float
    c: float
    d: float
    e: float
    sigma: float
    rho: float
    d_min: float
    d_max: float

    @property
    def weight(self) -> float:
        """G′: how much an error of the linear solve can count; a bound on ‖G‖."""
        return (1 + self.rho) * max(1 / self.d_min, 1 / (2 * self.d_min**2))

    @property
    def factor(self) -> float:
        """F = F′: how much an error of adaptation can count."""
        m = max(self.d_max, 2 * self.d_max**2)
        steep, grown = 1 + self.rho, 1 + 2 * m * self.rho
        spread = self.d**2 * m + self.e * m * steep + self.d * grown**2
        spread += 4 * self.d * m * grown * steep
        jacobian = self.weight / self.sigma
        return self.b * jacobian + self.c + self.a * jacobian**2 * spread

    def explicit(self, eps: float, delta: float) -> float:
        """Theorem 1."""
        return self.factor * eps + self.a * delta

    def implicit(self, eps: float, delta: float) -> float:
        """Theorem 2."""
        return self.factor * eps + self.weight * delta


def task_constants(constants: Iterable[Constants]) -> Constants:
    """Remark 3: constants of the task, that hold wherever adaptation was."""
    every = list(constants)
    worst = {f.name: max(getattr(c, f.name) for c in every) for f in fields(Constants)}
    least = {name: min(getattr(c, name) for c in every) for name in ("sigma", "d_min")}
    return Constants(**{**worst, **least})
