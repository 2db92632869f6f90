"""What is read of the figures for each fault? One number, to be compared with one threshold."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from ibaml.doctor.facts import RunFacts
from ibaml.doctor.measure import Measured
from ibaml.training.settings import Settings

NATS = 0.1  # of a query's nll: what another setting must gain, for sure, to be a finding
SKILL = 0.05  # of 1: with less, answers count as guesses
DEVIATIONS = 3.0  # of random orders: with less, targets have nothing to do with inputs


@dataclass(frozen=True)
class Case:
    """What a verdict is about: the measurements, and for a run its facts, settings and folder."""

    measured: Measured
    facts: RunFacts | None = None
    settings: Settings | None = None
    folder: str = "RUN"


def leak(case: Case) -> float:
    """The share of validation or test data that is in the training data."""
    return max((leak.share for leak in case.facts.leaks), default=0.0) if case.facts else 0.0


def labels(case: Case) -> float:
    """Above 1 if answers are guesses under every setting, and a query's target is no nearer to that
    of its nearest example than to the others'."""
    m = case.measured
    skill = max(m.answers.skill, *(change.skill for change in m.changes), SKILL / 10)
    return min(SKILL / skill, DEVIATIONS / max(m.association.z, DEVIATIONS / 10))


def repeated(case: Case) -> float:
    return case.measured.repeated


def norm(case: Case) -> float:
    """What other statistics gain for queries that are asked one at a time."""
    norm = case.measured.norm
    if norm is None:
        return 0.0
    if not norm.filled:
        return 100.0
    others = [nll for kind, nll in norm.alone.items() if kind != "used"]
    return max(0.0, norm.alone["used"] - min(others)) if others else 0.0


def gain(setting: str) -> Callable[[Case], float]:
    """What another value of a setting gains for sure; 0 if another setting gains more, which is
    then to blame. Where less is known than `NATS`, it is enough to double that (from a fifth of
    `NATS` on): weights that never learned have little to show."""

    def read(case: Case) -> float:
        m = case.measured
        best = m.best_change(setting)
        if best is None or any(other.gain.low > best.gain.low for other in m.changes):
            return 0.0
        return max(0.0, best.gain.low) * NATS / min(max(m.answers.known, NATS / 5), NATS)

    return read


def rate(case: Case) -> float:
    """Diverged tasks count like nats: a quarter of them is a finding."""
    m = case.measured
    left_out = 0.0 if case.facts is None else case.facts.left_out
    if m.best_change("rate") is None:
        return 0.0
    return max(gain("rate")(case), 4 * NATS * max(m.answers.diverged, left_out))


def starved(case: Case) -> float:
    """The error of the gradient, times the share of the tasks whose CG ran out of steps."""
    gradient = case.measured.gradient
    return (gradient.starved or 0.0) * (gradient.error or 0.0)


def longer(case: Case) -> float:
    """How much longer an implicit gradient is than the unrolled one of the same steps."""
    gradient = case.measured.gradient
    if gradient.residual is None or gradient.partly or not gradient.ratio:
        return 0.0
    return max(gradient.ratio.values())


def confidence(case: Case) -> float:
    """What one number would gain. Too wide intervals of a regression are a finding only where they
    are ten times too wide: they follow the errors down while σ is learned."""
    m, answers = case.measured, case.measured.answers
    if m.regression and answers.scale < 1:
        return NATS * math.log10(1 / answers.scale)
    return answers.nll - answers.informed


def untrained(case: Case) -> float:
    """Above 1 if answers are guesses."""
    return SKILL / max(case.measured.answers.skill, SKILL / 10)
