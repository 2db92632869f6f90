"""MetaLearner: beliefs, solver, gradient rule and objective around one `nn.Module`."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn

from ibaml.capture import Captures, waits
from ibaml.checks import (
    check_model,
    check_options,
    check_tasks,
    settle,
)
from ibaml.diagnostics import Diagnostics
from ibaml.energy import (
    Likelihood,
    NllFunction,
    NoiseKind,
    Stream,
    TaskEnergy,
    Theta,
    as_likelihood,
    detached,
    draw_noise,
)
from ibaml.execution import (
    Moments,
    NormStats,
    Plan,
    Precision,
    Runner,
    Statistics,
    Strategy,
    choose,
    held,
    norm_buffers,
    norm_layers,
    plan_norms,
    training,
    watch_moments,
)
from ibaml.gradient import GradientRule, Record, Reptile, Unrolled
from ibaml.labels import as_tensor, encoded, is_numbers
from ibaml.metastep import MetaStep, Reads, Repair, guarded, reaches_outside
from ibaml.objectives import Objective, QueryNll
from ibaml.posterior import Posterior, Posteriors
from ibaml.second_derivatives import check_second_derivatives
from ibaml.seeding import draw_seed
from ibaml.solve import Descent, Solution, Solver, resolve_rate
from ibaml.tasks import Inputs, TaskBatch
from ibaml.weights import (
    Belief,
    Layout,
    PriorParameters,
    Selection,
    assign_roles,
    parameter_key,
)

# what may be chosen anew around the same weights (`MetaLearner.replace`), and what the weights
# themselves depend on
_REPLACEABLE = (
    "solver", "gradient", "objective", "samples", "noise", "beta", "execution", "precision",
    "capture", "diagnose",
)  # fmt: skip
_FIXED = (*_REPLACEABLE, "belief", "likelihood", "roles", "layout", "adapts_head")


def _wanted(batch: TaskBatch) -> bool:
    """Whether somebody wants gradients of the tasks."""
    tensors = (batch.support_x, batch.support_y, batch.query_x, batch.query_y)
    return any(t.requires_grad for t in tensors)


class MetaLearner(nn.Module):
    """Learns a prior over the weights of ``model`` from batches of tasks.

    ``learner(batch)`` is an ordinary differentiable scalar, so any PyTorch training loop works
    around it; ``learner.adapt(x, y)`` gives the posterior of a new task. The model's own parameters
    are the prior means (or the shared weights): training the learner trains them in place. The
    model runs in evaluation mode throughout: dropout is off, because a task's energy has to be one
    deterministic function; batch norm uses the statistics that ``norm_stats`` says. Adapting and
    predicting may be done by any number of threads, training by one at a time.

    Args:
        model: any module with one input and one output tensor.
        belief: `Point`, `DiagonalGaussian`, `LowRankGaussian`, or any `Belief`.
        solver: how a task is solved.
        gradient: how the meta-parameters learn from the solution.
        objective: the meta-loss (default: query nll).
        likelihood: None (categorical for integer targets, Gaussian with σ = 1 for floating ones), a
            `Likelihood`, or any callable (outputs, y) -> nll per example.
        adapt, freeze: which weights are adapted to every task, and which nobody changes; the rest
            is shared. See `ibaml.weights.assign_roles`.
        tie_head: tie the prior of the last linear layer over its rows, so that a prior trained on W
            classes serves any number of them.
        samples: Monte-Carlo samples S of the energy.
        noise: ``"independent"`` or ``"antithetic"`` pairs.
        beta: β of κ = β/N; 1 is Bayes, below 1 a tempered posterior.
        learn_beta: meta-learn log β, from ``beta`` (not under the first-order rule).
        init_log_var: ρ at the start, a number for all weights.
        execution: ``"auto"``, ``"loop"``, ``"vmap"``, ``"fold"`` or ``"head"``.
        precision: ``"full"``, or ``"bfloat16"`` for activations and convolutions where tasks are
            folded (an accelerator): about half the memory, and rougher gradients
            (benchmarks/results/meta_step_h200.txt).
        capture: record the meta-step as one CUDA graph on the third batch of a kind and replay it
            from then on; None: on an accelerator, where the model can be recorded and the solver
            does not stop early (or only the head is adapted). A recording keeps the memory of its
            meta-step.
        diagnose: evaluate E and ∇E at every solution for `diagnostics` (one more evaluation).

    Most people build one with `ibaml.methods`.
    """

    log_beta: nn.Parameter | None

    def __init__(
        self,
        model: nn.Module,
        belief: Belief,
        solver: Solver,
        gradient: GradientRule,
        objective: Objective | None = None,
        likelihood: NllFunction | None = None,
        *,
        adapt: Selection = "all",
        freeze: Selection | None = None,
        tie_head: bool = False,
        samples: int = 5,
        noise: NoiseKind = "independent",
        beta: float = 1.0,
        learn_beta: bool = False,
        init_log_var: float = -6.0,
        execution: Strategy = "auto",
        precision: Precision = "full",
        capture: bool | None = None,
        diagnose: bool = True,
    ) -> None:
        super().__init__()
        if not isinstance(model, nn.Module):
            raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
        self.likelihood: Likelihood = as_likelihood(likelihood)
        check_options(
            belief, solver, gradient, objective, self.likelihood, samples, noise, beta,
            init_log_var, learn_beta,
        )  # fmt: skip
        self.roles = assign_roles(model, adapt, freeze)
        self.selection = adapt
        self.inputs: Inputs | None = None  # how raw inputs are prepared, where that is known
        check_model(model, self.roles, gradient, tie_head)
        self.model = model
        self.belief = belief
        self.solver = solver
        self.gradient = gradient
        self.objective = QueryNll() if objective is None else objective
        self.adapts_head = isinstance(adapt, str) and adapt == "head"
        self.samples = samples if belief.stochastic else 1
        self.noise: NoiseKind = noise
        self.beta = beta
        self.diagnose = diagnose
        self.execution: Strategy = execution
        self.precision: Precision = precision
        self.capture = capture
        # how the last training call ran; what a call does is decided anew by every one
        self._run = choose(model, execution, self.roles.adapted, precision=precision)
        self._settled: dict[tuple[Any, ...], Runner] = {}  # by kind of tasks
        self._examined: set[tuple[Any, ...]] = set()  # kinds whose second derivatives were checked
        self._warned: set[str] = set()
        self._diagnostics: Diagnostics | None = None
        self._statistics: Statistics | None = None  # being gathered
        self._captures = Captures()

        parameters = dict(model.named_parameters())
        rows = frozenset(self.roles.head if tie_head else ())
        self.layout = Layout(
            names=self.roles.adapted,
            shapes=tuple(tuple(parameters[n].shape) for n in self.roles.adapted),
            rows=rows,
        )
        self._prior = PriorParameters(belief, self.layout, parameters, init_log_var)
        for name, group in self._prior.groups.items():
            self.add_module(name, group)
        reference = parameters[self.roles.adapted[0]]
        self.log_lr = nn.ParameterDict()
        if isinstance(solver, Descent) and solver.learn_lr:
            slots = self.layout.slots(belief.blocks(self.layout.size))
            rate = resolve_rate(solver.lr, slots, reference.new_zeros(1, slots[-1][2]))
            for name, begin, _ in slots:
                value = float(rate[begin]) if isinstance(rate, Tensor) else rate
                self.log_lr[parameter_key(name)] = nn.Parameter(
                    reference.new_tensor(math.log(value))
                )
        log_beta = nn.Parameter(reference.new_tensor(math.log(beta))) if learn_beta else None
        self.register_parameter("log_beta", log_beta)
        self._not_learned = frozenset({*self.roles.frozen, *rows})
        # what DistributedDataParallel must not wait for
        self._ddp_params_and_buffers_to_ignore = [f"model.{n}" for n in self._not_learned]
        self.likelihood.to(device=reference.device, dtype=reference.dtype)
        self.train(model.training)

    # --- the module ------------------------------------------------------------------------------

    def train(self, mode: bool = True) -> Self:
        """Training mode concerns the learner (running statistics); the model stays in evaluation
        mode."""
        with self._held():
            super().train(mode)
            self.model.eval()
        return self

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Exactly the meta-parameters: what is frozen is part of the state, but not of these."""
        dot = "." if prefix else ""
        hidden = {f"{prefix}{dot}model.{n}" for n in self._not_learned}
        with self._held():
            found = list(super().named_parameters(prefix, recurse, remove_duplicate))
        for name, parameter in found:
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
        """Inside, no other thread runs the network: its tensors are the learner's."""
        return held(self.model, self.likelihood)

    def _tensors(self) -> dict[str, nn.Parameter]:
        """The model's parameters by name."""
        with held(self.model):
            return dict(self.model.named_parameters())

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _FIXED and (name in self.__dict__ or name in self.__dict__.get("_modules", {})):
            remedy = (
                f"learner.replace({name}=…) gives a checked learner with another one that shares "
                "the weights"
                if name in _REPLACEABLE
                else "the weights depend on it: make another learner"
            )
            raise AttributeError(
                f"{name} is fixed when a learner is made, so that its choices fit together: "
                f"{remedy}"
            )
        super().__setattr__(name, value)

    def replace(self, **choices: Any) -> MetaLearner:
        """A checked learner with other choices that shares this one's weights: training one trains
        both.

        >>> import ibaml
        >>> learner = ibaml.methods.ibaml(ibaml.nn.mlp(1, 1))
        >>> learner.replace(gradient=ibaml.FirstOrder(), samples=2).samples
        2
        """
        if unknown := [name for name in choices if name not in _REPLACEABLE]:
            raise TypeError(
                f"{unknown[0]} cannot be replaced: only {', '.join(_REPLACEABLE)} can (the rest is "
                "fixed with the weights: make another learner)"
            )
        for name, what in (
            ("solver", "solve"),
            ("gradient", "__call__"),
            ("objective", "__call__"),
        ):
            if name in choices and not hasattr(choices[name], what):
                raise TypeError(
                    f"{name} must be an object such as one of ibaml's, got {choices[name]!r}"
                )
        if "beta" in choices and self.log_beta is not None:
            raise ValueError("beta is learned here, as log_beta: set that parameter instead")
        now = {name: choices.get(name, getattr(self, name)) for name in _REPLACEABLE}
        learned = isinstance(now["solver"], Descent) and now["solver"].learn_lr
        if learned and not len(self.log_lr):
            raise ValueError(
                "solver: a learned step size is a weight of its own, and this learner has none: "
                "make another learner with learn_lr=True"
            )
        # Reptile has no meta-loss, so one it was not given is not asked about
        asked = "objective" in choices or not isinstance(now["gradient"], Reptile)
        check_options(
            self.belief,
            now["solver"],
            now["gradient"],
            now["objective"] if asked else None,
            self.likelihood,
            now["samples"],
            now["noise"],
            now["beta"],
            0.0,
            self.log_beta is not None,
        )
        check_model(self.model, self.roles, now["gradient"], bool(self.layout.rows))
        if now["objective"] is None:
            now["objective"] = QueryNll()
        now["samples"] = now["samples"] if self.belief.stochastic else 1
        run = choose(self.model, now["execution"], self.roles.adapted, precision=now["precision"])
        made = copy.copy(self)
        made.__dict__.update(now, _run=run, _settled={}, _examined=set(), _warned=set())
        return made

    def __getstate__(self) -> dict[str, Any]:
        # the record of the last call holds tensors of a graph, and the meta-step that is going on
        # is not the copy's: it starts without them. What other threads add to is copied at once
        new = {"_diagnostics": None, "_captures": Captures(), "_statistics": None}
        seen = ("_settled", "_examined", "_warned")
        return {**self.__dict__, **new, **{name: getattr(self, name).copy() for name in seen}}

    @property
    def diagnostics(self) -> Diagnostics:
        """What happened in the last call, per task."""
        if self._diagnostics is None:
            raise RuntimeError("no diagnostics yet: call the learner on a TaskBatch first")
        return self._diagnostics

    @property
    def strategy(self) -> str:
        """How weight sets run through the network (``"loop"``, ``"vmap"``, ``"fold"``, ``"head"``),
        and whether meta-steps are replayed, or why they cannot be."""
        if self._captures:
            return f"{self._run.strategy}, captured"
        refused = self._captures.refused
        return self._run.strategy + (f", not recorded: {refused}" if refused else "")

    # --- the meta-loss ---------------------------------------------------------------------------

    def forward(self, batch: TaskBatch, generator: torch.Generator | None = None) -> Tensor:
        """The mean meta-loss of the batch; ``backward()`` leaves the method's meta-gradient.

        One seed is drawn from the generator; task t's noise depends on it and ``keys[t]`` alone. A
        task that diverges is left out and reported in `diagnostics`; the loss is NaN, with zero
        gradients, if all do.
        """
        if not isinstance(batch, TaskBatch):
            raise TypeError(f"a TaskBatch is needed, got {type(batch).__name__}")
        wanted = torch.is_grad_enabled()  # inference_mode(False) would switch it on
        with training(self.model), torch.inference_mode(False), torch.set_grad_enabled(wanted):
            if batch.support_x.is_inference():
                batch = batch.clone()
            return self._forward(batch, draw_seed(generator))

    def _forward(self, batch: TaskBatch, seed: int) -> Tensor:
        self._run = self.examine(batch)
        step = self._replayed(batch, seed, self._run)
        if step is None or (self._may_look(batch) and bool(step.left_out.any())):
            step = self._sound_step(batch, seed)
        blocks = self.belief.slices(self.layout.for_classes(batch.classes or 0).size)
        kept = replace(step, loss=step.loss.detach(), passes=[], reads=Reads())
        self._diagnostics = Diagnostics(kept, blocks, batch.task_keys)
        if step.passes and self._statistics is not None:
            self._statistics.add(step.passes)
        elif step.passes:
            with self.one_meta_step() as statistics:
                statistics.add(step.passes)
        return step.loss

    def examine(self, batch: TaskBatch) -> Runner:
        """Check the tasks and the model on them, once for every kind of tasks: shapes and labels,
        how weight sets run through the network, and, where gradients are wanted, the second
        derivatives that the gradient rule takes. What is wrong is refused or said. Returns how
        weight sets run."""
        self.model.eval()
        kind, run = self._check(batch.support_x, batch.support_y, batch.classes)
        if not torch.is_grad_enabled() or kind in self._examined:
            return run
        layout = self.layout.for_classes(batch.classes or 0)
        noise = self._draw(0, (0,), layout.size, Stream.ADAPT, 1)
        with torch.no_grad():
            x, y = batch.support_x[:1], batch.support_y[:1]
            energy = detached(self.energy(x, y, noise, layout, run=run))
            start = self.belief.start(energy.meta.prior, 1)
        if wrong := check_second_derivatives(energy, start, self.gradient):
            self._warn(wrong)
        self._examined.add(kind)
        return run

    def _warn(self, sentence: str) -> None:
        """Say something once."""
        if sentence not in self._warned:
            warnings.warn(sentence, RuntimeWarning, stacklevel=4)
            self._warned.add(sentence)

    def _may_look(self, batch: TaskBatch) -> bool:
        return isinstance(self.gradient, Unrolled) or batch.support_x.device.type == "cpu"

    def _sound_step(self, batch: TaskBatch, seed: int) -> MetaStep:
        """The meta-step, without what is not finite.

        That cannot be masked out of a graph (0 · NaN is NaN): it is built again without those
        tasks. On a device that would mean waiting for it at every step; there the start takes the
        place of a solution that diverged, which leaves nothing to mask but data that is ill at the
        start already.
        """
        step = self.meta_step(batch, seed)
        left_out = step.left_out
        if not self._may_look(batch) or not bool(left_out.any()):
            return self._with_sound_gradient(step, batch, seed, torch.arange(len(batch)))
        if bool(left_out.all()):
            anchor = torch.stack([p.sum() for p in self.parameters()]).sum()
            return replace(step, loss=torch.where(left_out.any(), float("nan"), anchor), passes=[])
        kept = ~left_out
        again = self.meta_step(batch.select(kept), seed)
        again = replace(
            again, left_out=left_out, record=step.record, rebuilt=(again.record, kept.clone())
        )
        where = kept.nonzero()[:, 0].cpu()
        return self._with_sound_gradient(again, batch.select(kept), seed, where)

    def _with_sound_gradient(
        self, step: MetaStep, batch: TaskBatch, seed: int, where: Tensor
    ) -> MetaStep:
        """The step, whose tasks stand at ``where`` among all: one whose loss is finite and whose
        gradient is not is left out as well, when ``backward()`` finds it."""
        if not step.loss.requires_grad or torch._C._are_functorch_transforms_active():
            return step
        if _wanted(batch):
            return step
        if reaches_outside(step.loss, list(self.parameters())):
            return step  # and of tensors of their own
        if not self._may_look(batch):
            return guarded(step, None)

        def without(ill: Tensor) -> MetaStep | None:
            step.left_out[where[ill].to(step.left_out.device)] = True
            return None if bool(ill.all()) else self.meta_step(batch.select(~ill), seed)

        def alone(task: int) -> MetaStep:
            return self.meta_step(batch.select([task]), seed)

        return guarded(step, Repair(len(batch), alone, without))

    def _replayed(self, batch: TaskBatch, seed: int, run: Runner) -> MetaStep | None:
        """The meta-step by replay, where it was (or can be) recorded."""
        if self.capture is False or not torch.is_grad_enabled():
            return None
        if _wanted(batch):
            return None
        if self.capture is None and waits(self.solver) and run.head is None:
            return None
        if not batch.support_x.is_cuda:
            if self.capture:
                raise ValueError("capture=True is for a CUDA device: move model and tasks to it")
            return None
        choices = (
            self.belief, self.solver, self.gradient, self.objective, self.samples, self.noise,
            self.beta, self.diagnose, self.training, run,
        )  # fmt: skip
        insist = bool(self.capture)
        return self._captures.step(self, self.meta_step, choices, batch, seed, insist)

    def meta_step(self, batch: TaskBatch, seed: int | Tensor) -> MetaStep:
        """The meta-step without a look at values; ``seed`` may be the tasks' roots."""
        losses, record, passes, reads = self._losses(batch, seed)
        left_out = ~losses.detach().isfinite()
        if record.solution is not None:
            left_out = left_out | record.solution.diverged
        total = torch.where(left_out, torch.zeros_like(losses), losses).sum()
        count = (~left_out).sum()
        loss = torch.where(count > 0, total / count.clamp(min=1), float("nan"))
        return MetaStep(loss, left_out.clone(), record, passes, reads=reads)

    @contextmanager
    def one_meta_step(self) -> Iterator[Statistics]:
        """Count all calls inside as one meta-step: batch norm's running statistics move once, at
        the end, over the tasks of all of them. Yields the sums, to be added up over processes
        before the end."""
        with training(self.model):
            with self._held():
                self._statistics = Statistics(self.model, self.norm_plan("batch"))
            try:
                yield self._statistics
                with self._held():
                    self._statistics.apply()
            finally:
                self._statistics = None

    def problem(self, batch: TaskBatch, seed: int | Tensor) -> tuple[TaskEnergy, TaskEnergy]:
        """The energies of the support sets (what is solved) and of the query sets (what the
        objective reads), with the noise that belongs to the seed."""
        layout = self.layout.for_classes(batch.classes or 0)
        x, y = batch.support_x, batch.support_y
        _, run = self._check(x, y, batch.classes)
        support = self._support(x, y, seed, batch.task_keys, layout, run=run)
        noise = support.noise
        if self.objective.noise == "fresh":
            samples = self.objective.samples or self.samples
            noise = self._draw(seed, batch.task_keys, layout.size, Stream.META, samples)
        return support, replace(
            support, x=batch.query_x, y=batch.query_y, noise=noise, predicts=True
        )

    def _losses(
        self, batch: TaskBatch, seed: int | Tensor
    ) -> tuple[Tensor, Record, list[Moments], Reads]:
        """The meta-loss of every task, what happened, what the batch-norm layers saw, and which
        tensors all gradients go through."""
        support, query = self.problem(batch, seed)
        rate = self._rate(support.layout)
        outside = support.meta.outside
        reads = Reads.of((*support.theta, *outside.values(), *(() if rate is None else (rate,))))
        inner = iter(reads.inner)
        theta = tuple(next(inner) for _ in support.theta)
        outside = {name: next(inner) for name in outside}
        rate = None if rate is None else next(inner)
        support, query = support.bind(theta), query.bind(theta)
        query = replace(query, meta=replace(query.meta, outside=outside))
        start = self.belief.start(support.meta.prior, len(batch))
        record = Record()
        v = self.gradient(support, start, self.solver, record, rate=rate, examine=self.diagnose)
        watched = self.model if self.training else nn.Module()
        with watch_moments(watched) as passes:
            if not isinstance(self.gradient, Reptile):
                return self.objective(v, support, query), record, passes, reads
            if norm_layers(watched):
                with torch.no_grad():
                    support.outputs(v)  # Reptile has no query pass: its statistics are these
            return (start - v).square().sum(-1) / 2, record, passes, reads

    def _support(
        self,
        x: Tensor,
        y: Tensor,
        seed: int | Tensor,
        keys: tuple[int, ...],
        layout: Layout,
        plan: Mapping[str, NormStats] | None = None,
        *,
        run: Runner,
    ) -> TaskEnergy:
        """The energy of support sets, with the noise of adaptation."""
        draw = partial(self._draw, seed, keys, layout.size, Stream.ADAPT, self.samples)
        energy = self.energy(x, y, draw(), layout, plan, run)
        return replace(energy, redraw=lambda step: draw(step=step + 1))

    def energy(
        self,
        x: Tensor,
        y: Tensor,
        noise: Tensor,
        layout: Layout | None = None,
        plan: Mapping[str, NormStats] | None = None,
        run: Runner | None = None,
    ) -> TaskEnergy:
        """The energy of tasks with support inputs x (T, N, …), targets y and noise (T, S, n), whose
        weight sets run as ``run`` says, or else as is found out here."""
        layout = self.layout if layout is None else layout
        run = self._settle(x, y, layout, plan) if run is None else run
        plan = self.norm_plan("batch") if plan is None else plan
        parameters = self._tensors()
        constants: dict[str, Tensor | None] = {n: parameters[n].detach() for n in self.roles.frozen}
        with held(self.model):
            constants.update((n, b.clone()) for n, b in self.model.named_buffers())
            constants.update(norm_buffers(self.model, plan))
        return TaskEnergy(
            model=self.model,
            run=run,
            belief=self.belief,
            layout=layout,
            likelihood=self.likelihood,
            meta=self.theta(layout),
            constants=constants,
            x=x,
            y=y,
            noise=noise,
            weight=self.belief.weight(1.0 if self.log_beta is not None else self.beta, x.shape[1]),
        )

    def theta(self, layout: Layout | None = None) -> Theta:
        """Everything meta-learned that the energy depends on, the prior as flat vectors."""
        layout = self.layout if layout is None else layout
        parameters = self._tensors()
        with held(self.likelihood):
            outside = self.likelihood.outside()
            inside = {n: p for n, p in self.likelihood.named_parameters() if n not in outside}
        return Theta(
            prior=self._prior.vectors(layout, parameters),
            shared={n: parameters[n] for n in self.roles.shared},
            likelihood=inside,
            log_beta=self.log_beta,
            outside=outside,
        )

    # --- a new task ------------------------------------------------------------------------------

    def adapt(
        self,
        x: Tensor | np.ndarray,
        y: Tensor | np.ndarray | Sequence[Any],
        generator: torch.Generator | None = None,
        *,
        classes: int | Sequence[Any] | None = None,
        norm_stats: NormStats | None = None,
    ) -> Posterior:
        """The posterior of one task from its support set x (N, …), y (N, …), tensors or arrays; the
        learner is not changed. Without examples (N = 0) the posterior is the prior.

        With a tied head labels may be anything (text, whole numbers, true and false): they come
        back as they went in, and ``posterior.classes`` names the columns of probabilities. Else
        they are 0 … W−1, the head's rows.

        Args:
            generator: where the noise's seed comes from; without one it is always the same.
            classes: for a tied head, the names of the classes in the order of the columns, or their
                number (labels are then 0 … number − 1); those that occur, sorted, unless given.
            norm_stats: batch norm's statistics: ``"batch"``, ``"support"`` or ``"running"``. The
                default is ``"running"`` for shared layers and ``"support"`` for adapted ones.
        """
        like = self._reference()
        x = as_tensor(x, "x", like.dtype)
        names: tuple[Any, ...] | None = None
        if self.layout.rows and not is_numbers(y):
            y, names = encoded(y, range(classes) if isinstance(classes, int) else classes)
        elif isinstance(y, Tensor) or np.asarray(y).dtype.kind in "fiub":
            y = as_tensor(y, "y", like.dtype)
            y = y.long() if y.dtype == torch.bool else y
        else:
            raise ValueError(
                "y holds labels that are no numbers: a head with a row for every class takes 0 … "
                "W − 1; make the learner with tie_head=True for labels of any kind"
            )
        if x.dim() < 1 or y.dim() < 1 or x.shape[0] != y.shape[0]:
            raise ValueError(
                "x and y need one entry per example: x has shape "
                f"{tuple(x.shape)}, y has shape {tuple(y.shape)}"
            )
        for name, t in (("x", x), ("y", y)):
            if t.is_floating_point() and not bool(t.isfinite().all()):
                raise ValueError(f"{name} holds a NaN or an infinity")
        if 0 in x.shape[1:]:
            raise ValueError(f"x has shape {tuple(x.shape)}: an example holds no number")
        if self.likelihood.takes_labels(y) and y.dim() == 2 and y.shape[1] == 1:
            raise ValueError(
                f"y has shape {tuple(y.shape)}; labels are one number per example, (N,): "
                "use y.squeeze(1)"
            )
        seed = 0 if generator is None else draw_seed(generator)
        count = len(names) if names else None
        task = self._adapt(x[None], y[None], seed, (0,), count, norm_stats)
        if task.solution is not None and bool(task.solution.diverged.any()):
            warnings.warn(
                "adapt: the solver diverged, so the posterior is the prior; lower lr, or raise "
                "init_log_var",
                RuntimeWarning,
                stacklevel=2,
            )
        return Posterior(task, names)

    def adapt_all(
        self, batch: TaskBatch, *, seed: int = 0, norm_stats: NormStats | None = None
    ) -> Posteriors:
        """The posteriors of all tasks of the batch from their support sets, solved together. Task
        t's noise depends on ``seed`` and ``batch.keys[t]`` alone. A task that diverged has the
        prior as its posterior, and ``solution.diverged`` says so."""
        x, y = batch.support_x, batch.support_y
        return self._adapt(x, y, seed, batch.task_keys, batch.classes, norm_stats)

    def _adapt(
        self,
        x: Tensor,
        y: Tensor,
        seed: int,
        keys: tuple[int, ...],
        classes: int | None,
        norm_stats: NormStats | None,
    ) -> Posteriors:
        with torch.inference_mode(False), torch.no_grad():
            self.model.eval()
            plan = self.norm_plan(norm_stats)
            watched = self.watched()
            x, y = x.clone(), y.clone()
            top = None if y.is_floating_point() or y.shape[1] == 0 else int(y.max()) + 1
            if self.layout.rows and classes is None:
                if top is None:
                    raise ValueError(
                        "a tied head needs to know the number of classes: give labels, or classes="
                    )
                classes = top
            layout = self.layout.for_classes(classes or 0)
            solution: Solution | None = None
            if x.shape[1]:
                _, run = self._check(x, y, top, layout, plan)
                energy = self._support(x, y, seed, keys, layout, plan, run=run)
                start = self.belief.start(energy.meta.prior, len(x))
                solution = self.solver.solve(
                    detached(energy), start, rate=self._rate(layout), examine=self.diagnose
                )
                v = solution.value
            else:  # no examples: nothing to solve, and no support statistics
                plan = {n: "running" if k == "support" else k for n, k in plan.items()}
                x, y = (t.new_zeros((len(t), 1, *t.shape[2:])) for t in (x, y))
                run = self._run.plain()  # nothing to try a faster way on
                energy = self._support(x, y, seed, keys, layout, plan, run=run)
                v = self.belief.start(energy.meta.prior, len(x))
            v = v.detach().clone()
            return Posteriors(energy, v, plan, seed, keys, self.noise, watched, solution, self)

    def watched(self) -> tuple[tuple[Tensor, int], ...]:
        """What predictions of a posterior read besides it: tensors that training changes, each with
        its version now."""
        with self._held():
            parameters = dict(self.model.named_parameters())
            constant = [parameters[n] for n in (*self.roles.shared, *self.roles.frozen)]
            read = (*constant, *self.likelihood.parameters(), *self.likelihood.buffers())
            return tuple((t, t._version) for t in read)

    def save(self, path: str | Path) -> Path:
        """Write the learner to a file, complete: weights, choices, how inputs are prepared.
        `ibaml.load` reads it; nothing in it executes."""
        from ibaml.artefact import save_learner

        return save_learner(self, path)

    def norm_plan(self, norm_stats: NormStats | None) -> Plan:
        """Which statistics every batch-norm layer uses; frozen layers always their running ones."""
        roles = self.roles
        with held(self.model):
            return plan_norms(self.model, norm_stats, roles.adapted, roles.shared, roles.frozen)

    # --- parts -----------------------------------------------------------------------------------

    def _draw(
        self,
        seed: int | Tensor,
        keys: tuple[int, ...],
        size: int,
        stream: Stream,
        samples: int,
        step: int = 0,
    ) -> Tensor:
        like = self._reference()
        if not self.belief.stochastic:
            return like.new_zeros((len(keys), 1, 0))
        return draw_noise(
            seed,
            keys,
            stream,
            samples,
            self.belief.noise_size(size),
            self.noise,
            step=step,
            device=like.device,
            dtype=like.dtype,
        )

    def _reference(self) -> Tensor:
        """A tensor of the learner's device and dtype."""
        return self._tensors()[self.roles.adapted[0]]

    def _rate(self, layout: Layout) -> Tensor | None:
        """The learned step sizes as a vector, where there are any."""
        if not len(self.log_lr) or not getattr(self.solver, "learn_lr", False):
            return None
        rates = [
            self.log_lr[parameter_key(name)].exp().expand(end - begin)
            for name, begin, end in layout.slots(self.belief.blocks(layout.size))
        ]
        return torch.cat(rates)

    @torch.no_grad()
    def _check(
        self,
        x: Tensor,
        y: Tensor,
        classes: int | None,
        layout: Layout | None = None,
        plan: Mapping[str, NormStats] | None = None,
    ) -> tuple[tuple[Any, ...], Runner]:
        """Check tasks once for every kind of them, on the first of the batch, and choose how weight
        sets run through the network. Returns the kind and the choice."""
        like = self._reference()
        tensors = [(t.shape[1:], t.dtype, t.device) for t in (x, y)]
        kind = (like.dtype, like.device, *tensors, classes, str(plan))
        if kind not in self._settled:
            layout = self.layout.for_classes(classes or 0) if layout is None else layout
            run = self._settle(x, y, layout, plan)
            noise = self._draw(0, (0,), layout.size, Stream.ADAPT, 1)
            energy = self.energy(x[:1], y[:1], noise, layout, plan, run)
            start = self.belief.start(energy.meta.prior, 1)
            check_tasks(energy, start, classes, self.solver, self.adapts_head)
            self._settled[kind] = run
        return kind, self._settled[kind]

    def _settle(
        self, x: Tensor, y: Tensor, layout: Layout, plan: Mapping[str, NormStats] | None
    ) -> Runner:
        """How weight sets run through the network here, tried on two tasks and two samples."""
        size = math.prod(x.shape[1:])
        chosen = choose(
            self.model, self.execution, self.roles.adapted, x.device.type, self.precision, size
        )
        two = torch.cat([x[:1], x[-1:]]), torch.cat([y[:1], y[-1:]])
        noise = self._draw(0, (0, 1), layout.size, Stream.ADAPT, 2)
        energy = self.energy(*two, noise, layout, plan, chosen)
        start = self.belief.start(energy.meta.prior, 2)
        taken, set_aside = settle(energy, start, chosen, self.execution)
        if set_aside:
            self._warn(
                f"{set_aside} for this model and these inputs, so the slower way is taken "
                f'({taken.strategy}; execution="loop" takes the loop without a trial)'
            )
        return taken

    def extra_repr(self) -> str:
        counts = ", ".join(
            f"{len(getattr(self.roles, r))} {r}" for r in ("adapted", "shared", "frozen")
        )
        return f"{self.belief}\n{self.solver}\n{self.gradient}\n{self.objective}\nweights: {counts}"
