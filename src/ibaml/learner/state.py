"""What does a learner hold, and which of it is learned?

The model's own parameters are the prior means (or shared weights). Besides them the learner holds
the prior's other parameters (log-variances, say), the rows of a tied head's prior, learned step
sizes and a learned β.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Self

import torch
from torch import Tensor, nn

from ibaml.energy import Likelihood, MetaParameters
from ibaml.execution import (
    Moments,
    NormStats,
    Plan,
    Statistics,
    held,
    norm_buffers,
    plan_norms,
    training,
)
from ibaml.solve import Descent, Solver, resolve_rate
from ibaml.weights import Belief, Layout, PriorParameters, Roles, parameter_key


class LearnerState(nn.Module):
    """The tensors of a learner, which move, save, copy and iterate like those of any module."""

    log_beta: nn.Parameter | None

    def __init__(
        self,
        model: nn.Module,
        likelihood: Likelihood,
        belief: Belief,
        roles: Roles,
        solver: Solver,
        *,
        tie_head: bool,
        init_log_var: float,
        init_beta: float | None,
    ) -> None:
        super().__init__()
        self.likelihood = likelihood
        self.model = model
        self.belief = belief
        self.roles = roles
        self._statistics: Statistics | None = None  # those of the running meta-step
        parameters = dict(model.named_parameters())
        rows = frozenset(roles.head if tie_head else ())
        self.layout = Layout(
            names=roles.adapted,
            shapes=tuple(tuple(parameters[n].shape) for n in roles.adapted),
            rows=rows,
        )
        self._prior = PriorParameters(belief, self.layout, parameters, init_log_var)
        for name, group in self._prior.groups.items():
            self.add_module(name, group)
        reference = parameters[roles.adapted[0]]
        self.log_lr = nn.ParameterDict()
        if isinstance(solver, Descent) and solver.learn_lr:
            slots = self.layout.slots(belief.blocks(self.layout.size))
            rate = resolve_rate(solver.lr, slots, reference.new_zeros(1, slots[-1][2]))
            for name, begin, _ in slots:
                value = float(rate[begin]) if isinstance(rate, Tensor) else rate
                self.log_lr[parameter_key(name)] = nn.Parameter(
                    reference.new_tensor(math.log(value))
                )
        log_beta = None if init_beta is None else reference.new_tensor(math.log(init_beta))
        self.register_parameter("log_beta", None if log_beta is None else nn.Parameter(log_beta))
        self._not_learned = frozenset({*roles.frozen, *rows})
        # parameters that DistributedDataParallel must not wait for
        self._ddp_params_and_buffers_to_ignore = [f"model.{n}" for n in self._not_learned]
        likelihood.to(device=reference.device, dtype=reference.dtype)
        self.train(model.training)

    # --- as a module -----------------------------------------------------------------------------

    def train(self, mode: bool = True) -> Self:
        """Training mode affects only the learner (running statistics); the model stays in
        evaluation mode."""
        with self._held():
            super().train(mode)
            self.model.eval()
        return self

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Exactly the meta-parameters. Frozen weights are in `state_dict`, but not here."""
        dot = "." if prefix else ""
        hidden = {f"{prefix}{dot}model.{n}" for n in self._not_learned}
        with self._held():
            named = list(super().named_parameters(prefix, recurse, remove_duplicate))
        for name, parameter in named:
            if name not in hidden:
                yield name, parameter

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        with self._held():
            return super().state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        with self._held():
            return super().load_state_dict(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        made = memo[id(self)] = type(self).__new__(type(self))
        with self._held():
            made.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        return made

    def _held(self) -> AbstractContextManager[Any]:
        """Inside, no other thread runs the network, so its tensors are the learner's own."""
        return held(self.model, self.likelihood)

    # --- what is read ----------------------------------------------------------------------------

    def weights(self) -> dict[str, nn.Parameter]:
        """The model's parameters by name."""
        with held(self.model):
            return dict(self.model.named_parameters())

    @property
    def reference(self) -> Tensor:
        """A tensor that has the learner's device and dtype."""
        return self.weights()[self.roles.adapted[0]]

    def meta_parameters(self, layout: Layout | None = None) -> MetaParameters:
        """Everything meta-learned that the energy depends on, the prior as flat vectors."""
        layout = self.layout if layout is None else layout
        parameters = self.weights()
        with held(self.likelihood):
            outside = self.likelihood.outside()
            inside = {n: p for n, p in self.likelihood.named_parameters() if n not in outside}
        return MetaParameters(
            prior=self._prior.vectors(layout, parameters),
            shared={n: parameters[n] for n in self.roles.shared},
            likelihood=inside,
            log_beta=self.log_beta,
            outside=outside,
        )

    def constants(self, plan: Mapping[str, NormStats]) -> dict[str, Tensor | None]:
        """What the network reads but nothing learns: frozen weights, and buffers as the plan for
        batch norm's statistics says."""
        parameters = self.weights()
        constants: dict[str, Tensor | None] = {n: parameters[n].detach() for n in self.roles.frozen}
        with held(self.model):
            constants.update((n, b.clone()) for n, b in self.model.named_buffers())
            constants.update(norm_buffers(self.model, plan))
        return constants

    def rate(self, layout: Layout) -> Tensor | None:
        """The learned step sizes as a vector, if there are any."""
        if not len(self.log_lr):
            return None
        rates = [
            self.log_lr[parameter_key(name)].exp().expand(end - begin)
            for name, begin, end in layout.slots(self.belief.blocks(layout.size))
        ]
        return torch.cat(rates)

    def watched(self) -> tuple[tuple[Tensor, int], ...]:
        """The tensors that predictions read and training changes, each with its current version: a
        posterior uses them to notice that it is out of date."""
        with self._held():
            parameters = dict(self.model.named_parameters())
            constant = [parameters[n] for n in (*self.roles.shared, *self.roles.frozen)]
            read = (*constant, *self.likelihood.parameters(), *self.likelihood.buffers())
            return tuple((t, t._version) for t in read)

    # --- batch norm's statistics -----------------------------------------------------------------

    def norm_plan(self, norm_stats: NormStats | None) -> Plan:
        """Which statistics every batch-norm layer uses. Frozen layers always use running ones."""
        roles = self.roles
        with held(self.model):
            return plan_norms(self.model, norm_stats, roles.adapted, roles.shared, roles.frozen)

    @contextmanager
    def one_meta_step(self) -> Iterator[Statistics]:
        """Count all calls inside as one meta-step: batch norm's running statistics move once, at
        the end, by the tasks of all calls. Yields the sums, so that several processes can add
        theirs up before the end."""
        with training(self.model):
            with self._held():
                self._statistics = Statistics(self.model, self.norm_plan("batch"))
            try:
                yield self._statistics
                with self._held():
                    self._statistics.apply()
            finally:
                self._statistics = None

    def add_statistics(self, passes: list[Moments]) -> None:
        """Add what batch norm saw to the running meta-step; without one it is a step by itself."""
        if self._statistics is not None:
            self._statistics.add(passes)
        elif passes:
            with self.one_meta_step() as statistics:
                statistics.add(passes)
