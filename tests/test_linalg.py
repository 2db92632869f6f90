"""Linear solvers: against SciPy, closed forms, and every defect we have seen in other people's."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse.linalg
import torch
from hypothesis import given
from hypothesis import strategies as st

from ibaml.linalg import ConjugateGradient, Dense, Neumann, Reason, dense_matrix

F64 = torch.float64


def spd(n: int, condition: float, seed: int) -> torch.Tensor:
    """A random symmetric positive definite matrix with this condition number."""
    rng = torch.Generator().manual_seed(seed)
    q, _ = torch.linalg.qr(torch.randn(n, n, generator=rng, dtype=F64))
    values = (
        torch.logspace(0, np.log10(condition), n, dtype=F64) if n > 1 else torch.ones(1).to(F64)
    )
    return q @ torch.diag(values) @ q.T


def times(a: torch.Tensor):
    return lambda u: (a @ u[..., None])[..., 0]


def vector(n: int, seed: int) -> torch.Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed), dtype=F64)


@given(st.integers(20, 60), st.floats(1, 1e3), st.integers(0, 10**6), st.booleans())
def test_iterates_are_scipys(n, condition, seed, precondition):
    a, b = spd(n, condition, seed), vector(n, seed + 1)
    diagonal = 0.5 + torch.rand(n, generator=torch.Generator().manual_seed(seed), dtype=F64)
    theirs: list[np.ndarray] = []
    scipy.sparse.linalg.cg(
        a.numpy(),
        b.numpy(),
        rtol=0,
        maxiter=10,
        M=np.diag(1 / diagonal.numpy()) if precondition else None,
        callback=lambda x: theirs.append(x.copy()),
    )
    for k, x in enumerate(theirs, start=1):
        ours = ConjugateGradient(steps=k, precondition=precondition)(
            times(a), b, lambda r: r / diagonal
        ).value
        assert np.linalg.norm(ours.numpy() - x) <= 1e-10 * np.linalg.norm(x)
    assert len(theirs) == 10


@given(st.integers(1, 10), st.floats(1, 100), st.integers(0, 10**6))
def test_exact_after_n_steps(n, condition, seed):
    a, b = spd(n, condition, seed), vector(n, seed + 1)
    solution = ConjugateGradient(steps=n)(times(a), b)
    # CG's own rounding: SciPy is as far from exact on the same systems
    assert torch.linalg.vector_norm(a @ solution.value - b) <= 1e-6 * b.norm()
    assert float(solution.residual) <= 1e-6


@pytest.mark.parametrize("solver", [ConjugateGradient(steps=5), Dense(), Neumann(steps=200)])
def test_scalar_and_zero_right_hand_sides(solver):
    """Peer defect: a scalar right-hand side that gives zero."""
    scalar = solver(lambda u: 4 * u, torch.tensor(2.0, dtype=F64))
    assert scalar.value.shape == ()
    assert float(scalar.value) == pytest.approx(0.5, abs=1e-10)
    zero = solver(times(spd(4, 10, 0)), torch.zeros(4, dtype=F64))
    assert torch.equal(zero.value, torch.zeros(4, dtype=F64))
    assert float(zero.residual) == 0
    batch = solver(times(spd(4, 10, 0)), torch.zeros(3, 4, dtype=F64))
    assert batch.value.isfinite().all()
    assert batch.reason.shape == (3,)


def test_convergence_returns_the_last_iterate_not_the_one_before():
    """Peer defect: a CG that returns the previous iterate on convergence."""
    a, b = spd(6, 50, 3), vector(6, 4)
    exact = torch.linalg.solve(a, b)
    solution = ConjugateGradient(steps=100, tol=1e-10)(times(a), b)
    assert int(solution.reason) == Reason.CONVERGED
    assert int(solution.steps) <= 8
    assert (a @ solution.value - b).norm() <= 1e-10 * b.norm()
    before = ConjugateGradient(steps=int(solution.steps) - 1)(times(a), b).value
    assert (solution.value - exact).norm() < 0.1 * (before - exact).norm()


def test_direction_update_uses_the_new_residual():
    """Peer defect: a direction update with the old residual diverges; directions must conjugate."""
    a, b = spd(30, 1e3, 5), vector(30, 6)
    seen: list[torch.Tensor] = []

    def product(p: torch.Tensor) -> torch.Tensor:
        seen.append(p)
        return times(a)(p)

    ConjugateGradient(steps=6)(product, b)
    p = torch.stack(seen)
    gram = p @ a @ p.T
    scale = gram.diagonal().sqrt()
    assert ((gram / scale / scale[:, None]) - torch.eye(6, dtype=F64)).abs().max() <= 1e-10


@given(st.floats(-6, 6))
def test_scale_of_the_system_does_not_matter(exponent):
    """Peer defect: a CG that is right only for a step scale of 1."""
    a, b = spd(8, 100, 7), vector(8, 8)
    scale = 10.0**exponent
    plain = ConjugateGradient(steps=4)(times(a), b).value
    scaled = ConjugateGradient(steps=4)(times(scale * a), b).value
    assert torch.allclose(scaled * scale, plain, rtol=1e-9)


def test_ill_conditioned_with_the_priors_preconditioner():
    """A task's H: the prior's diagonal over many orders of magnitude, plus a small full matrix."""
    n = 60
    diagonal = torch.logspace(-6, 6, n, dtype=F64)
    a = torch.diag(diagonal) + 1e-6 * spd(n, 100, 9)
    b = vector(n, 10)
    plain = ConjugateGradient(steps=15, precondition=False)(times(a), b, lambda r: r / diagonal)
    with_prior = ConjugateGradient(steps=15)(times(a), b, lambda r: r / diagonal)
    exact = torch.linalg.solve(a, b)
    assert (with_prior.value - exact).norm() <= 1e-6 * exact.norm()
    assert (plain.value - exact).norm() > 0.1 * exact.norm()


def test_warm_start_from_the_diagonal():
    a = torch.diag(torch.tensor([2.0, 5.0], dtype=F64))
    b = torch.tensor([1.0, 1.0], dtype=F64)
    solution = ConjugateGradient(steps=0, start="preconditioned")(
        times(a), b, lambda r: r / a.diagonal()
    )
    assert torch.allclose(solution.value, b / a.diagonal())
    assert int(solution.reason) == Reason.CONVERGED


def test_a_warm_start_from_what_is_not_finite_is_zero():
    b = torch.tensor([[1.0, float("nan")], [1.0, 1.0]], dtype=F64)
    solution = ConjugateGradient(steps=3, start="preconditioned")(
        lambda u: 2 * u, b, lambda r: r / 2
    )
    assert torch.equal(solution.value[0], torch.zeros(2, dtype=F64))
    assert torch.allclose(solution.value[1], torch.full((2,), 0.5, dtype=F64))


def test_indefinite_operator_stops_at_the_iterate_before():
    a = torch.diag(torch.tensor([1.0, 2.0, -3.0], dtype=F64))
    b = torch.tensor([1.0, 1.0, 0.5], dtype=F64)
    solution = ConjugateGradient(steps=10)(times(a), b)
    assert int(solution.reason) == Reason.NEGATIVE_CURVATURE
    k = int(solution.steps)
    assert torch.equal(solution.value, ConjugateGradient(steps=k)(times(a), b).value)
    dense = Dense()(times(a), b)
    assert int(dense.reason) == Reason.NEGATIVE_CURVATURE
    assert torch.allclose(dense.value, b / a.diagonal())


@given(st.integers(1, 12), st.floats(-3, 3), st.integers(0, 10**6), st.booleans())
def test_a_system_that_is_not_trusted_is_given_up(n, lowest, seed, precondition):
    """Its value is the preconditioner's alone; one whose directions are all trusted is solved as
    ever."""
    rng = torch.Generator().manual_seed(seed)
    m = 0.5 + torch.rand(n, generator=rng, dtype=F64)
    q = torch.linalg.qr(torch.randn(n, n, generator=rng, dtype=F64)).Q
    values = torch.cat([torch.tensor([lowest], dtype=F64), torch.linspace(1, 4, n, dtype=F64)[1:]])
    a = m.sqrt()[:, None] * (q @ torch.diag(values) @ q.T) * m.sqrt()  # in the metric of M
    b = vector(n, seed + 1)
    inverse = (lambda r: r / m) if precondition else None
    solver = ConjugateGradient(steps=4 * n, tol=1e-9, trust=0.5)
    if not precondition:
        a = q @ torch.diag(values) @ q.T
    solution = solver(times(a), b, inverse)
    alone = b / m if precondition else b
    if lowest < -0.01:
        assert solution.reason == Reason.NEGATIVE_CURVATURE
    if solution.reason in (Reason.NEGATIVE_CURVATURE, Reason.SINGULAR):
        assert lowest < 0.5
        assert torch.equal(solution.value, alone)
    else:
        assert lowest >= 0
        assert torch.allclose(a @ solution.value, b, atol=1e-7 * float(b.norm()))
    if lowest >= 0.5 + 1e-6:
        assert solution.reason == Reason.CONVERGED


def test_without_trust_every_positive_direction_counts():
    a = torch.diag(torch.tensor([0.1, 1.0], dtype=F64))
    b = torch.tensor([1.0, 0.0], dtype=F64)
    assert torch.allclose(ConjugateGradient(steps=2)(times(a), b).value, 10 * b)
    assert torch.equal(ConjugateGradient(steps=2, trust=0.5)(times(a), b).value, b)


@pytest.mark.parametrize("solver", [ConjugateGradient(steps=20), Dense(), Neumann(steps=2000)])
def test_one_bad_system_harms_no_other(solver):
    """A batch of five: sound, singular, indefinite, not finite, sound."""
    good = spd(4, 10, 11)
    singular = torch.diag(torch.tensor([1.0, 2.0, 3.0, 0.0], dtype=F64))
    indefinite = torch.diag(torch.tensor([1.0, 1.0, 1.0, -1.0], dtype=F64))
    broken = torch.full((4, 4), float("nan"), dtype=F64)
    a = torch.stack([good, singular, indefinite, broken, good])
    b = torch.ones(5, 4, dtype=F64)
    solution = solver(times(a), b)
    exact = torch.linalg.solve(good, b[0])
    for t in (0, 4):
        assert (solution.value[t] - exact).norm() <= 1e-8 * exact.norm()
    assert solution.value.isfinite().all()
    assert int(solution.reason[3]) == Reason.NONFINITE
    if not isinstance(solver, Neumann):
        assert int(solution.reason[1]) == Reason.SINGULAR
    assert int(solution.reason[2]) == Reason.NEGATIVE_CURVATURE
    alone = solver(times(good), b[0])
    assert torch.allclose(alone.value, solution.value[0], rtol=1e-12)


def test_dense_gives_the_minimum_norm_solution_of_a_singular_system():
    a = torch.diag(torch.tensor([2.0, 0.0], dtype=F64))
    solution = Dense()(times(a), torch.tensor([4.0, 0.0], dtype=F64))
    assert int(solution.reason) == Reason.SINGULAR
    assert torch.allclose(solution.value, torch.tensor([2.0, 0.0], dtype=F64))


def test_true_residual_is_recomputed():
    """After thousands of steps the recurrence drifts; the report must not."""
    a, b = spd(50, 1e10, 12), vector(50, 13)
    solution = ConjugateGradient(steps=2000, tol=1e-12, refresh=20)(times(a), b)
    true = float((b - a @ solution.value).norm() / b.norm())
    assert float(solution.residual) == pytest.approx(true, rel=0.5, abs=1e-12)


@given(st.integers(1, 6), st.integers(1, 5), st.integers(0, 10**6))
def test_systems_of_a_batch_are_independent(n, tasks, seed):
    a = torch.stack([spd(n, 30, seed + t) for t in range(tasks)])
    b = torch.stack([vector(n, seed + 50 + t) for t in range(tasks)])
    together = ConjugateGradient(steps=3)(times(a), b)
    for t in range(tasks):
        alone = ConjugateGradient(steps=3)(times(a[t]), b[t])
        assert torch.allclose(together.value[t], alone.value, rtol=1e-10, atol=1e-14)
        assert int(together.reason[t]) == int(alone.reason)


@given(st.integers(2, 8), st.integers(0, 10**6))
def test_neumann_series_converges_to_the_solution(n, seed):
    a, b = spd(n, 20, seed), vector(n, seed + 1)
    solution = Neumann(steps=1000)(times(a), b)
    assert (a @ solution.value - b).norm() <= 1e-6 * b.norm()
    first = Neumann(steps=0, scale=0.3)(times(a), b)
    assert torch.allclose(first.value, 0.3 * b)


def test_dense_matrix_is_the_matrix():
    a = torch.stack([spd(3, 5, 1), spd(3, 5, 2)])
    assert torch.allclose(dense_matrix(times(a), torch.zeros(2, 3, dtype=F64)), a)


def test_float32_works():
    a, b = spd(10, 10, 1).float(), vector(10, 2).float()
    solution = ConjugateGradient(steps=50, tol=1e-5)(times(a), b)
    assert solution.value.dtype == torch.float32
    assert float(solution.residual) <= 1e-5


@pytest.mark.parametrize(
    ("build", "word"),
    [
        (lambda: ConjugateGradient(steps=-1), "steps"),
        (lambda: ConjugateGradient(tol=-1.0), "tol"),
        (lambda: ConjugateGradient(start="warm"), "start"),
        (lambda: Neumann(scale=0.0), "scale"),
        (lambda: Neumann(steps=-2), "steps"),
    ],
)
def test_wrong_options_are_refused(build, word):
    with pytest.raises(ValueError, match=word):
        build()
