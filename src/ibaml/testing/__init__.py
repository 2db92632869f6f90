"""Is your own belief, solver, gradient rule or likelihood right? Suites for pytest.

A test is a short subclass that makes the object and computes its dense counterpart; the test
methods are inherited. ibaml's own objects are tested by the same classes.

    from ibaml.testing import BeliefSuite

    class TestMine(BeliefSuite):
        def make(self):
            return MyBelief()

        def moments(self, v, n):
            return v[:, :n], torch.diag_embed(v[:, n:].exp())
"""

from ibaml.testing.belief import BeliefSuite
from ibaml.testing.gradient import GradientRuleSuite
from ibaml.testing.likelihood import LikelihoodSuite
from ibaml.testing.solver import SolverSuite

__all__ = ["BeliefSuite", "GradientRuleSuite", "LikelihoodSuite", "SolverSuite"]
