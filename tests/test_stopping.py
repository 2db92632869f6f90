"""The implicit rule that knows that descent was stopped early: how near it is to the steps' own
derivative, its limits, and its gradient against dense matrices."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_flatten

import ibaml
from ibaml import (
    Adam,
    ConjugateGradient,
    Curvature,
    Dense,
    DiagonalGaussian,
    FirstOrder,
    GradientDescent,
    Implicit,
    LowRankGaussian,
    MetaLearner,
    NaturalDescent,
    NewtonCG,
    Point,
    Reason,
    Record,
    Unrolled,
    implicit_solve,
)
from ibaml.energy import PlainEnergy, Structure
from ibaml.fields import SettingsError
from ibaml.training import resolve, train
from ibaml.training.settings import read_toml
from live_bytes import peak_bytes
from oracles import F64, converged, dense_gradients, gradients, relative, seed
from problems import class_batch, linear_model, mlp_model, plain_learner, regression_batch
from runs import features_file

# --- how near: quadratic energies ----------------------------------------------------------------


def bound(s):
    """The bound of 1/(1+s) − (1−s/K)^K for −1 < s ≤ K, for every K ≥ 1: s²/(1+s), and no more than
    1/(1+s) where s ≥ 0."""
    return torch.minimum(s.square(), torch.where(s > 0, 1.0, s.square())) / (1 + s)


@pytest.mark.parametrize("steps", [1, 2, 3, 5, 15, 50, 1000, 10_000])
def test_the_filter_is_within_its_bound(steps):
    """What replaces (1 − αh)ᴷ is never below it, and above it by no more than the bound: at
    negative curvature too, as long as αKh > −1."""
    s = torch.cat(
        [-torch.logspace(-8, -0.001, 200, dtype=F64), torch.logspace(-8, 4, 2000, dtype=F64)]
    )
    s = s[s <= steps]
    power = (1 - s / steps) ** steps
    error = 1 / (1 + s) - power
    rounding = 1e-11 * (1 + 1 / (1 + s))
    assert (error >= -rounding).all()
    assert (error <= bound(s) + rounding).all()
    positive = s >= 0
    if steps >= 1000:
        assert error[positive].max() < 0.2045
    # never worse than first order; better than the implicit rule until s = 0.7 (K = 1) or 1.7
    assert (error[positive] <= (1 - power + rounding)[positive]).all()
    early = (s > 0) & (s < (1.67 if steps >= 1000 else 0.7))
    assert (error[early] <= power[early] + 1e-12).all()


def quadratic(n: int = 6, sizes: int = 4):
    """E(v; m, c) = ½vᵀCv − cᵀv + ½(v − m)ᵀP(v − m), eigenvalues of H = C + P over ``sizes`` orders
    of magnitude, the largest 1; C and P do not commute."""
    rng = torch.Generator().manual_seed(0)
    basis = torch.linalg.qr(torch.randn(n, n, generator=rng, dtype=F64)).Q
    h = basis @ torch.diag(torch.logspace(-sizes, 0, n, dtype=F64)) @ basis.mT
    root = torch.linalg.cholesky(h)
    p = root @ torch.diag(torch.rand(n, generator=rng, dtype=F64)) @ root.mT
    m, c, b = (torch.randn(n, generator=rng, dtype=F64) for _ in range(3))
    return h - p, p, h, m.requires_grad_(), c.requires_grad_(), b


def pulled(steps, lr, stopping, solver=GradientDescent, linear_solver=None):
    """The gradients of ⟨b, v̂⟩ in m (the start and the prior's mean) and in c."""
    curvature, p, _, m, c, b = quadratic()

    def energy(v, params):
        m, c = params
        return v @ curvature @ v / 2 - c @ v + (v - m) @ p @ (v - m) / 2

    v = implicit_solve(
        energy, m, (m, c), solver=solver(steps, lr), stopping=stopping,
        linear_solver=linear_solver or Dense(),
    )  # fmt: skip
    return torch.autograd.grad(b @ v, (m, c), allow_unused=True)


@pytest.mark.parametrize("steps", [1, 2, 5, 15, 50, 500, 10_000])
@pytest.mark.parametrize("lr", [0.03, 0.9])
def test_the_gradient_is_that_of_the_steps_up_to_the_bound(steps, lr):
    """(I − αH)ᴷ with respect to the start, (I − (I − αH)ᴷ)H⁻¹P to the prior's mean."""
    curvature, p, h, _, _, b = quadratic()
    eye = torch.eye(len(b), dtype=F64)
    power = torch.linalg.matrix_power(eye - lr * h, steps)
    steps_m = power @ b + p @ torch.linalg.solve(h, (eye - power) @ b)
    steps_c = torch.linalg.solve(h, (eye - power) @ b)
    g_m, g_c = pulled(steps, lr, "auto")
    s = lr * steps * torch.linalg.eigvalsh(h)
    largest = bound(s).max() * b.norm()
    share = torch.linalg.matrix_norm(torch.linalg.solve(h, curvature).mT, 2)
    assert (g_m - steps_m).norm() <= share * largest
    # for c the error is divided by h: at most αK where s is small
    assert (g_c - steps_c).norm() <= (bound(s) / torch.linalg.eigvalsh(h)).max() * b.norm()
    # both errors are CH⁻¹ times a function of H; that of first order is nowhere smaller
    ours, theirs = (h @ torch.linalg.solve(curvature, g - steps_m) for g in (g_m, b))
    basis = torch.linalg.eigh(h).eigenvectors
    assert ((basis.mT @ ours).abs() <= (basis.mT @ theirs).abs() + 1e-8).all()


def test_the_oracle_of_that_test_is_the_unrolled_derivative():
    curvature, p, h, m, c, b = quadratic()
    v = m
    for _ in range(7):
        v = v - 0.3 * (curvature @ v - c + p @ (v - m))
    actual = torch.autograd.grad(b @ v, m)[0]
    power = torch.linalg.matrix_power(torch.eye(len(b), dtype=F64) - 0.3 * h, 7)
    expected = power @ b + p @ torch.linalg.solve(h, b - power @ b)
    assert relative(actual, expected) <= 1e-12


def test_limits():
    """K = 0 is first order, δ → ∞ too; K → ∞ and δ → 0 are the implicit rule."""
    *_, b = quadratic()
    g_m, g_c = pulled(0, 0.5, "auto")
    assert torch.equal(g_m, b)
    assert g_c is None
    g_m, g_c = pulled(3, 0.5, 1e12)
    assert relative(g_m, b) <= 1e-11
    assert g_c.norm() <= 1e-11
    exact = pulled(100_000, 0.5, None, GradientDescentWithoutSteps)
    for small in (1e-14, "auto"):
        near = pulled(10**17, 0.5, small, GradientDescentWithoutSteps)
        for a, e in zip(near, exact, strict=True):
            assert relative(a, e) <= 1e-9


class GradientDescentWithoutSteps(GradientDescent):
    """The solution of any number of steps, by Newton's method."""

    def solve(self, energy, start, *, rate=None, examine=True):
        solution = converged().solve(energy, start)
        steps = torch.full_like(solution.steps, self.steps)
        return replace(solution, steps=steps, reason=torch.zeros_like(solution.reason))


def test_solvers_that_converge_have_no_start():
    plain = pulled(50, None, None, lambda steps, lr: converged())
    for stopping in ("auto", 0, 0.0):
        again = pulled(50, None, stopping, lambda steps, lr: converged())
        assert all(torch.equal(a, b) for a, b in zip(again, plain, strict=True))


def test_every_coordinate_has_its_own_step_size_and_every_task_its_own_steps():
    """Two problems in two tensors with step sizes of their own: one reaches tol and counts as
    solved, the other takes all its steps."""
    h = torch.tensor([[1.0, 1.0, 1.0], [0.01, 0.02, 0.9]], dtype=F64)
    b = torch.tensor([[1.0, 2.0, 3.0], [1.0, 2.0, 3.0]], dtype=F64)

    def energy(v, c):
        x = torch.cat([v["a"], v["b"]], -1)
        return (h * x * x / 2 - c * x).sum(-1)

    for linear_solver in (Dense(), ConjugateGradient(50, tol=1e-14)):
        c = torch.zeros(2, 3, dtype=F64, requires_grad=True)
        start = torch.ones(2, 3, dtype=F64, requires_grad=True)
        record = Record()
        v = implicit_solve(
            energy, {"a": start[:, :1], "b": start[:, 1:]}, c, stopping="auto", record=record,
            solver=GradientDescent(40, {"a": 0.5, "*": 0.4}, tol=1e-6),
            linear_solver=linear_solver,
        )  # fmt: skip
        (torch.cat([v["a"], v["b"]], -1) * b).sum().backward()
        taken = record.solution.steps
        assert taken.tolist()[1] == 40
        assert taken.tolist()[0] < 40
        delta = 1 / (40 * torch.tensor([[0.5, 0.4, 0.4]], dtype=F64)) * torch.tensor([[0.0], [1.0]])
        assert relative(c.grad, b / (h + delta)) <= 1e-10
        assert relative(start.grad, delta * b / (h + delta)) <= 1e-10


def plain(function, start) -> PlainEnergy:
    """An energy that depends on nothing but v (T, dim)."""
    return PlainEnergy(
        lambda v, _: function(v), Structure.of(start, len(start)), (), tree_flatten(())[1], ()
    )


def test_whether_a_task_is_solved_does_not_depend_on_the_diagnosis():
    """The last step reaches tol, which takes one more evaluation to notice."""
    start = torch.ones(1, 2, dtype=F64)
    energy = plain(lambda v: v.square().sum(-1) / 2, start)
    for examine in (True, False):
        solution = GradientDescent(1, 1.0, tol=1e-9).solve(energy, start, examine=examine)
        assert solution.reason.tolist() == [int(Reason.CONVERGED)]


@pytest.mark.parametrize("lam", [0.1, 2.0])
def test_on_a_linear_model_it_is_nearer_than_first_order_at_every_k(lam):
    """H, C and P = λI commute, so this is the filter's inequality, through the whole learner."""
    batch = regression_batch()
    for steps in (1, 4, 20, 100):

        def mean_gradient(rule, steps=steps):
            made = plain_learner(
                "imaml", linear_model(), gradient=rule, steps=steps, lr=0.1, lam=lam
            )
            return gradients(made, batch)["m"]

        exact = mean_gradient(Unrolled())
        aware, solved = (
            mean_gradient(Implicit(Curvature("energy"), Dense(), stopping=stopping))
            for stopping in ("auto", None)
        )
        error = (aware - exact).norm()
        assert error < (mean_gradient(FirstOrder()) - exact).norm()
        if steps == 1:
            assert error < (solved - exact).norm()


# --- the learner's gradient ----------------------------------------------------------------------

BELIEFS = {
    "point": Point(lam=0.5),
    "point without a prior": Point(),
    "diagonal": DiagonalGaussian(),
    "low rank": LowRankGaussian(2),
}
CURVATURES = {
    "energy": Curvature("energy"),
    "damped": Curvature("energy", damping=0.3),
    "ggn": Curvature("ggn"),
    "mean": Curvature("energy", block="mean"),
}


def learner(belief, rule, solver=None, adapt="all", **options) -> MetaLearner:
    made = MetaLearner(
        mlp_model(), belief, solver or GradientDescent(4, 0.1), rule, adapt=adapt, samples=2,
        noise="antithetic", beta=0.5, init_log_var=-2.0, **options,
    )  # fmt: skip
    rng = torch.Generator().manual_seed(4)
    with torch.no_grad():  # a prior of different scales
        for name, group in made.named_children():
            if isinstance(group, nn.ParameterDict) and name != "tied_mean":
                for p in group.values():
                    p.add_(0.4 * torch.randn(p.shape, generator=rng, dtype=p.dtype))
    return made


@pytest.mark.parametrize("adapt", ["all", "head"])
@pytest.mark.parametrize("curvature", CURVATURES)
@pytest.mark.parametrize("belief", BELIEFS)
def test_equals_dense_matrices(belief, curvature, adapt):
    choice = CURVATURES[curvature]
    if choice.damping and not BELIEFS[belief].has_prior:
        pytest.skip("damping is relative to the prior")
    beta = {"learn_beta": True} if belief in ("diagonal", "low rank") else {}
    made = learner(BELIEFS[belief], Implicit(choice, Dense(), stopping="auto"), adapt=adapt, **beta)
    batch = class_batch()
    delta = 1 / (4 * 0.1)
    dense = dense_gradients(made, batch, choice, delta)
    found = gradients(made, batch)
    assert set(found) == set(dense) >= {"m"}
    for block, g in found.items():
        assert relative(g, dense[block]) <= 1e-8, block
    number = made.replace(gradient=Implicit(choice, Dense(), stopping=delta))
    for block, g in gradients(number, batch).items():
        assert relative(g, dense[block]) <= 1e-8, block
    # and δ is read: the rule of solved tasks is another one
    if BELIEFS[belief].has_prior:
        solved = gradients(made.replace(gradient=Implicit(choice, Dense())), batch)
        assert relative(solved["m"], dense["m"]) > 0.01


@pytest.mark.parametrize("belief", BELIEFS)
def test_cg_solves_it_too(belief):
    rule = Implicit(Curvature("ggn"), ConjugateGradient(300, tol=1e-12), stopping="auto")
    made, batch = learner(BELIEFS[belief], rule), class_batch()
    dense = dense_gradients(made, batch, rule.curvature, 1 / (4 * 0.1))
    for block, g in gradients(made, batch).items():
        assert relative(g, dense[block]) <= 1e-8, block


@pytest.mark.parametrize("belief", ["diagonal", "low rank"])
def test_few_cg_steps_suffice_whatever_the_prior(belief):
    """Preconditioned, H + δI has eigenvalues between 1 and 1 + 2K, while variances spread over four
    orders of magnitude, and the curvature of the log-variances is next to nothing."""
    made, batch = learner(BELIEFS[belief], Implicit(), GradientDescent(5, 0.1)), class_batch()
    made = made.replace(beta=1e-4)
    with torch.no_grad():
        for p in made.log_var.values():
            p.copy_(torch.linspace(-9, 0, p.numel(), dtype=F64).view_as(p))
    residuals = []
    for stopping in ("auto", None):
        rule = Implicit(linear_solver=ConjugateGradient(8), stopping=stopping)
        one = made.replace(gradient=rule)
        gradients(one, batch)
        residuals.append(float(one.diagnostics.record.linear.residual.max()))
    assert residuals[0] < 1e-3 < residuals[1], residuals


def test_step_sizes_by_name_and_a_tied_head():
    rates = {"*.weight": 0.05, "log_var.*": 0.4, "*": 0.2}
    rule = Implicit(Curvature("energy"), Dense(), stopping="auto")
    made = learner(DiagonalGaussian(), rule, GradientDescent(3, rates), adapt="head", tie_head=True)
    rows, bias = 12, 3
    steps = [0.05] * rows + [0.2] * bias + [0.05] * rows + [0.4] * bias
    # the pattern of weights comes first, also for log_var.2.weight
    delta = 1 / (3 * torch.tensor(steps, dtype=F64))
    batch = class_batch()
    dense = dense_gradients(made, batch, rule.curvature, delta)
    for block, g in gradients(made, batch).items():
        # (the softmax does not see a tied mean: that gradient is zero)
        assert (g - dense[block]).norm() <= 1e-8 * dense[block].norm() + 1e-14, block


def test_the_lemma_is_in_coordinates_of_its_own():
    """At a solution Lemma 1 is the exact Hessian in (m, d), and so it is with δ."""
    batch = class_batch()
    exact = learner(
        DiagonalGaussian(), Implicit(Curvature("energy"), Dense(), stopping=0.7), converged()
    )
    dense = dense_gradients(exact, batch, delta=0.7)
    for linear_solver in (Dense(), ConjugateGradient(500, tol=1e-13)):
        rule = Implicit(Curvature("lemma"), linear_solver, stopping=0.7)
        for block, g in gradients(exact.replace(gradient=rule), batch).items():
            assert relative(g, dense[block]) <= 1e-8, block


def test_the_lemma_where_nothing_is_solved():
    """H of Lemma 1 with δ/d_t² on the variances, its own G, and δu for the start."""
    rule = Implicit(Curvature("lemma"), Dense(), stopping="auto")
    made, batch = learner(DiagonalGaussian(), rule), class_batch(tasks=1)
    found = gradients(made, batch)
    support, query = made.problem(batch, seed())
    v = made.diagnostics.record.solution.value
    n, kappa = made.layout.size, support.kappa
    leaf = v.clone().requires_grad_()
    (b,) = torch.autograd.grad(query.loss(leaf).sum(), leaf)
    variance, rho = v[0, n:].exp(), support.meta.prior[1].detach()
    point = torch.cat([v[0, :n], variance])

    def loss(x):
        return support.loss(torch.cat([x[:n], x[n:].log()])[None]).sum()

    c = torch.autograd.functional.hessian(loss, point)
    slope = torch.autograd.functional.jacobian(loss, point)
    tau = (-rho).exp()
    solved = tau + 2 * slope[n:] / kappa
    delta = torch.full((n,), 1 / (4 * 0.1), dtype=F64)
    p = torch.cat([kappa * tau + delta, kappa * solved.square() / 2 + delta / variance.square()])
    u = torch.linalg.solve(c + torch.diag(p), torch.cat([b[0, :n], b[0, n:] / variance]))
    g_m = (kappa * tau + delta) * u[:n]
    g_rho = -slope[:n] * u[:n] + kappa * tau * u[n:] / 2 + delta * u[n:] / variance
    assert relative(found["m"], g_m) <= 1e-9
    assert relative(found["rho"], g_rho) <= 1e-9


@pytest.mark.parametrize("kind", ["energy", "ggn", "lemma"])
def test_without_it_the_rule_is_as_before_to_the_last_bit(kind):
    batch = class_batch()
    plain = gradients(learner(DiagonalGaussian(), Implicit(Curvature(kind))), batch)
    for stopping in (None, 0, 0.0):
        rule = Implicit(Curvature(kind), stopping=stopping)
        found = gradients(learner(DiagonalGaussian(), rule), batch)
        assert all(torch.equal(found[block], g) for block, g in plain.items())


def test_no_steps_are_first_order_to_the_last_bit():
    batch, none = class_batch(), GradientDescent(0)
    first = gradients(learner(DiagonalGaussian(), FirstOrder(), none, "head"), batch)
    rule = Implicit(stopping="auto")
    found = gradients(learner(DiagonalGaussian(), rule, none, "head"), batch)
    assert all(torch.equal(found[block], g) for block, g in first.items())


@pytest.mark.parametrize("curvature", CURVATURES)
def test_much_stopping_is_first_order(curvature):
    batch = class_batch()
    first = gradients(learner(DiagonalGaussian(), FirstOrder(), adapt="head"), batch)
    rule = Implicit(CURVATURES[curvature], stopping=1e10)
    found = gradients(learner(DiagonalGaussian(), rule, adapt="head"), batch)
    for block, g in first.items():
        assert relative(found[block], g) <= 1e-7, block


def test_natural_descent_has_the_step_sizes_of_its_linearization():
    """At its fixed point the Jacobian of one step is I − step·H."""
    made = learner(DiagonalGaussian(), Implicit(), converged())
    support, _ = made.problem(class_batch(tasks=1), seed())
    support = ibaml.energy.detached(support)
    start = made.belief.start(support.meta.prior, 1)
    v = converged().solve(support, start).value
    natural = NaturalDescent(1, {"log_var.*": 9.0, "*": 0.03}, eta=0.3)
    rate = torch.full_like(v[0], 0.03)  # that of log-variances is not read

    def step(x):
        (slope,) = torch.autograd.grad(support(x).sum(), x, create_graph=True)
        return natural.move(support, x, slope, (), 0, rate)[0]

    jacobian = torch.autograd.functional.jacobian(step, v)[0, :, 0]
    h = torch.autograd.functional.hessian(lambda x: support(x).sum(), v)[0, :, 0]
    sizes = natural.step_sizes(support, v)
    assert relative(jacobian, torch.eye(len(h), dtype=F64) - sizes[:, None] * h) <= 1e-8


def test_a_solution_is_the_same_with_any_rule():
    batch = class_batch()
    values = []
    for stopping in (None, "auto", 3.0):
        made = learner(DiagonalGaussian(), Implicit(stopping=stopping))
        gradients(made, batch)
        values.append(made.diagnostics.record.solution.value)
    assert torch.equal(values[0], values[1])
    assert torch.equal(values[0], values[2])


# --- what it costs -------------------------------------------------------------------------------


class Counted(nn.Module):
    """Counts how often it runs."""

    def __init__(self):
        super().__init__()
        self.body, self.runs = mlp_model(), 0

    def forward(self, x):
        self.runs += 1
        return self.body(x)


def test_the_backward_pass_does_not_depend_on_k():
    runs = []
    for steps in (1, 30):
        net = Counted()
        made = MetaLearner(
            net, DiagonalGaussian(), GradientDescent(steps, 0.01),
            Implicit(linear_solver=ConjugateGradient(4), stopping="auto"), execution="loop",
        )  # fmt: skip
        loss = made(class_batch())
        before = net.runs
        loss.backward()
        runs.append(net.runs - before)
    assert runs[0] == runs[1] > 0


def test_memory_does_not_grow_with_k():
    def peak(steps: int) -> int:
        torch.manual_seed(0)
        net = ibaml.nn.conv4(2, channels=4, in_channels=1, image_size=16)
        made = plain_learner(
            "ibaml", net, solver=GradientDescent(steps, 0.001), samples=2,
            gradient=Implicit(linear_solver=ConjugateGradient(5), stopping="auto"),
        )  # fmt: skip
        tasks = class_batch((1, 16, 16), ways=2, shots=2, query=4).to(torch.float32)
        return peak_bytes(lambda: made(tasks).backward())

    assert peak(50) <= 1.05 * peak(1)


# --- negative curvature --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("h", "reason", "size"),
    [(-0.9, Reason.CONVERGED, 10.0), (-4.0, Reason.NEGATIVE_CURVATURE, 0.0)],
)
def test_negative_curvature_is_met(h, reason, size):
    """h > −δ is solved; h < −δ is reported, and nothing is made of it. (A start at (P + δI)⁻¹b
    makes first order of it.)"""
    start = torch.ones(1, 1, dtype=F64, requires_grad=True)
    energy = plain(lambda v: h * v.square().sum(-1) / 2, start)
    for begin in ("zero", "preconditioned"):
        start.grad, record = None, Record()
        linear_solver = ConjugateGradient(5, start=begin)
        rule = Implicit(Curvature("energy"), linear_solver, stopping=1.0)
        rule(energy, start, GradientDescent(2, 0.01), record).sum().backward()
        assert record.linear.reason.tolist() == [int(reason)]
        expected = 1.0 if (size, begin) == (0.0, "preconditioned") else size
        assert float(start.grad) == pytest.approx(expected)


# --- refusals ------------------------------------------------------------------------------------

AUTO = Implicit(stopping="auto")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Implicit(stopping="of"), "\"auto\", None or a number; got 'of'"),
        (lambda: Implicit(stopping=-1.0), "stopping must be a finite number, 0 or more"),
        (lambda: Implicit(stopping=float("inf")), "stopping must be a finite number"),
        (lambda: learner(DiagonalGaussian(), AUTO, Adam()), "Adam has not"),
        (lambda: learner(Point(), AUTO, NewtonCG()), 'descent and stopping="auto"'),
        (lambda: learner(Point(), Implicit(), GradientDescent()), 'descent and stopping="auto"'),
        (lambda: learner(Point(), AUTO, GradientDescent(tol=0.1)), "leave tol out"),
        (
            lambda: learner(Point(), Implicit(Curvature(damping=1.0), stopping=1.0)),
            "damping is relative to the prior's precision, and the energy has no prior",
        ),
        (
            lambda: ibaml.methods.ibaml(
                mlp_model(), belief=ibaml.FullGaussian(), gradient=Implicit(stopping=1.0)
            ),
            'stopping is not read by posterior="full"',
        ),
    ],
)
def test_refusals(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_adam_is_refused_where_there_is_no_learner_too():
    c = torch.tensor(1.0, requires_grad=True)
    with pytest.raises(ValueError, match="Adam has not"):
        implicit_solve(
            lambda v, c: (v - c) ** 2, torch.tensor(0.0), c, solver=Adam(3), stopping="auto"
        )


def test_maml_with_an_implicit_gradient_that_knows_its_k():
    made = ibaml.methods.maml(mlp_model(), steps=4, lr=0.1, gradient=AUTO)
    assert not made.belief.has_prior
    assert gradients(made, class_batch())["m"].norm() > 0


# --- files ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("stopping", ["auto", None, 0.25])
def test_it_is_saved_with_the_learner(stopping, tmp_path):
    made = ibaml.methods.ibaml(
        ibaml.nn.mlp(3, 3), adapt="all", steps=3, lr=0.1, gradient=Implicit(stopping=stopping)
    )
    path = made.save(tmp_path / "learner.ibaml")
    assert ibaml.load(path).gradient == made.gradient


def test_the_words_of_the_methods():
    for word, rule in (("auto", "auto"), ("off", None), (None, "auto"), (0.5, 0.5), (0, 0)):
        for method in (ibaml.methods.ibaml, ibaml.methods.imaml):
            made = method(mlp_model(), adapt="all", stopping=word)
            assert made.gradient.stopping == rule
    # a head has a posterior in closed form, unless something is chosen that it does not read
    assert ibaml.methods.ibaml(mlp_model(), stopping="auto").belief == DiagonalGaussian()


def test_it_is_the_default_where_descent_is_stopped():
    """With the exact curvature on the means, in systems solved to 1 %; a given curvature, a rule or
    a solver that does not say where it stopped is taken as it is."""
    learner = ibaml.methods.ibaml(mlp_model(), adapt="all")
    assert learner.gradient == Implicit(
        Curvature("energy", block="mean"),
        ConjugateGradient(64, tol=1e-2, recorded=8, trust=0.5),
        stopping="auto",
    )
    assert learner.solver.steps == 15
    plain = ibaml.methods.ibaml(mlp_model(), adapt="all", stopping="off")
    assert plain.gradient == Implicit(Curvature("ggn"))
    assert plain.solver.steps == 5
    exact = ibaml.methods.ibaml(mlp_model(), adapt="all", curvature="energy")
    assert exact.gradient == Implicit(Curvature("energy"))
    for solver in (Adam(3), NewtonCG(3)):
        learner = ibaml.methods.ibaml(mlp_model(), adapt="all", solver=solver)
        assert learner.gradient == Implicit(Curvature("ggn"))
    assert ibaml.methods.ibaml(mlp_model(), adapt="head").gradient == Implicit()


@pytest.mark.parametrize(("text", "rule"), [("auto", "auto"), ("off", None), ("0.25", 0.25)])
def test_it_is_a_setting_of_a_run(text, rule, tmp_path):
    settings = resolve(
        {
            "data": str(features_file(tmp_path / "f.npz")), "adapt": "all", "solver": "descent",
            "steps": 3, "hidden": "4", "iterations": 1, "tasks": 2, "val_every": 0, "queries": 2,
            "tensorboard": False, "stopping": text,
        }
    )  # fmt: skip
    train(settings, tmp_path / "run")
    assert read_toml(tmp_path / "run" / "config.toml")["stopping"] == text
    assert ibaml.load(tmp_path / "run").gradient.stopping == rule


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"stopping": "aut"}, "stopping must be auto, off or a number.*did you mean auto"),
        ({"stopping": "-1"}, "stopping must be 0 or more"),
        ({"stopping": "nan"}, "stopping must be 0 or more"),
        ({"stopping": "auto", "solver": "adam"}, "solver adam"),
        ({"stopping": "auto", "posterior": "full"}, "not read by posterior full"),
        ({"stopping": "auto", "method": "maml"}, "stopping is read by ibaml, imaml"),
    ],
)
def test_settings_are_refused_by_name(given, words):
    with pytest.raises(SettingsError, match=words):
        resolve(given)
