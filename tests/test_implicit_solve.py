"""`implicit_solve` as other people would use it, against finite differences."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.func import functional_call

import ibaml
from ibaml import Adam, Curvature, Dense, GradientDescent, Record, implicit_solve
from live_bytes import peak_bytes
from oracles import F64, gradients, relative
from problems import class_batch, mlp_model, plain_learner

RNG = torch.Generator().manual_seed(0)
X = torch.randn(20, 5, generator=RNG, dtype=F64)
Y = (X @ torch.randn(5, generator=RNG, dtype=F64) > 0).to(F64)
X_VAL = torch.randn(30, 5, generator=RNG, dtype=F64)
Y_VAL = (X_VAL.sum(-1) > 0).to(F64)


def logistic(w, log_decay):
    """Logistic regression with a weight decay of its own for every weight."""
    nll = F.binary_cross_entropy_with_logits(X @ w["w"] + w["b"], Y)
    return nll + (log_decay["w"].exp() * w["w"] ** 2).sum() + log_decay["b"].exp() * w["b"] ** 2


def differences(function, tensors, h: float = 1e-5):
    """Central differences of a scalar function in every entry of every tensor."""
    result = []
    for tensor in tensors:
        g = torch.zeros_like(tensor)
        for i in range(tensor.numel()):
            values = []
            for sign in (1, -1):
                with torch.no_grad():
                    tensor.view(-1)[i] += sign * h
                values.append(float(function().detach()))
                with torch.no_grad():
                    tensor.view(-1)[i] -= sign * h
            g.view(-1)[i] = (values[0] - values[1]) / (2 * h)
        result.append(g)
    return result


@pytest.mark.parametrize(
    "options",
    [{}, {"linear_solver": Dense()}, {"solver": GradientDescent(1500, 0.8)}],
    ids=["defaults", "dense", "descent"],
)
def test_weight_decay_per_parameter(options):
    decay = {"w": torch.full((5,), -2.0, dtype=F64), "b": torch.tensor(-3.0, dtype=F64)}
    for t in decay.values():
        t.requires_grad_()

    def loss():
        start = {"w": torch.zeros(5, dtype=F64), "b": torch.tensor(0.0, dtype=F64)}
        w = implicit_solve(logistic, start, decay, **options)
        return F.binary_cross_entropy_with_logits(X_VAL @ w["w"] + w["b"], Y_VAL)

    loss().backward()
    oracle = differences(loss, decay.values())
    for t, g in zip(decay.values(), oracle, strict=True):
        assert relative(t.grad, g) <= 1e-6


def test_backbone_that_is_not_adapted():
    """The head is solved exactly; the backbone learns through the solution."""
    torch.manual_seed(0)
    backbone = nn.Sequential(nn.Linear(5, 4), nn.Tanh()).to(F64)
    params = dict(backbone.named_parameters())

    def energy(w, theta):
        features = functional_call(backbone, theta, X)
        return F.binary_cross_entropy_with_logits(features @ w, Y) + 0.01 * (w @ w)

    def loss():
        w = implicit_solve(energy, torch.zeros(4, dtype=F64), params)
        features = functional_call(backbone, params, X_VAL)
        return F.binary_cross_entropy_with_logits(features @ w, Y_VAL)

    loss().backward()
    oracle = differences(loss, params.values())
    for t, g in zip(params.values(), oracle, strict=True):
        assert relative(t.grad, g) <= 1e-6


def test_imaml_written_by_hand_on_top_of_it_is_our_imaml():
    batch, net, lam = class_batch((3,)), mlp_model(), 0.5
    theta = dict(net.named_parameters())

    def energy(w, data):
        t, start = data
        nll = F.cross_entropy(functional_call(net, w, batch.support_x[t]), batch.support_y[t])
        return nll + lam / 2 * sum((w[n] - start[n]).pow(2).sum() for n in w)

    def loss():
        total = 0
        for t in range(len(batch)):
            w = implicit_solve(energy, {n: p.detach() for n, p in theta.items()}, (t, theta))
            nll = F.cross_entropy(functional_call(net, w, batch.query_x[t]), batch.query_y[t])
            total = total + nll / len(batch)
        return total

    loss().backward()
    actual = torch.cat([p.grad.reshape(-1) for p in theta.values()])
    oracle = torch.cat([g.reshape(-1) for g in differences(loss, theta.values())])
    assert relative(actual, oracle) <= 1e-6

    from oracles import converged, exact_cg

    learner = plain_learner(
        "imaml",
        mlp_model(),
        lam=lam,
        solver=converged(),
        gradient=ibaml.Implicit(Curvature("energy"), exact_cg()),
    )
    assert relative(gradients(learner, batch)["m"], actual) <= 1e-8


@pytest.mark.parametrize("structure", ["tensor", "tuple", "dict", "nested"])
def test_structures_of_v(structure):
    c = torch.tensor([1.0, 2.0, 3.0], dtype=F64, requires_grad=True)
    zeros = torch.zeros(3, dtype=F64)
    start, read = {
        "tensor": (zeros, lambda v: v),
        "tuple": ((zeros[:1], zeros[1:]), lambda v: torch.cat(v)),
        "dict": ({"a": zeros[:2], "b": zeros[2]}, lambda v: torch.cat([v["a"], v["b"][None]])),
        "nested": (
            {"a": [zeros[:1], (zeros[1:],)]},
            lambda v: torch.cat([v["a"][0], v["a"][1][0]]),
        ),
    }[structure]
    v = implicit_solve(lambda v, c: (read(v) ** 2 / 2 - c * read(v)).sum(), start, c)
    assert type(v) is type(start)
    assert torch.allclose(read(v), c)
    (read(v) ** 2).sum().backward()
    assert torch.allclose(c.grad, 2 * c.detach())


@given(st.integers(1, 6), st.integers(1, 4), st.integers(0, 10**6))
def test_quadratic_has_the_closed_form_gradient(n, tasks, seed):
    """v̂ = A⁻¹c, so the gradient of ⟨g, v̂⟩ in c is A⁻¹g: many problems at once."""
    rng = torch.Generator().manual_seed(seed)
    root = torch.randn(tasks, n, n, generator=rng, dtype=F64)
    a = root @ root.mT + torch.eye(n, dtype=F64)
    c = torch.randn(tasks, n, generator=rng, dtype=F64, requires_grad=True)
    g = torch.randn(tasks, n, generator=rng, dtype=F64)

    def energy(v, c):
        return (v * (a @ v[..., None])[..., 0]).sum(-1) / 2 - (c * v).sum(-1)

    v = implicit_solve(energy, torch.zeros(tasks, n, dtype=F64), c)
    assert relative(v, torch.linalg.solve(a, c)) <= 1e-8
    (g * v).sum().backward()
    assert relative(c.grad, torch.linalg.solve(a, g)) <= 1e-8


@pytest.mark.filterwarnings("ignore:implicit_solve")  # one step is no solution
def test_a_thousand_inner_steps_in_the_memory_of_one():
    def run(steps: int) -> int:
        decay = torch.full((200,), -2.0, requires_grad=True)
        x = torch.randn(50, 200, generator=torch.Generator().manual_seed(0))

        def once() -> None:
            w = implicit_solve(
                lambda w, c: ((x @ w - 1) ** 2).mean() + (c.exp() * w * w).sum(),
                torch.zeros(200),
                decay,
                solver=GradientDescent(steps, 0.01),
                linear_solver=ibaml.ConjugateGradient(5),
            )
            w.sum().backward()

        return peak_bytes(once)

    assert run(1000) <= 1.02 * run(1)


def test_float32_with_defaults():
    decay = torch.tensor(0.5, requires_grad=True)
    w = implicit_solve(lambda w, c: ((w - 2) ** 2).sum() + c * (w**2).sum(), torch.zeros(3), decay)
    w.sum().backward()
    assert w.dtype == torch.float32
    assert decay.grad.item() == pytest.approx(-3 * 2 / 1.5**2, rel=1e-4)


def test_the_scale_of_the_energy_does_not_matter():
    for scale in (1e-8, 1.0, 1e8):
        c = torch.tensor(3.0, requires_grad=True)
        w = implicit_solve(lambda w, c, s=scale: s * ((w - c) ** 2).sum(), torch.zeros(1), c)
        w.sum().backward()
        assert w.item() == pytest.approx(3.0, rel=1e-4)
        assert c.grad.item() == pytest.approx(1.0, rel=1e-4)


def test_record_says_what_happened():
    record = Record()
    c = torch.ones(2, dtype=F64, requires_grad=True)
    v = implicit_solve(
        lambda v, c: (v**2 - c * v).sum(), torch.zeros(2, dtype=F64), c, record=record
    )
    assert record.solution.reason.tolist() == [ibaml.Reason.CONVERGED]
    assert record.linear is None
    v.sum().backward()
    assert record.linear.residual.max() <= 1e-12


def test_constants_beside_the_params_are_fine():
    c = torch.ones(2, dtype=F64, requires_grad=True)
    params = {"c": c, "index": torch.tensor([0, 1]), "scale": 2.0}
    v = implicit_solve(
        lambda v, p: (v**2 / 2 - p["scale"] * p["c"][p["index"]] * v).sum(),
        torch.zeros(2, dtype=F64),
        params,
    )
    v.sum().backward()
    assert torch.allclose(c.grad, torch.full((2,), 2.0, dtype=F64))


class TestRefusals:
    def test_a_gradient_that_would_be_exactly_zero(self):
        """The complaint of every peer's tracker: params read from a closure."""
        c = torch.ones(2, requires_grad=True)
        other = torch.ones(2, requires_grad=True)
        v = implicit_solve(lambda v, _: (v**2 - c.detach() * v).sum(), torch.zeros(2), other)
        with pytest.raises(RuntimeError, match="identically zero"):
            v.sum().backward()

    def test_divergence(self):
        c = torch.ones(2, requires_grad=True)
        with pytest.raises(FloatingPointError, match="step size"):
            implicit_solve(
                lambda v, c: (v**4 - c * v).sum(),
                torch.full((2,), 50.0),
                c,
                solver=GradientDescent(50, 10.0),
            )

    def test_one_diverging_problem_is_contained_and_reported(self):
        c = torch.tensor([1.0, 1e3], dtype=F64, requires_grad=True)
        with pytest.warns(RuntimeWarning, match="1 of 2"):
            v = implicit_solve(
                lambda v, c: c * v[:, 0] ** 2 - v[:, 0],
                torch.zeros(2, 1, dtype=F64),
                c,
                solver=GradientDescent(3000, 0.1),
            )
        assert v[0, 0].item() == pytest.approx(0.5)
        v[0, 0].backward()
        assert c.grad[0].item() == pytest.approx(-0.5)

    def test_a_saddle_is_announced(self):
        c = torch.ones(1, dtype=F64, requires_grad=True)
        v = implicit_solve(lambda w, c: ((w**2 - c) ** 2).sum(), torch.zeros(1, dtype=F64), c)
        with pytest.warns(RuntimeWarning, match="negative curvature"):
            v.sum().backward()

    def test_an_energy_that_ignores_part_of_v_is_announced(self):
        c = torch.ones(1, dtype=F64, requires_grad=True)
        start = {"a": torch.zeros(1, dtype=F64), "b": torch.zeros(1, dtype=F64)}

        def solve(**options):
            c.grad = None
            v = implicit_solve(lambda v, c: ((v["a"] - 2 * c) ** 2).sum(), start, c, **options)
            with pytest.warns(RuntimeWarning, match="singular"):
                (v["a"] + v["b"]).sum().backward()
            return float(c.grad)

        solve()
        assert solve(linear_solver=Dense()) == pytest.approx(2.0)

    def test_an_energy_without_a_minimum_is_announced(self):
        c = torch.ones(1, dtype=F64, requires_grad=True)
        with pytest.warns(RuntimeWarning, match="bounded below"):
            implicit_solve(lambda w, c: (c * w).sum(), torch.zeros(1, dtype=F64), c)

    @pytest.mark.parametrize("kind", ["ggn", "lemma"])
    def test_curvatures_it_cannot_know(self, kind):
        with pytest.raises(ValueError, match="energy"):
            implicit_solve(lambda v, p: (v * p).sum(), torch.ones(1), torch.ones(1), curvature=kind)

    def test_energies_that_are_not_numbers(self):
        with pytest.raises(ValueError, match="scalar"):
            implicit_solve(lambda v, p: torch.ones(2, 2), torch.ones(1), torch.ones(1))

    def test_starts_that_are_not_tensors(self):
        with pytest.raises(TypeError, match="floating-point"):
            implicit_solve(lambda v, p: p.sum(), {"a": 3}, torch.ones(1))
        with pytest.raises(ValueError, match="leading"):
            implicit_solve(lambda v, p: torch.zeros(3), torch.ones(2), torch.ones(1))


def test_adam_as_the_inner_solver():
    c = torch.tensor([1.0, -2.0], dtype=F64, requires_grad=True)
    v = implicit_solve(
        lambda v, c: ((v - c) ** 2).sum(),
        torch.zeros(2, dtype=F64),
        c,
        solver=Adam(5000, 0.01, tol=1e-10),
    )
    v.sum().backward()
    assert torch.allclose(c.grad, torch.ones(2, dtype=F64))
