"""Is a likelihood right? Its values, its derivatives and its probabilities."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ibaml.energy import Likelihood
from ibaml.testing.base import F64, close, normal


class LikelihoodSuite:
    """A subclass writes `make`, `outputs`, `targets` and `dense`.

    Attributes:
        convex: whether the nll is convex in the outputs, so that Gauss–Newton products are positive
            semi-definite.
    """

    convex = True

    def make(self) -> Likelihood:
        raise NotImplementedError

    def outputs(self) -> Tensor:
        """Outputs of some examples, (B, …), in double precision."""
        return normal(5, 3, seed=1)

    def targets(self) -> Tensor:
        """Their targets, (B, …)."""
        raise NotImplementedError

    def dense(self, outputs: Tensor, y: Tensor) -> Tensor:
        """The nll of every example, (B,), by other means (`torch.distributions`, say)."""
        raise NotImplementedError

    def likelihood(self) -> Likelihood:
        return self.make().to(F64)

    def test_values_are_those_of_the_counterpart(self) -> None:
        nll = self.likelihood()(self.outputs(), self.targets())
        assert nll.shape == (len(self.outputs()),), "one nll for every example"
        close(nll, self.dense(self.outputs(), self.targets()), "the nll")

    def test_an_example_does_not_depend_on_its_neighbors(self) -> None:
        likelihood, outputs, y = self.likelihood(), self.outputs(), self.targets()
        together = likelihood(outputs, y)
        for i in range(len(outputs)):
            close(likelihood(outputs[i : i + 1], y[i : i + 1])[0], together[i], "an nll alone")

    def test_derivatives_are_right_twice(self) -> None:
        likelihood, y = self.likelihood(), self.targets()
        outputs = self.outputs().requires_grad_()
        assert torch.autograd.gradcheck(lambda z: likelihood(z, y), outputs)
        assert torch.autograd.gradgradcheck(lambda z: likelihood(z, y), outputs)

    def test_it_is_convex_in_the_outputs(self) -> None:
        if not self.convex:
            pytest.skip("not convex")
        likelihood = self.likelihood()
        for outputs, y in zip(self.outputs(), self.targets(), strict=True):

            def nll(z: Tensor, y: Tensor = y) -> Tensor:
                return likelihood(z[None], y[None]).sum()

            hessian = torch.autograd.functional.hessian(nll, outputs)
            hessian = hessian.reshape(outputs.numel(), -1)
            values = torch.linalg.eigvalsh(hessian)
            assert float(values.min()) >= -1e-10 * max(1.0, float(values.max())), (
                "the nll is not convex in the outputs: set convex = False"
            )

    def test_probabilities_are_those_of_its_nll(self) -> None:
        """p(c) ∝ exp(−nll(outputs, c)), for outputs as predictions read them."""
        likelihood, outputs, y = self.likelihood(), self.outputs(), self.targets()
        if not likelihood.takes_labels(y):
            pytest.skip("no classes")
        probabilities = likelihood.probabilities(outputs)
        ones = torch.ones(len(outputs), dtype=F64)
        close(probabilities.sum(-1), ones, "the sum of probabilities")
        outside = {n: t.detach() for n, t in likelihood.outside().items()}
        read = likelihood.rescale(outputs, outside)
        labels = torch.arange(probabilities.shape[-1])
        nll = torch.stack([likelihood(read, label.expand(len(read))) for label in labels], -1)
        close(probabilities, (-nll).softmax(-1), "the probabilities")

    def test_its_parameters_have_gradients(self) -> None:
        likelihood, outputs, y = self.likelihood(), self.outputs(), self.targets()
        read = likelihood.rescale(outputs, likelihood.outside())
        loss = likelihood(read, y).sum()
        for name, parameter in likelihood.named_parameters():
            (gradient,) = torch.autograd.grad(loss, parameter, retain_graph=True, allow_unused=True)
            assert gradient is not None, f"nothing depends on {name}"
            assert bool(gradient.isfinite().all()), f"the gradient of {name} is not finite"
