"""What is measured of a learner on some tasks?

Every setting is judged by what another one would give: the same weights answer the same queries
with a tenth of β, with four times the steps, and so on. Gains are in nats of the queries' nll, each
side at its own best scale (`answers`), task by task.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ibaml.doctor.answers import Answers, answers
from ibaml.doctor.data import Association, association, repeated
from ibaml.doctor.gradients import GradientFigures, gradient_figures
from ibaml.doctor.variants import with_rate, with_spread, with_steps, with_strength
from ibaml.evaluation import Interval, mean_interval
from ibaml.execution import NormStats, norm_layers
from ibaml.learner import MetaLearner
from ibaml.tasks import TaskBatch

ALONE = 5  # queries of a task that are asked one at a time, to see what the others are worth
GRADIENT_TASKS = 4  # on which the meta-gradient is compared

Variant = Callable[[MetaLearner], MetaLearner | None]
# what is tried: the setting, by which factor (of ρ: by how much), and the learner
TRIED: tuple[tuple[str, float, Variant], ...] = (
    ("spread", -4.0, lambda learner: with_spread(learner, -4.0)),
    ("spread", -8.0, lambda learner: with_spread(learner, -8.0)),
    ("strength", 0.1, lambda learner: with_strength(learner, 0.1)),
    ("strength", 0.01, lambda learner: with_strength(learner, 0.01)),
    ("strength", 0.001, lambda learner: with_strength(learner, 0.001)),
    ("rate", 1 / 4, lambda learner: with_rate(learner, 1 / 4)),
    ("rate", 1 / 16, lambda learner: with_rate(learner, 1 / 16)),
    ("steps", 4.0, lambda learner: with_steps(learner, 4)),
    ("steps", 16.0, lambda learner: with_steps(learner, 16)),
    ("steps", 64.0, lambda learner: with_steps(learner, 64)),
)


@dataclass(frozen=True)
class Change:
    """What the same weights gain with another setting, in nats of the queries' nll.

    Attributes:
        setting: ``"spread"`` (ρ, at the same strength), ``"strength"`` (β or λ), ``"rate"`` (α),
            ``"steps"`` (K).
        factor: of the setting; for ρ what is added to it.
        gain: of the nll at the best scale, with its 95 % interval over tasks.
        skill: of the answers with it.
    """

    setting: str
    factor: float
    gain: Interval
    skill: float


@dataclass(frozen=True)
class PriorFigures:
    """How strong and how wide the prior is.

    Attributes:
        strength: λ = κ·exp(−ρ), the weight of ½(w − m)² beside the mean nll; the median over the
            adapted weights. None without a prior in the energy.
        noise: exp(ρ/2) against the prior means, root mean squares over the adapted weights.
        examples: N, the support examples of a task.
    """

    strength: float | None
    noise: float | None
    examples: int


@dataclass(frozen=True)
class AnswerFigures:
    """`Answers` as means over the tasks; see there."""

    nll: float
    informed: float
    scale: float
    right: float
    skill: float
    known: float
    confidence: float
    error: float
    gap: float
    drawn: float
    diverged: float

    @classmethod
    def of(cls, one: Answers) -> AnswerFigures:
        return cls(
            float(one.nll.mean()), float(one.informed.mean()), one.scale, one.right, one.skill,
            one.known, one.confidence, one.error, one.gap, one.drawn, one.diverged,
        )  # fmt: skip


@dataclass(frozen=True)
class NormFigures:
    """Batch norm's statistics in predictions.

    Attributes:
        used: those that predictions use, by layer, each kind once.
        filled: whether the running statistics that are used were ever filled.
        alone: nll of queries that are asked one at a time, by kind; ``"used"`` is the kind in use.
    """

    used: tuple[str, ...]
    filled: bool
    alone: dict[str, float]


@dataclass(frozen=True)
class Measured:
    """Everything that was measured of a learner on some tasks; `verdict.findings` judges it."""

    tasks: int
    regression: bool
    answers: AnswerFigures
    gradient: GradientFigures
    prior: PriorFigures
    changes: tuple[Change, ...]
    norm: NormFigures | None
    association: Association
    repeated: float

    def best_change(self, setting: str) -> Change | None:
        """The change of a setting that gains most for sure (by the lower end of its interval)."""
        tried = [change for change in self.changes if change.setting == setting]
        return max(tried, key=lambda change: change.gain.low, default=None)


def measure(
    learner: MetaLearner,
    batches: Sequence[TaskBatch],
    *,
    norm_stats: NormStats | None = None,
    progress: Callable[[str], None] = lambda what: None,
) -> Measured:
    """Measure a learner on tasks, which may be of several sizes. The learner is not changed.

    Args:
        norm_stats: batch norm's statistics in predictions, see `MetaLearner.adapt`.
        progress: called with what is measured next.
    """
    learner = learner.replace(diagnose=True, capture=False)
    progress("answers")
    now = answers(learner, batches, norm_stats)
    changes = []
    for setting, factor, variant in TRIED:
        other = variant(learner)
        if other is None:
            continue
        progress(f"{setting} {factor:g}")
        then = answers(other, batches, norm_stats)
        gain = mean_interval(now.informed - then.informed)
        changes.append(Change(setting, factor, gain, then.skill))
    progress("batch norm")
    norm = norm_figures(learner, batches, norm_stats)
    progress("gradient")
    gradient = gradient_figures(learner, batches[0].select(slice(0, GRADIENT_TASKS)))
    return Measured(
        tasks=sum(len(batch) for batch in batches),
        regression=batches[0].query_y.is_floating_point(),
        answers=AnswerFigures.of(now),
        gradient=gradient,
        prior=prior_figures(learner, batches[0]),
        changes=tuple(changes),
        norm=norm,
        association=association(batches),
        repeated=repeated(batches),
    )


@torch.no_grad()
def prior_figures(learner: MetaLearner, batch: TaskBatch) -> PriorFigures:
    examples = batch.support_x.shape[1]
    belief = learner.belief
    layout = learner.layout.for_classes(batch.classes or 0)
    mean, *rest = learner.meta_parameters(layout).prior
    lam = getattr(belief, "lam", None)
    if not rest or not belief.has_prior:
        return PriorFigures(lam or None, None, examples)
    beta = learner.beta if learner.log_beta is None else float(learner.log_beta.exp())
    kappa = float(belief.weight(beta, examples))
    rho, size = rest[0].double(), float(mean.double().square().mean().sqrt())
    noise = float(rho.exp().mean().sqrt()) / size if size else None
    return PriorFigures(kappa * float((-rho).exp().median()), noise, examples)


def norm_figures(
    learner: MetaLearner, batches: Sequence[TaskBatch], norm_stats: NormStats | None
) -> NormFigures | None:
    """How well queries are answered one at a time, by the kind of batch norm's statistics; None
    without batch norm."""
    plan = learner.norm_plan(norm_stats)
    if not plan:
        return None
    layers = norm_layers(learner.model)
    counts = [layers[name].num_batches_tracked for name, kind in plan.items() if kind == "running"]
    filled = all(count is None or bool(count > 0) for count in counts)
    used = tuple(sorted(set(plan.values())))
    alone = {"used": float(answers(learner, batches, norm_stats, alone=ALONE).nll.mean())}
    kinds: tuple[NormStats, ...] = ("running", "support")
    for kind in kinds:
        if used != (kind,):
            alone[kind] = float(answers(learner, batches, kind, alone=ALONE).nll.mean())
    return NormFigures(used, filled, alone)
