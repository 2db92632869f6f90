"""MetaLearner: beliefs, solver, gradient rule and objective around one `nn.Module`."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn

from ibaml.diagnostics import Diagnostics
from ibaml.energy import (
    NOISE_KINDS,
    Likelihood,
    NllFunction,
    NoiseKind,
    Stream,
    TaskEnergy,
    Theta,
    as_likelihood,
    draw_noise,
)
from ibaml.execution import (
    NORM_STATS,
    NormStats,
    Plan,
    Strategy,
    choose,
    has_running,
    norm_buffers,
    norm_layers,
    update_running,
    watch_moments,
)
from ibaml.gradient import GradientRule, Implicit, Record, Reptile, Unrolled
from ibaml.objectives import Abml, Objective, QueryNll
from ibaml.posterior import Posterior
from ibaml.seeding import draw_seed
from ibaml.solve import Descent, GradientDescent, NaturalDescent, Solution, Solver
from ibaml.tasks import TaskBatch
from ibaml.weights import (
    Belief,
    DiagonalGaussian,
    Layout,
    Selection,
    assign_roles,
    head_module,
)


def _key(name: str) -> str:
    """A parameter's name as a key of an `nn.ParameterDict`, where a dot may not stand."""
    return name.replace(".", "/")


class MetaLearner(nn.Module):
    """Learns a prior over the weights of ``model`` from batches of tasks.

    ``learner(batch)`` is an ordinary differentiable scalar, so any PyTorch training loop works
    around it; ``learner.adapt(x, y)`` gives the posterior of a new task. The model's own parameters
    are the prior means (or the shared weights): training the learner trains them in place. The
    model runs in evaluation mode throughout: dropout is off, because a task's energy has to be one
    deterministic function; batch norm uses the statistics that ``norm_stats`` says.

    Args:
        model: any module with one input and one output tensor.
        belief: `Point` or `DiagonalGaussian`.
        solver: how a task is solved.
        gradient: how the meta-parameters learn from the solution.
        objective: the meta-loss.
        likelihood: None (categorical for integer targets, Gaussian with σ = 1 for floating ones), a
            `Likelihood`, or any callable (outputs, y) -> nll per example.
        adapt, freeze: which weights are adapted to every task, and which nobody changes; the rest
            is shared. See `ibaml.weights.assign_roles`.
        tie_head: tie the prior of the last linear layer over its rows, so that a prior trained on W
            classes serves any number of them.
        samples: Monte-Carlo samples S of the energy.
        noise: ``"independent"`` or ``"antithetic"`` pairs.
        beta: β of κ = β/N; 1 is Bayes, below 1 a tempered posterior.
        init_log_var: ρ at the start, a number for all weights.
        execution: ``"auto"``, ``"loop"`` or ``"vmap"``.
        diagnose: evaluate E and ∇E at every solution for `diagnostics` (one more evaluation).

    Most people build one with `ibaml.methods`.
    """

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
        init_log_var: float = -6.0,
        execution: Strategy = "auto",
        diagnose: bool = True,
    ) -> None:
        super().__init__()
        if not isinstance(model, nn.Module):
            raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
        objective = QueryNll() if objective is None else objective
        _check_options(belief, solver, gradient, objective, samples, noise, beta, init_log_var)
        self.roles = assign_roles(model, adapt, freeze)
        if isinstance(gradient, Reptile) and self.roles.shared:
            raise ValueError(
                "Reptile moves a prior towards the tasks' solutions and has no gradient for shared "
                f'weights ({", ".join(self.roles.shared[:3])}, …): use adapt="all", or freeze them'
            )
        _check_norms(model)
        self.model = model
        self.belief = belief
        self.solver = solver
        self.gradient = gradient
        self.objective = objective
        self.likelihood: Likelihood = as_likelihood(likelihood)
        self.samples = samples if belief.stochastic else 1
        self.noise: NoiseKind = noise
        self.beta = beta
        self.diagnose = diagnose
        self.execution: Strategy = execution
        self._run = choose(model, execution)
        self._checked: set[tuple[Any, ...]] = set()
        self._diagnostics: Diagnostics | None = None

        parameters = dict(model.named_parameters())
        rows = frozenset(self._tied_rows(tie_head))
        self.layout = Layout(
            names=self.roles.adapted,
            shapes=tuple(tuple(parameters[n].shape) for n in self.roles.adapted),
            rows=rows,
        )
        # the rows of a tied prior are its own: the model's head is a placeholder for its shape
        self.tied_mean = nn.ParameterDict(
            {
                _key(n): nn.Parameter(parameters[n].detach().mean(0, keepdim=True))
                for n in self.roles.adapted
                if n in rows
            }
        )
        self.log_var = nn.ParameterDict()
        if isinstance(belief, DiagonalGaussian):
            for n in self.roles.adapted:
                like = self.tied_mean[_key(n)] if n in rows else parameters[n]
                self.log_var[_key(n)] = nn.Parameter(torch.full_like(like, init_log_var))
        self.log_lr = nn.ParameterDict()
        if isinstance(solver, Descent) and solver.learn_lr:
            self._init_rates(solver, parameters[self.roles.adapted[0]])
        self._not_learned = frozenset({*self.roles.frozen, *rows})
        for n in self._not_learned:
            parameters[n].requires_grad_(False)
        reference = parameters[self.roles.adapted[0]]
        self.likelihood.to(device=reference.device, dtype=reference.dtype)
        self.train(model.training)

    # --- the module ------------------------------------------------------------------------------

    def train(self, mode: bool = True) -> Self:
        """Training mode concerns the learner (running statistics); the model stays in evaluation
        mode."""
        super().train(mode)
        self.model.eval()
        return self

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Exactly the meta-parameters: what is frozen is part of the state, but not of these."""
        dot = "." if prefix else ""
        hidden = {f"{prefix}{dot}model.{n}" for n in self._not_learned}
        for name, parameter in super().named_parameters(prefix, recurse, remove_duplicate):
            if name not in hidden:
                yield name, parameter

    def __getstate__(self) -> dict[str, Any]:
        # the record of the last call holds tensors of a graph; a copy starts without it
        return {**self.__dict__, "_diagnostics": None}

    @property
    def diagnostics(self) -> Diagnostics:
        """What happened in the last call, per task."""
        if self._diagnostics is None:
            raise RuntimeError("no diagnostics yet: call the learner on a TaskBatch first")
        return self._diagnostics

    # --- the meta-loss ---------------------------------------------------------------------------

    def forward(self, batch: TaskBatch, generator: torch.Generator | None = None) -> Tensor:
        """The mean meta-loss of the batch; ``backward()`` leaves the method's meta-gradient.

        One seed is drawn from the generator; task t's noise depends on it and ``keys[t]`` alone. A
        task that diverges is left out and reported in `diagnostics`; the loss is NaN, with zero
        gradients, if all do.
        """
        self._check_batch(batch.support_x, batch.support_y, batch.classes)
        seed = draw_seed(generator)
        losses, record = self._losses(batch, seed)
        left_out = ~losses.detach().isfinite()
        if record.solution is not None:
            left_out = left_out | record.solution.diverged
        self._diagnostics = Diagnostics(record, self.belief.blocks, batch.task_keys, left_out)
        if isinstance(self.gradient, Unrolled) and bool(left_out.any()):
            # a graph through non-finite steps cannot be masked: build it without those tasks
            if bool(left_out.all()):
                return losses.new_tensor(float("nan")) + 0 * self._anchor()
            losses, _ = self._losses(batch.select((~left_out).nonzero()[:, 0]), seed)
            return losses.mean()
        count = (~left_out).sum()
        total = torch.where(left_out, torch.zeros_like(losses), losses).sum()
        return torch.where(count > 0, total / count.clamp(min=1), float("nan"))

    def problem(self, batch: TaskBatch, seed: int) -> tuple[TaskEnergy, TaskEnergy]:
        """The energies of the support sets (what is solved) and of the query sets (what the
        objective reads), with the noise that belongs to the seed."""
        layout = self.layout.for_classes(batch.classes or 0)
        draw = partial(self._draw, seed, batch.task_keys, layout.size)
        noise = draw(Stream.ADAPT, self.samples)
        support = replace(
            self.energy(batch.support_x, batch.support_y, noise, layout),
            redraw=lambda step: draw(Stream.ADAPT, self.samples, step=step + 1),
        )
        if self.objective.noise == "fresh":
            noise = draw(Stream.META, self.objective.samples or self.samples)
        return support, replace(support, x=batch.query_x, y=batch.query_y, noise=noise)

    def _losses(self, batch: TaskBatch, seed: int) -> tuple[Tensor, Record]:
        support, query = self.problem(batch, seed)
        start = self.belief.start(support.meta.prior, len(batch))
        record = Record()
        rate = self._rate(support.layout)
        v = self.gradient(support, start, self.solver, record, rate=rate, examine=self.diagnose)
        if isinstance(self.gradient, Reptile):
            return (start - v).square().sum(-1) / 2, record
        if self.training and norm_layers(self.model):
            with watch_moments(self.model) as passes:
                losses = self.objective(v, support, query)
            update_running(self.model, self.norm_plan("batch"), passes)
        else:
            losses = self.objective(v, support, query)
        return losses, record

    def energy(
        self,
        x: Tensor,
        y: Tensor,
        noise: Tensor,
        layout: Layout | None = None,
        plan: Mapping[str, NormStats] | None = None,
    ) -> TaskEnergy:
        """The energy of tasks with support inputs x (T, N, …), targets y and noise (T, S, n)."""
        layout = self.layout if layout is None else layout
        parameters = dict(self.model.named_parameters())
        constants: dict[str, Tensor | None] = {n: parameters[n] for n in self.roles.frozen}
        constants.update((n, b.clone()) for n, b in self.model.named_buffers())
        plan = self.norm_plan("batch") if plan is None else plan
        constants.update(norm_buffers(self.model, plan))
        return TaskEnergy(
            model=self.model,
            run=self._run,
            belief=self.belief,
            layout=layout,
            likelihood=self.likelihood,
            meta=self.theta(layout),
            constants=constants,
            x=x,
            y=y,
            noise=noise,
            kappa=self.belief.weight(self.beta, x.shape[1]),
        )

    def theta(self, layout: Layout | None = None) -> Theta:
        """Everything meta-learned that the energy depends on, the prior as flat vectors."""
        layout = self.layout if layout is None else layout
        parameters = dict(self.model.named_parameters())
        means = {
            n: self.tied_mean[_key(n)] if n in layout.rows else parameters[n] for n in layout.names
        }
        prior = [layout.join(means)]
        if len(self.log_var):
            prior.append(layout.join({n: self.log_var[_key(n)] for n in layout.names}))
        return Theta(
            prior=tuple(prior),
            shared={n: parameters[n] for n in self.roles.shared},
            likelihood=dict(self.likelihood.named_parameters()),
        )

    # --- a new task ------------------------------------------------------------------------------

    @torch.no_grad()
    def adapt(
        self,
        x: Tensor,
        y: Tensor,
        generator: torch.Generator | None = None,
        *,
        classes: int | None = None,
        norm_stats: NormStats | None = None,
    ) -> Posterior:
        """The posterior of one task from its support set x (N, …), y (N, …); the learner is not
        changed. Without examples (N = 0) the posterior is the prior.

        Args:
            generator: where the noise's seed comes from; without one it is always the same.
            classes: number of classes, for a tied head; the largest label + 1 unless given.
            norm_stats: batch norm's statistics: ``"batch"``, ``"support"`` or ``"running"``. The
                default is ``"running"`` for shared layers and ``"support"`` for adapted ones.
        """
        if x.dim() < 1 or y.dim() < 1 or x.shape[0] != y.shape[0]:
            raise ValueError(
                "x and y need one entry per example: x has shape "
                f"{tuple(x.shape)}, y has shape {tuple(y.shape)}"
            )
        if x.is_floating_point() and not bool(x.isfinite().all()):
            raise ValueError("x holds a NaN or an infinity")
        if y.is_floating_point() and not bool(y.isfinite().all()):
            raise ValueError("y holds a NaN or an infinity")
        if classes is None and self.layout.rows:
            if len(y) == 0:
                raise ValueError("classes is needed to adapt a tied head without examples")
            classes = int(y.max()) + 1
        layout = self.layout.for_classes(classes or 0)
        plan = self.norm_plan(norm_stats)
        seed = 0 if generator is None else draw_seed(generator)
        noise = self._draw(seed, (0,), layout.size, Stream.ADAPT, self.samples)
        solution: Solution | None = None
        if len(x):
            top = None if y.is_floating_point() else int(y.max()) + 1
            self._check_batch(x[None], y[None], top, layout, plan)
            energy = self.energy(x[None], y[None], noise, layout, plan)
            start = self.belief.start(energy.meta.prior, 1)
            rate = self._rate(layout)
            solution = self.solver.solve(energy, start, rate=rate, examine=self.diagnose)
            v = solution.value
            if bool(solution.diverged.any()):
                warnings.warn(
                    "adapt: the solver met values that are not finite, so the posterior is the "
                    "prior; lower lr, or raise init_log_var",
                    RuntimeWarning,
                    stacklevel=2,
                )
        else:
            if any(kind == "support" for kind in plan.values()):
                plan = {n: "running" if k == "support" else k for n, k in plan.items()}
            empty = x.new_zeros((1, 1, *x.shape[1:]))
            energy = self.energy(empty, y.new_zeros((1, 1, *y.shape[1:])), noise, layout, plan)
            v = self.belief.start(energy.meta.prior, 1)
        parameters = dict(self.model.named_parameters())
        constant = [parameters[n] for n in (*self.roles.shared, *self.roles.frozen)]
        watched = (*constant, *self.likelihood.parameters())
        return Posterior(energy, v.detach().clone(), plan, seed, self.noise, watched, solution)

    def norm_plan(self, norm_stats: NormStats | None) -> Plan:
        """Which statistics every batch-norm layer uses; frozen layers always their running ones."""
        if norm_stats is not None and norm_stats not in NORM_STATS:
            raise ValueError(f"norm_stats must be one of {NORM_STATS}, got {norm_stats!r}")
        parameters = {id(p): n for n, p in self.model.named_parameters()}
        plan: Plan = {}
        for name, layer in norm_layers(self.model).items():
            owned = {parameters[id(p)] for p in layer.parameters()}
            if owned and owned <= set(self.roles.frozen):
                kind: NormStats = "running"
            elif norm_stats is not None:
                kind = norm_stats
            elif owned & set(self.roles.adapted) or not (owned or self.roles.shared):
                kind = "support"
            else:
                kind = "running"
            if not has_running(layer):
                kind = "batch"
            plan[name] = kind
        return plan

    # --- parts -----------------------------------------------------------------------------------

    def _draw(
        self,
        seed: int,
        keys: tuple[int, ...],
        size: int,
        stream: Stream,
        samples: int,
        step: int = 0,
    ) -> Tensor:
        like = next(self.model.parameters())
        if not self.belief.stochastic:
            return like.new_zeros((len(keys), 1, 0))
        return draw_noise(
            seed,
            keys,
            stream,
            samples,
            size,
            self.noise,
            step=step,
            device=like.device,
            dtype=self._dtype,
        )

    @property
    def _dtype(self) -> torch.dtype:
        return self.model.get_parameter(self.roles.adapted[0]).dtype

    def _anchor(self) -> Tensor:
        """Zero, with a (zero) gradient for every meta-parameter."""
        return torch.stack([p.sum() for p in self.parameters()]).sum() * 0

    def _tied_rows(self, tie_head: bool) -> tuple[str, ...]:
        if not tie_head:
            return ()
        name, _ = head_module(self.model)
        if not self.roles.head:
            raise ValueError(
                f"tie_head ties the prior of the last linear layer ({name}), which is not adapted: "
                'use adapt="head" or adapt="all"'
            )
        return self.roles.head

    def _init_rates(self, solver: Descent, like: Tensor) -> None:
        from ibaml.solve.base import resolve_rate

        noise = like.new_zeros(1, 1, self.layout.size)
        slots = self.energy(like.new_zeros(1, 1), like.new_zeros(1, 1), noise).slots
        size = self.layout.size * len(self.belief.blocks)
        rate = resolve_rate(solver.lr, slots, like.new_zeros(1, size))
        for name, begin, _ in slots:
            value = rate if isinstance(rate, float) else float(rate[begin])
            self.log_lr[_key(name)] = nn.Parameter(like.new_tensor(math.log(value)))

    def _rate(self, layout: Layout) -> Tensor | None:
        if not len(self.log_lr):
            return None
        repeats = torch.tensor(layout.sizes * len(self.belief.blocks))
        rates = torch.stack(list(self.log_lr.values())).exp()
        return rates.repeat_interleave(repeats.to(rates.device))

    @torch.no_grad()
    def _check_batch(
        self,
        x: Tensor,
        y: Tensor,
        classes: int | None,
        layout: Layout | None = None,
        plan: Mapping[str, NormStats] | None = None,
    ) -> None:
        """Once for every kind of batch: does the model take these inputs, and do its outputs fit
        the targets? Before any work is lost."""
        kind = (x.shape[1:], x.dtype, x.device, y.shape[2:], y.dtype, classes, str(plan))
        if kind in self._checked:
            return
        dtype, device = self._dtype, next(self.model.parameters()).device
        if x.device != device:
            raise ValueError(f"the tasks are on {x.device} and the model on {device}: move one")
        if x.is_floating_point() and x.dtype != dtype:
            raise ValueError(
                f"the tasks are {x.dtype} and the model is {dtype}: use batch.to({dtype}) or "
                "model.to(...)"
            )
        layout = self.layout.for_classes(classes or 0) if layout is None else layout
        noise = self._draw(0, (0,), layout.size, Stream.ADAPT, 1)
        energy = self.energy(x[:1], y[:1], noise, layout, plan)
        v = self.belief.start(energy.meta.prior, 1)
        try:
            outputs = energy.outputs(v)
        except Exception as error:
            raise ValueError(
                f"the model {type(self.model).__name__} does not run on one task's support inputs, "
                f"shape {tuple(x.shape[1:])} {x.dtype}: {error}"
            ) from error
        if outputs.shape[2] != x.shape[1]:
            raise ValueError(
                f"the model returned {outputs.shape[2]} outputs for {x.shape[1]} examples: its "
                "first dimension must be the examples"
            )
        plain = classes is not None and y.dim() == 2 and outputs.dim() == 4
        if plain and classes is not None and classes > outputs.shape[-1]:
            raise ValueError(
                f"label {classes - 1} is out of range: the model has {outputs.shape[-1]} outputs "
                "(labels are 0 … outputs − 1); build it with more ways, or use tie_head=True"
            )
        energy.nll(outputs)
        self._warn_if_stiff(x.shape[1])
        self._checked.add(kind)

    def _warn_if_stiff(self, examples: int) -> None:
        """Plain descent diverges where lr·κ·exp(−ρ) > 2: say so before it does."""
        solver = self.solver
        if not isinstance(solver, GradientDescent | NaturalDescent) or not len(self.log_var):
            return
        if isinstance(solver.lr, Mapping) or solver.steps < 2:
            return
        kappa = self.belief.weight(self.beta, examples)
        lowest = min(float(p.min()) for p in self.log_var.values())
        stiffness = solver.lr * kappa * math.exp(-lowest)
        if stiffness > 2:
            warnings.warn(
                f"adaptation will diverge: lr·κ·exp(−ρ) = {stiffness:.3g} exceeds 2 (lr = "
                f"{solver.lr:g}, κ = β/N = {kappa:.3g}, smallest prior log-variance {lowest:.3g}); "
                "lower lr or beta, or raise init_log_var",
                RuntimeWarning,
                stacklevel=4,
            )

    def extra_repr(self) -> str:
        counts = ", ".join(
            f"{len(getattr(self.roles, r))} {r}" for r in ("adapted", "shared", "frozen")
        )
        return f"{self.belief}\n{self.solver}\n{self.gradient}\n{self.objective}\nweights: {counts}"


def _check_options(
    belief: Belief,
    solver: Solver,
    gradient: GradientRule,
    objective: Objective,
    samples: int,
    noise: str,
    beta: float,
    init_log_var: float,
) -> None:
    """Refuse what cannot work, in a sentence, when it is built."""
    if samples < 1:
        raise ValueError(f"samples must be 1 or more, got {samples}")
    if noise not in NOISE_KINDS:
        raise ValueError(f"noise must be one of {NOISE_KINDS}, got {noise!r}")
    if not (beta > 0 and math.isfinite(beta)):
        raise ValueError(f"beta must be positive (1 is Bayes, below 1 tempers), got {beta}")
    if not math.isfinite(init_log_var):
        raise ValueError(f"init_log_var must be finite, got {init_log_var}")
    learned = isinstance(solver, Descent) and solver.learn_lr
    if isinstance(gradient, Implicit):
        if not belief.has_prior:
            raise ValueError(
                "implicit differentiation needs a prior in the energy: without one the solution "
                "does not depend on the prior and the meta-gradient is exactly zero. Use lam > 0 "
                "(imaml), a Gaussian belief (ibaml), or the unrolled rule (maml)"
            )
        if gradient.curvature.kind == "lemma" and not isinstance(belief, DiagonalGaussian):
            raise ValueError('curvature "lemma" is written for the diagonal Gaussian: use "energy"')
    if learned and not isinstance(gradient, Unrolled):
        raise ValueError(
            "a learned step size has gradient zero under every rule but the unrolled one (a "
            "solution does not depend on how it was found): use learn_lr=False or gradient="
            "Unrolled()"
        )
    if isinstance(gradient, Reptile) and solver.steps == 0:
        raise ValueError("Reptile with steps=0 has no direction: the solution is the start")
    if isinstance(gradient, Unrolled) and not isinstance(solver, Descent):
        raise ValueError(
            f"{type(solver).__name__} cannot be unrolled: use GradientDescent, NaturalDescent or "
            "Adam, or the implicit rule"
        )
    if isinstance(solver, NaturalDescent) and not isinstance(belief, DiagonalGaussian):
        raise ValueError("NaturalDescent moves log-variances: it needs a Gaussian belief")
    if isinstance(objective, Abml) and not isinstance(belief, DiagonalGaussian):
        raise ValueError("ABML's objective needs a Gaussian belief (its hyper-prior is over 1/d)")


def _check_norms(model: nn.Module) -> None:
    for name, layer in model.named_modules():
        if isinstance(layer, nn.modules.instancenorm._InstanceNorm) and layer.track_running_stats:
            raise ValueError(
                f"{name or type(layer).__name__}: instance norm with track_running_stats=True is "
                "not supported (its running statistics would silently replace the instance's): "
                "build it with track_running_stats=False"
            )
