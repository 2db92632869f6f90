"""Is a belief right? Sampling, penalty and the penalty's derivatives, compared with matrices."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from ibaml.gradient import Implicit
from ibaml.learner import MetaLearner
from ibaml.linalg import dense_matrix
from ibaml.solve import GradientDescent
from ibaml.tasks import TaskBatch
from ibaml.testing.base import F64, TASKS, close, normal, number
from ibaml.weights import Belief, Layout, Prior, PriorParameters


class BeliefSuite:
    """A subclass writes `make` and `moments`, and `dense_penalty` if the penalty is not a KL.

    Attributes:
        n: how many weights.
        affine: whether a sample is an affine function of its noise (as for a Gaussian); if not,
            moments are estimated from many draws.
    """

    n = 4
    affine = True

    def make(self) -> Belief:
        raise NotImplementedError

    def moments(self, v: Tensor, n: int) -> tuple[Tensor, Tensor]:
        """Mean (T, n) and covariance (T, n, n) of q(w; v)."""
        raise NotImplementedError

    def dense_penalty(self, v: Tensor, prior: Prior) -> Tensor:
        """The penalty (T,), from matrices: KL(q(v) ‖ q(prior)) unless a subclass says otherwise."""
        mean, covariance = self.moments(v, self.n)
        prior_v = self.make().start(prior, 1)
        return _kl(mean, covariance, *self.moments(prior_v, self.n))

    # --- points ----------------------------------------------------------------------------------

    def prior(self, dtype: torch.dtype = F64) -> Prior:
        """A prior other than the initial one."""
        weights = {"a": normal(self.n - 1, seed=1).to(dtype), "b": normal(1, seed=2).to(dtype)}
        layout = Layout(("a", "b"), ((self.n - 1,), (1,)))
        held = PriorParameters(self.make(), layout, weights, init_log_var=-0.5)
        vectors = held.vectors(layout, weights)
        return tuple(p.detach() + 0.3 * normal(*p.shape, seed=3).to(dtype) for p in vectors)

    def point(self, prior: Prior) -> Tensor:
        start = self.make().start(prior, TASKS)
        return start + 0.3 * normal(*start.shape, seed=4).to(start.dtype)

    def noise(self, samples: int = 5) -> Tensor:
        return normal(TASKS, samples, self.make().noise_size(self.n), seed=5)

    # --- tests -----------------------------------------------------------------------------------

    def test_blocks_cover_v_and_the_mean_is_first(self) -> None:
        belief = self.make()
        blocks = belief.blocks(self.n)
        assert next(iter(blocks.items())) == ("mean", self.n)
        start = belief.start(self.prior(), TASKS)
        assert start.shape == (TASKS, sum(blocks.values()))
        assert belief.stochastic == (belief.noise_size(1) > 0)

    def test_the_start_is_the_prior(self) -> None:
        belief, prior = self.make(), self.prior()
        v = belief.start(prior, TASKS).clone().requires_grad_()
        penalty = belief.penalty(v, prior)
        (slope,) = torch.autograd.grad(penalty.sum(), v)
        close(penalty, torch.zeros(TASKS, dtype=F64), "the penalty at the prior itself is not 0")
        close(slope, torch.zeros_like(slope), "the penalty is not stationary at the prior itself")

    def test_the_penalty_is_that_of_matrices(self) -> None:
        prior = self.prior()
        v = self.point(prior)
        penalty = self.make().penalty(v, prior)
        close(penalty, self.dense_penalty(v, prior), "the penalty is not its dense counterpart")

    def test_samples_have_the_moments(self) -> None:
        belief, v = self.make(), self.point(self.prior())
        mean, covariance = self.moments(v, self.n)
        noise, tolerance = self._points()
        w = belief.sample(v, noise)
        assert w.shape == (TASKS, noise.shape[1], self.n)
        close(w.mean(1), mean, "the mean of samples", tolerance)
        off = w - w.mean(1, keepdim=True)
        close(off.mT @ off / w.shape[1], covariance, "the covariance of samples", tolerance)
        close(v[:, belief.slices(self.n)["mean"]], mean, 'the block "mean" is not the mean', 1e-12)
        if (log_var := belief.log_var(v)) is not None:
            variances = covariance.diagonal(dim1=-2, dim2=-1)
            close(log_var.exp(), variances, "log_var is not that of the covariance")

    def _points(self) -> tuple[Tensor, float]:
        """Noise with mean 0 and covariance 1 (exactly, for affine samples), and a tolerance."""
        size = self.make().noise_size(self.n)
        if not size:
            return torch.zeros(TASKS, 1, 0, dtype=F64), 1e-9
        if not self.affine:
            return normal(TASKS, 200_000, size, seed=6), 0.05
        eye = math.sqrt(size) * torch.eye(size, dtype=F64)
        return torch.cat([eye, -eye]).expand(TASKS, -1, -1), 1e-9

    def test_log_density_is_that_of_the_matrices(self) -> None:
        belief, v = self.make(), self.point(self.prior())
        mean, covariance = self.moments(v, self.n)
        if type(belief).log_density is Belief.log_density or not bool(covariance.any()):
            pytest.skip("no density")
        w = mean[:, None] + normal(TASKS, 3, self.n, seed=7)
        oracle = torch.distributions.MultivariateNormal(mean[:, None], covariance[:, None])
        close(belief.log_density(w, v), oracle.log_prob(w), "log_density")

    def test_the_precision_is_the_penaltys_hessian(self) -> None:
        belief, prior = self.make(), self.prior()
        v = self.point(prior)
        hessian = torch.autograd.functional.hessian(lambda p: belief.penalty(p, prior).sum(), v)
        hessian = torch.stack([hessian[t, :, t] for t in range(TASKS)])
        precision = belief.precision(v, prior)
        close(dense_matrix(precision.product, v), hessian, "products with the precision")
        twice = precision.times(2.0)
        close(dense_matrix(twice.product, v), 2 * hessian, "products with twice the precision")
        if precision.diagonal is not None:
            close(torch.diag_embed(precision.diagonal), hessian, "the precision's diagonal")
        if (solve := precision.precondition) is not None:
            assert twice.precondition is not None
            inverse = dense_matrix(solve, v)
            close(inverse, inverse.mT, "the preconditioner is not symmetric")
            assert bool((torch.linalg.eigvalsh(inverse) > 0).all()), (
                "the preconditioner is not positive definite"
            )
            close(2 * dense_matrix(twice.precondition, v), inverse, "a scaled preconditioner")

    def test_prior_product_is_the_mixed_derivative(self) -> None:
        belief = self.make()
        prior = tuple(p.clone().requires_grad_() for p in self.prior())
        v = self.point(tuple(p.detach() for p in prior)).requires_grad_()
        u = normal(*v.shape, seed=8)
        products = belief.prior_product(v.detach(), tuple(p.detach() for p in prior), u)
        if products is None:
            pytest.skip("by autograd")
        (slope,) = torch.autograd.grad(belief.penalty(v, prior).sum(), v, create_graph=True)
        oracle = torch.autograd.grad(slope, prior, -u, allow_unused=True)
        assert len(products) == len(prior)
        for one, other in zip(products, oracle, strict=True):
            close(one, torch.zeros_like(one) if other is None else other, "prior_product")

    def test_a_task_does_not_depend_on_its_neighbors(self) -> None:
        belief, prior, noise = self.make(), self.prior(), self.noise()
        v = self.point(prior)
        u = normal(*v.shape, seed=9)
        for t in range(TASKS):
            one = slice(t, t + 1)
            close(belief.sample(v[one], noise[one]), belief.sample(v, noise)[one], "a sample alone")
            close(belief.penalty(v[one], prior), belief.penalty(v, prior)[one], "a penalty alone")
            alone, together = belief.precision(v[one], prior), belief.precision(v, prior)
            close(alone.product(u[one]), together.product(u)[one], "a product alone")

    def test_single_precision_is_as_good_as_it_can_be(self) -> None:
        belief, prior, noise = self.make(), self.prior(), self.noise()
        v = self.point(prior)
        v_, prior_ = v.float(), tuple(p.float() for p in prior)
        for actual, exact in (
            (belief.sample(v_, noise.float()), belief.sample(v, noise)),
            (belief.penalty(v_, prior_), belief.penalty(v, prior)),
            (belief.precision(v_, prior_).product(v_), belief.precision(v, prior).product(v)),
        ):
            assert actual.dtype == torch.float32
            close(actual.double(), exact, "single precision", 1e-3)

    def test_a_learner_takes_it(self) -> None:
        """Meta-gradients for the whole prior, adaptation and predictions."""
        belief = self.make()
        if not belief.has_prior:
            pytest.skip("no prior to learn by the implicit rule")
        torch.manual_seed(0)
        model = nn.Linear(2, 1).double()
        learner = MetaLearner(
            model, belief, GradientDescent(3, 0.01), Implicit(), samples=3, init_log_var=-1.0
        )
        x, y = normal(TASKS, 6, 2, seed=10), normal(TASKS, 6, 1, seed=11)
        batch = TaskBatch(x[:, :3], y[:, :3], x[:, 3:], y[:, 3:])
        learner(batch, torch.Generator().manual_seed(0)).backward()
        for name, parameter in learner.named_parameters():
            assert parameter.grad is not None, f"{name} has no gradient"
            assert bool(parameter.grad.isfinite().all()), f"the gradient of {name} is not finite"
        posterior = learner.adapt(x[0], y[0])
        mean, variance = posterior.predict(x[0])
        assert bool(mean.isfinite().all())
        assert bool(variance.isfinite().all())
        assert number(learner.diagnostics.energy_before) == TASKS


def _kl(mean: Tensor, covariance: Tensor, prior_mean: Tensor, prior_covariance: Tensor) -> Tensor:
    """KL(N ‖ N_prior) with dense matrices."""
    off = (mean - prior_mean)[..., None]
    inverse = torch.linalg.inv(prior_covariance)
    trace = (inverse @ covariance).diagonal(dim1=-2, dim2=-1).sum(-1)
    distance = (off.mT @ inverse @ off)[..., 0, 0]
    return (trace + distance - mean.shape[-1] + prior_covariance.logdet() - covariance.logdet()) / 2
