"""ibaml's own beliefs, solvers, gradient rules and likelihoods under the suites that ship with it,
and the suites under bugs that are planted."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from torch import distributions as dist

from ibaml import (
    Adam,
    Categorical,
    Curvature,
    Dense,
    DiagonalGaussian,
    FirstOrder,
    Gaussian,
    GradientDescent,
    Implicit,
    LowRankGaussian,
    NaturalDescent,
    NewtonCG,
    Point,
    PolyakDescent,
    Unrolled,
)  # fmt: skip
from ibaml.solve import HeadNewton
from ibaml.testing import BeliefSuite, GradientRuleSuite, LikelihoodSuite, SolverSuite
from triangular import FullGaussian, root_of

# --- beliefs -------------------------------------------------------------------------------------


class TestDiagonalGaussian(BeliefSuite):
    def make(self):
        return DiagonalGaussian()

    def moments(self, v, n):
        return v[:, :n], torch.diag_embed(v[:, n:].exp())


class TestPoint(BeliefSuite):
    def make(self):
        return Point(lam=0.7)

    def moments(self, v, n):
        return v, v.new_zeros(len(v), n, n)

    def dense_penalty(self, v, prior):
        return torch.stack([0.35 * (one - prior[0]) @ (one - prior[0]) for one in v])


class TestLowRankGaussian(BeliefSuite):
    rank = 1

    def make(self):
        return LowRankGaussian(self.rank)

    def moments(self, v, n):
        factor = v[:, 2 * n :].unflatten(-1, (self.rank, n))
        return v[:, :n], torch.diag_embed(v[:, n : 2 * n].exp()) + factor.mT @ factor


class TestRankTwo(TestLowRankGaussian):
    rank = 2


class TestFullGaussian(BeliefSuite):
    def make(self):
        return FullGaussian()

    def moments(self, v, n):
        root = root_of(v[:, n:], n)
        return v[:, :n], root @ root.mT


# --- solvers -------------------------------------------------------------------------------------


class TestGradientDescent(SolverSuite):
    many = 500

    def make(self, steps):
        return GradientDescent(steps, 0.2)


class TestAdam(SolverSuite):
    many = 1500

    def make(self, steps):
        return Adam(steps, 0.02)


class TestNewtonCG(SolverSuite):
    few, many, tolerance = 2, 20, 1e-8

    def make(self, steps):
        return NewtonCG(steps)

    def belief(self):
        return DiagonalGaussian()


class TestHeadNewton(SolverSuite):
    few, many, tolerance = 2, 20, 1e-10
    noise = "outputs"

    def make(self, steps):
        return HeadNewton(steps, tol=None)

    def belief(self):
        return DiagonalGaussian()


class TestMomentum(SolverSuite):
    many = 500

    def make(self, steps):
        return GradientDescent(steps, 0.2, momentum=0.7)


class TestPolyakDescent(SolverSuite):
    many = 500

    def make(self, steps):
        return PolyakDescent(steps, 0.2)


class TestNaturalDescent(SolverSuite):
    many = 500

    def make(self, steps):
        return NaturalDescent(steps, 0.1)

    def belief(self):
        return DiagonalGaussian()


# --- gradient rules ------------------------------------------------------------------------------


class TestUnrolled(GradientRuleSuite):
    def make(self):
        return Unrolled()

    def dense(self, energy, start, b):
        theta = tuple(t.clone().requires_grad_() for t in energy.theta)
        v = start(theta)
        for _ in range(4):
            (slope,) = torch.autograd.grad(energy.bind(theta)(v).sum(), v, create_graph=True)
            v = v - 0.1 * slope
        return torch.autograd.grad(v, theta, b)


class TestRecomputed(TestUnrolled):
    def make(self):
        return Unrolled(recompute=True)


class TestFirstOrder(GradientRuleSuite):
    def make(self):
        return FirstOrder()

    def dense(self, energy, start, b):
        theta = tuple(t.clone().requires_grad_() for t in energy.theta)
        return torch.autograd.grad(start(theta), theta, b)


class TestImplicit(GradientRuleSuite):
    def make(self):
        return Implicit(Curvature("energy"), Dense())

    def dense(self, energy, start, b):
        v = self.solver().solve(energy, start(energy.theta)).value.requires_grad_()
        hessian = torch.autograd.functional.hessian(lambda p: energy(p).sum(), v)
        u = torch.linalg.solve(hessian.reshape(v.numel(), v.numel()), b[0])
        theta = tuple(t.clone().requires_grad_() for t in energy.theta)
        (slope,) = torch.autograd.grad(energy.bind(theta)(v).sum(), v, create_graph=True)
        return torch.autograd.grad(slope, theta, -u[None])


class TestImplicitOfAFullGaussian(TestImplicit):
    def belief(self):
        return FullGaussian()


class TestImplicitThatKnowsK(TestImplicit):
    """δ = 1/(αK) on the diagonal of H, and δu for the start."""

    def make(self):
        return Implicit(Curvature("energy"), Dense(), stopping="auto")

    def dense(self, energy, start, b):
        v = self.solver().solve(energy, start(energy.theta)).value.requires_grad_()
        hessian = torch.autograd.functional.hessian(lambda p: energy(p).sum(), v)
        hessian = hessian.reshape(v.numel(), v.numel()) + torch.eye(v.numel()) / 0.4
        u = torch.linalg.solve(hessian, b[0])
        theta = tuple(t.clone().requires_grad_() for t in energy.theta)
        (slope,) = torch.autograd.grad(energy.bind(theta)(v).sum(), v, create_graph=True)
        value = (start(theta) * u / 0.4).sum() - slope @ u
        return torch.autograd.grad(value.sum(), theta)


class TestImplicitThatKnowsKOfAFullGaussian(TestImplicitThatKnowsK):
    def belief(self):
        return FullGaussian()


# --- likelihoods ---------------------------------------------------------------------------------


class TestCategorical(LikelihoodSuite):
    def make(self):
        return Categorical(temperature=1.7)

    def targets(self):
        return torch.tensor([0, 2, 1, 1, 0])

    def dense(self, outputs, y):
        return -dist.Categorical(logits=outputs).log_prob(y)


class TestGaussian(LikelihoodSuite):
    def make(self):
        return Gaussian(0.6, learn=True)

    def targets(self):
        return torch.linspace(-1, 1, 15, dtype=torch.float64).view(5, 3)

    def dense(self, outputs, y):
        return -dist.Normal(outputs, 0.6).log_prob(y).sum(-1)


# --- planted bugs --------------------------------------------------------------------------------


def planted(suite, broken):
    """The suite with a broken object in the place of its own."""
    return type("Planted", (suite,), {"make": lambda self, *given: broken(*given)})()


class TwiceTheKl(DiagonalGaussian):
    def penalty(self, v, prior):
        return 2 * super().penalty(v, prior)


class NoKlOfTheMean(DiagonalGaussian):
    def penalty(self, v, prior):
        return super().penalty(torch.cat([0 * v[:, :4] + prior[0], v[:, 4:]], -1), prior)


class VarianceForDeviation(DiagonalGaussian):
    def sample(self, v, noise):
        m, rho = v[:, None].chunk(2, -1)
        return m + rho.exp() * noise


class StaleProduct(DiagonalGaussian):
    def precision(self, v, prior):
        return super().precision(torch.cat([prior[0], prior[1]]).expand_as(v), prior)


class SignOfTheMix(DiagonalGaussian):
    def prior_product(self, v, prior, u):
        return tuple(-g for g in super().prior_product(v, prior, u))


class MixedTasks(DiagonalGaussian):
    def penalty(self, v, prior):
        return super().penalty(v, prior).mean().expand(len(v))


@dataclass(frozen=True)
class OneStepForAll(GradientDescent):
    def move(self, energy, v, gradient, memory, step, rate):
        return v - rate * gradient.mean(0), ()


class NoConstant(Gaussian):
    def forward(self, outputs, y):
        return super().forward(outputs, y) - math.log(2 * math.pi) / 2


BUGS = [
    (TestDiagonalGaussian, TwiceTheKl, "the_penalty_is_that_of_matrices"),
    (TestDiagonalGaussian, NoKlOfTheMean, "the_penalty_is_that_of_matrices"),
    (TestDiagonalGaussian, VarianceForDeviation, "samples_have_the_moments"),
    (TestDiagonalGaussian, StaleProduct, "the_precision_is_the_penaltys_hessian"),
    (TestDiagonalGaussian, SignOfTheMix, "prior_product_is_the_mixed_derivative"),
    (TestDiagonalGaussian, MixedTasks, "a_task_does_not_depend_on_its_neighbors"),
    (TestGradientDescent, lambda steps: OneStepForAll(steps, 0.2), "it_reaches_the_minimum"),
    (TestImplicit, lambda: Implicit(Curvature("energy", 0.1), Dense()),
     "gradients_are_those_of_the_counterpart"),
    (TestUnrolled, FirstOrder, "gradients_are_those_of_the_counterpart"),
    (TestGaussian, lambda: NoConstant(0.6), "values_are_those_of_the_counterpart"),
]  # fmt: skip


@pytest.mark.parametrize(("suite", "broken", "test"), BUGS)
def test_the_suites_find_planted_bugs(suite, broken, test):
    getattr(suite(), f"test_{test}")()
    with pytest.raises(AssertionError):
        getattr(planted(suite, broken), f"test_{test}")()
