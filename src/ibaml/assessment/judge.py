"""How good is a learner on the tasks of a protocol?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from ibaml.assessment.protocol import Protocol
from ibaml.assessment.tasks import open_test
from ibaml.evaluation import Scores
from ibaml.evaluation.predict import score_tasks
from ibaml.learner import MetaLearner
from ibaml.machine import pick_device
from ibaml.tasks import TaskSource
from ibaml.tasks.sources.decode import Progress
from ibaml.training.run import Run
from ibaml.training.start import load_run
from ibaml.words import NormStats

OnProgress = Callable[[str, int], None]  # arguments: which protocol, tasks done


@dataclass(frozen=True)
class Assessment:
    """Scores by the name of the batch-norm protocol, the one of `learner.adapt` first."""

    learner: MetaLearner
    source: TaskSource
    step: int
    scores: dict[str, Scores]
    diverged: dict[str, int]  # tasks whose adaptation diverged; there the prior predicts

    @property
    def main(self) -> Scores:
        return next(iter(self.scores.values()))


def assess(
    run: Run,
    protocol: Protocol,
    *,
    also_transductive: bool = True,
    on_progress: OnProgress | None = None,
    progress: Progress | None = None,
) -> Assessment:
    """Judge the learner of a run on the tasks of the protocol.

    Args:
        beside: with batch norm, judge with the transductive statistics too.
    """
    source = open_test(run, protocol, progress)
    learner, step = load_run(run, protocol.which, pick_device(protocol.device))
    return assess_learner(
        learner,
        source,
        protocol,
        step=step,
        also_transductive=also_transductive,
        on_progress=on_progress,
    )


def assess_learner(
    learner: MetaLearner,
    source: TaskSource,
    protocol: Protocol,
    *,
    step: int = 0,
    also_transductive: bool = True,
    on_progress: OnProgress | None = None,
) -> Assessment:
    """Judge any learner on the tasks of the protocol."""
    learner = with_steps(learner, protocol)
    scores, diverged = {}, {}
    for name, norm_stats in norm_protocols(learner, protocol.norm_stats, also_transductive).items():
        report = (
            (lambda done, name=name: on_progress(name, done)) if on_progress is not None else None
        )
        diverged_keys: list[int] = []
        scores[name] = score_tasks(
            learner,
            source,
            protocol.split,
            range(protocol.tasks),
            samples=protocol.samples,
            norm_stats=norm_stats,
            batch=protocol.batch,
            progress=report,
            diverged=diverged_keys,
        )
        diverged[name] = len(diverged_keys)
    return Assessment(learner, source, step, scores, diverged)


def with_steps(learner: MetaLearner, protocol: Protocol) -> MetaLearner:
    """The learner with the protocol's steps of adaptation, if it names a number."""
    if protocol.steps is None:
        return learner
    return learner.replace(solver=replace(cast(Any, learner.solver), steps=protocol.steps))


def norm_protocols(
    learner: MetaLearner, asked: str | None, also_transductive: bool
) -> dict[str, NormStats | None]:
    """The batch-norm protocols to judge with, by name; without batch norm a single one with an
    empty name."""
    chosen = cast(NormStats | None, asked)
    kinds = sorted(set(learner.norm_plan(chosen).values()))
    if not kinds:
        return {"": None}

    def name(kinds: Sequence[str]) -> str:
        protocol = "transductive" if "batch" in kinds else "inductive"
        return f"{' and '.join(kinds)} ({protocol})"

    if chosen is not None or not also_transductive:
        return {name(kinds): chosen}
    return {name(kinds): None, name(["batch"]): "batch"}
