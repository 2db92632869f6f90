"""What is a learner? `MetaLearner`: belief, solver, gradient rule, objective and one module."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ibaml.arguments import check_module
from ibaml.capture import Captures
from ibaml.checks import check_model, check_options, check_running
from ibaml.diagnostics import Diagnostics
from ibaml.energy import (
    NllFunction,
    NoiseKind,
    Stream,
    TaskEnergy,
    as_likelihood,
    draw_noise,
)
from ibaml.execution import (
    Execution,
    NormStats,
    Precision,
    Runner,
    choose,
    norm_layers,
    training,
    watch_moments,
)
from ibaml.gradient import GradientRule, Record
from ibaml.heads.points import gaussian_points
from ibaml.learner.adapted import adapted
from ibaml.learner.choices import FIXED, default_objective, fixed, replaced
from ibaml.learner.finite import FiniteStep, may_look
from ibaml.learner.kinds import Kinds
from ibaml.learner.replay import replayed
from ibaml.learner.state import LearnerState
from ibaml.learner.support import support_set
from ibaml.metastep import MetaStep, Reads
from ibaml.objectives import Objective, as_objective
from ibaml.posterior import Posterior, Posteriors
from ibaml.seeding import draw_seed
from ibaml.solve import DualNewton, Solver
from ibaml.tasks import Inputs, TaskBatch
from ibaml.weights import Belief, Layout, Selection, assign_roles
from ibaml.words import ObjectiveName

_META_POINTS = 256  # that stand for a Gaussian head's outputs in the meta-loss


class MetaLearner(LearnerState):
    """Learns a prior over the weights of ``model`` from batches of tasks.

    ``learner(batch)`` is an ordinary differentiable scalar, so it works in any PyTorch training
    loop; ``learner.adapt(x, y)`` returns the posterior of a new task. The model's own parameters
    are the prior means (or the shared weights): training the learner trains them in place. The
    model always runs in evaluation mode: dropout is off, because a task's energy has to be one
    deterministic function, and ``norm_stats`` says which statistics batch norm uses. Any number of
    threads may adapt and predict; only one at a time may train.

    Args:
        model: any module with one input and one output tensor.
        belief: `Point`, `DiagonalGaussian`, `LowRankGaussian`, or any `Belief`.
        solver: how a task is solved.
        gradient: how the meta-parameters learn from the solution.
        objective: the meta-loss, an object, or ``"query"`` (the default), ``"predictive"`` or
            ``"abml"``.
        likelihood: None (categorical for integer targets, Gaussian with σ = 1 for floating ones), a
            `Likelihood`, or any callable (outputs, y) -> nll per example.
        adapt, freeze: which weights are adapted to every task, and which never change; the rest
            is shared. See `ibaml.weights.assign_roles`.
        tie_head: tie the prior of the last linear layer over its rows, so that a prior trained on W
            classes serves any number of them.
        samples: Monte-Carlo samples S of the energy.
        noise: ``"independent"`` or ``"antithetic"`` pairs.
        beta: β of κ = β/N; 1 is Bayes, below 1 a tempered posterior.
        learn_beta: meta-learn log β, starting from ``beta`` (not under the first-order rule).
        init_log_var: the initial ρ, one number for all weights.
        execution: ``"auto"``, ``"loop"``, ``"vmap"``, ``"fold"`` or ``"head"``.
        precision: ``"full"``, or ``"bfloat16"`` for activations and convolutions where tasks are
            folded (on an accelerator): about half the memory, less accurate gradients
            (benchmarks/results/meta_step_h200.txt).
        capture: record the meta-step as one CUDA graph on the third batch of a kind and replay it
            from then on. None does so on an accelerator, if the model can be recorded and the
            solver does not stop early (or only the head is adapted). A recording keeps the memory
            of its meta-step.
        diagnose: evaluate E and ∇E at every solution for `diagnostics` (one more evaluation).

    Most people build one with `ibaml.methods`.
    """

    def __init__(
        self,
        model: nn.Module,
        belief: Belief,
        solver: Solver,
        gradient: GradientRule,
        objective: Objective | ObjectiveName | None = None,
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
        execution: Execution = "auto",
        precision: Precision = "full",
        capture: bool | None = None,
        diagnose: bool = True,
    ) -> None:
        check_module(model)
        objective = as_objective(objective)
        scored = as_likelihood(likelihood)
        check_options(
            belief, solver, gradient, objective, scored, samples, noise, beta, init_log_var,
            learn_beta,
        )  # fmt: skip
        check_running(execution, precision, capture, diagnose)
        roles = assign_roles(model, adapt, freeze)
        check_model(model, roles, gradient, tie_head)
        super().__init__(
            model, scored, belief, roles, solver, tie_head=tie_head, init_log_var=init_log_var,
            init_beta=beta if learn_beta else None,
        )  # fmt: skip
        self.selection = adapt
        self.adapts_head = isinstance(adapt, str) and adapt == "head"
        self.inputs: Inputs | None = None  # how raw inputs are prepared, if known
        self.solver = solver
        self.gradient = gradient
        self.objective = default_objective(gradient) if objective is None else objective
        self.samples = samples if belief.stochastic else 1
        self.noise: NoiseKind = noise
        self.beta = beta
        self.diagnose = diagnose
        self.execution: Execution = execution
        self.precision: Precision = precision
        self.capture = capture
        # how the last training call ran; every call decides again
        self._run = choose(model, execution, roles.adapted, precision=precision)
        self._kinds = Kinds()
        self._diagnostics: Diagnostics | None = None
        self._captures = Captures()

    # --- its choices -----------------------------------------------------------------------------

    def __setattr__(self, name: str, value: Any) -> None:
        if name in FIXED and (name in self.__dict__ or name in self.__dict__.get("_modules", {})):
            raise fixed(name)
        super().__setattr__(name, value)

    def replace(self, **choices: Any) -> MetaLearner:
        """A checked learner with other choices that shares this one's weights: training one trains
        both.

        >>> import ibaml
        >>> learner = ibaml.methods.ibaml(ibaml.nn.mlp(1, 1), posterior="diagonal")
        >>> learner.replace(gradient=ibaml.FirstOrder(), samples=2).samples
        2
        """
        now = replaced(self, choices)
        run = choose(self.model, now["execution"], self.roles.adapted, precision=now["precision"])
        made = copy.copy(self)
        made.__dict__.update(now, _run=run, _kinds=Kinds())
        return made

    def __getstate__(self) -> dict[str, Any]:
        # the record of the last call holds tensors of a graph, and a meta-step that is running
        # belongs to the original: a copy starts without either
        new = {"_diagnostics": None, "_captures": Captures(), "_statistics": None}
        return {**self.__dict__, **new, "_kinds": self._kinds.copy()}

    @property
    def diagnostics(self) -> Diagnostics:
        """What has happened in the last call so far, per task. The returned record does not change:
        read it after ``backward()`` to see the linear solves behind the gradient."""
        if self._diagnostics is None:
            raise RuntimeError("no diagnostics yet: call the learner on a TaskBatch first")
        return self._diagnostics.snapshot()

    @property
    def strategy(self) -> str:
        """How weight sets run through the network (``"loop"``, ``"vmap"``, ``"fold"``, ``"head"``),
        and whether meta-steps are replayed, or why not."""
        if self._captures:
            return f"{self._run.strategy}, captured"
        refused = self._captures.refused
        return self._run.strategy + (f", not recorded: {refused}" if refused else "")

    def forget_recordings(self) -> None:
        """Give back the memory of recorded meta-steps. They are recorded anew."""
        self._captures = Captures()

    # --- the meta-loss ---------------------------------------------------------------------------

    def forward(self, batch: TaskBatch, generator: torch.Generator | None = None) -> Tensor:
        """The mean meta-loss of the batch; ``backward()`` leaves the method's meta-gradient.

        One seed is drawn from the generator; task t's noise depends on it and ``keys[t]`` alone. A
        task that diverges is left out and reported in `diagnostics`; the loss is NaN, with zero
        gradients, if all do.
        """
        if not isinstance(batch, TaskBatch):
            raise TypeError(f"a TaskBatch is needed, got {type(batch).__name__}")
        graph = torch.is_grad_enabled()  # inference_mode(False) below switches gradients on
        with training(self.model), torch.inference_mode(False), torch.set_grad_enabled(graph):
            if batch.support_x.is_inference():
                batch = batch.clone()
            self._run = self.runner_for(batch)
            seed = draw_seed(generator)
            step = replayed(self, self.meta_step, self._captures, batch, seed, self._run)
            look = may_look(self.gradient, batch.support_x.device)
            if step is None or (look and bool(step.left_out.any())):
                work = partial(self.meta_step, seed=seed)
                step = FiniteStep(work, list(self.parameters()), look)(batch)
            finished_step = replace(step, loss=step.loss.detach(), passes=[], reads=Reads())
            blocks = self.belief.slices(self.layout.for_classes(batch.classes or 0).size)
            self._diagnostics = Diagnostics(finished_step, blocks, batch.task_keys)
            self.add_statistics(step.passes)
            return step.loss

    def runner_for(self, batch: TaskBatch) -> Runner:
        """Check the tasks, and the model on them, once for every kind of tasks (`Kinds.runner`).
        Returns how weight sets run through the network."""
        self.model.eval()
        layout = self.layout.for_classes(batch.classes or 0)
        return self._kinds.runner(
            self, batch.support_x, batch.support_y, batch.classes, layout,
            differentiated=torch.is_grad_enabled(),
        )  # fmt: skip

    def meta_step(self, batch: TaskBatch, seed: int | Tensor) -> MetaStep:
        """The mean meta-loss, computed without reading any value on the host (so that it can be
        recorded). ``seed`` may be the tasks' roots."""
        support, query = self.problem(batch, seed)
        reads, support, query, rate = Reads.through(support, query, self.step_size(support.layout))
        record = Record()
        if isinstance(self.solver, DualNewton):  # differentiable by itself
            answer, record.solution = self.solver.posterior(support, examine=self.diagnose)
            v, query = record.solution.value, replace(query, answer=answer)
        else:
            start = self.belief.start(support.meta.prior, len(batch))
            v = self.gradient(support, start, self.solver, record, rate=rate, examine=self.diagnose)
        watched = self.model if self.training else nn.Module()
        with watch_moments(watched) as passes:
            losses = self.objective(v, support, query)
            if not passes and norm_layers(watched):
                with torch.no_grad():
                    support.outputs(v)  # no query pass: take the support set's statistics
        return MetaStep.of(losses, record, passes, reads)

    def problem(self, batch: TaskBatch, seed: int | Tensor) -> tuple[TaskEnergy, TaskEnergy]:
        """The energies of the support sets (minimized by the solver) and of the query sets (read by
        the objective), with the noise of this seed."""
        layout = self.layout.for_classes(batch.classes or 0)
        x, y = batch.support_x, batch.support_y
        run = self._kinds.runner(self, x, y, batch.classes, layout)
        support = self.support(x, y, seed, batch.task_keys, layout, run=run)
        noise, points = support.noise, support.points
        if self.objective.noise == "fresh":
            samples = self.objective.samples or self.samples
            if points is not None or self.belief.in_dual:
                points = self.points(self.objective.samples or _META_POINTS, layout)
            else:
                noise = self.draw(seed, batch.task_keys, layout, samples, Stream.META)
        return support, replace(
            support, x=batch.query_x, y=batch.query_y, noise=noise, points=points, predicts=True
        )

    def support(
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
        """The energy of support sets, with the noise used in adaptation."""
        if self.noise == "outputs" and run.linear and self.belief.has_output_moments:
            energy = self.energy(x, y, self.reference.new_zeros(len(x), 1, 0), layout, plan, run)
            return replace(energy, points=self.points(self.samples, layout))
        draw = partial(self.draw, seed, keys, layout, self.samples)
        energy = self.energy(x, y, draw(), layout, plan, run)
        return replace(energy, redraw=lambda step: draw(step=step + 1))

    def points(self, count: int, layout: Layout) -> Tensor:
        """About ``count`` fixed points for noise on the outputs of a head, (S, C)."""
        outputs = layout.shapes[0][0]
        like = self.reference
        count = max(count + count % 2, 2 * outputs)
        return gaussian_points(count, outputs, like.dtype, like.device)

    def energy(
        self,
        x: Tensor,
        y: Tensor,
        noise: Tensor,
        layout: Layout | None = None,
        plan: Mapping[str, NormStats] | None = None,
        run: Runner | None = None,
    ) -> TaskEnergy:
        """The energy of tasks with support inputs x (T, N, …), targets y and noise (T, S, n).
        ``run`` runs the weight sets; without it a way is chosen here."""
        layout = self.layout if layout is None else layout
        run = self._kinds.settle(self, x, y, layout, plan) if run is None else run
        plan = self.norm_plan("batch") if plan is None else plan
        return TaskEnergy(
            model=self.model,
            run=run,
            belief=self.belief,
            layout=layout,
            likelihood=self.likelihood,
            meta=self.meta_parameters(layout),
            constants=self.constants(plan),
            x=x,
            y=y,
            noise=noise,
            weight=self.belief.weight(1.0 if self.log_beta is not None else self.beta, x.shape[1]),
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

        With a tied head, labels may be anything (text, whole numbers, true and false): predictions
        return them unchanged, and ``posterior.classes`` names the columns of probabilities. Else
        they are 0 … W−1, the head's rows.

        Args:
            generator: draws the seed of the noise; without one the seed is always the same.
            classes: for a tied head, the names of the classes in the order of the columns, or their
                number (labels are then 0 … number − 1); by default the labels in y, sorted.
            norm_stats: batch norm's statistics: ``"batch"``, ``"support"`` or ``"running"``. The
                default is ``"running"`` for shared layers and ``"support"`` for adapted ones.
        """
        task = support_set(
            x,
            y,
            classes,
            dtype=self.reference.dtype,
            any_labels=bool(self.layout.rows),
            likelihood=self.likelihood,
        )
        seed = 0 if generator is None else draw_seed(generator)
        count = len(task.classes) if task.classes else None
        posteriors = adapted(self, task.x[None], task.y[None], seed, (0,), count, norm_stats)
        if posteriors.solution is not None and bool(posteriors.solution.diverged.any()):
            warnings.warn(
                "adapt: the solver diverged, so the posterior is the prior; lower lr, or raise "
                "init_log_var",
                RuntimeWarning,
                stacklevel=2,
            )
        return Posterior(posteriors, task.classes)

    def adapt_all(
        self, batch: TaskBatch, *, seed: int = 0, norm_stats: NormStats | None = None
    ) -> Posteriors:
        """The posteriors of all tasks of the batch, solved together. Task t's noise depends on
        ``seed`` and ``batch.keys[t]`` alone. The posterior of a task that diverged is the prior;
        ``solution.diverged`` marks such tasks."""
        return adapted(
            self, batch.support_x, batch.support_y, seed, batch.task_keys, batch.classes, norm_stats
        )

    def save(self, path: str | Path) -> Path:
        """Write the complete learner to a file for `ibaml.load`; nothing in it executes."""
        from ibaml.artifact import save_learner

        return save_learner(self, path)

    # --- parts -----------------------------------------------------------------------------------

    def draw(
        self,
        seed: int | Tensor,
        keys: tuple[int, ...],
        layout: Layout,
        samples: int,
        stream: Stream = Stream.ADAPT,
        step: int = 0,
    ) -> Tensor:
        """The noise of tasks of these keys, (T, samples, n)."""
        like = self.reference
        if not self.belief.stochastic:
            return like.new_zeros((len(keys), 1, 0))
        return draw_noise(
            seed,
            keys,
            stream,
            samples,
            self.belief.noise_size(layout.size),
            self.noise,
            step=step,
            device=like.device,
            dtype=like.dtype,
        )

    def step_size(self, layout: Layout) -> Tensor | None:
        """The learned step sizes, if the solver reads them."""
        return self.rate(layout) if getattr(self.solver, "learn_lr", False) else None

    def extra_repr(self) -> str:
        counts = ", ".join(
            f"{len(getattr(self.roles, r))} {r}" for r in ("adapted", "shared", "frozen")
        )
        return f"{self.belief}\n{self.solver}\n{self.gradient}\n{self.objective}\nweights: {counts}"
