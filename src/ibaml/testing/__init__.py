"""Is a belief, a solver, a gradient rule or a likelihood of one's own right? Suites for pytest.

A test is a subclass of a few lines that says how to make the object, and what its dense counterpart
is; the test methods are inherited. ibaml's own are tested by the same classes.

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
