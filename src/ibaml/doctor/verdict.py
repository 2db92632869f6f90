"""What is wrong? A table of faults; the first that is found is the verdict.

Causes stand above what follows from them: data that leak or have wrong labels, what predictions
use, the prior, how a task is solved, its gradient, and last how sure answers are. Every line
compares one reading with one threshold.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ibaml.doctor import readings, sentences
from ibaml.doctor.readings import NATS, Case


@dataclass(frozen=True)
class Finding:
    """One line of the table that says that something is wrong.

    Attributes:
        fault: its name, see `RULES`.
        sentence: what is wrong and how that is known.
        change: which setting to change, and to what.
        command: a command line that does so; empty where there is none.
        reading, threshold: what was compared.
    """

    fault: str
    sentence: str
    change: str
    command: str
    reading: float
    threshold: float


@dataclass(frozen=True)
class Rule:
    """A fault, what is read, and from which reading on it is a finding."""

    fault: str
    threshold: float
    read: Callable[[Case], float]
    say: Callable[[Case], sentences.Words]


RULES = (
    Rule("data leak", 0.01, readings.leak, sentences.leak),
    Rule("queries in the support set", 0.01, readings.repeated, sentences.repeated),
    Rule("labels shuffled", 1.0, readings.labels, sentences.labels),
    Rule("batch norm misused", 2 * NATS, readings.norm, sentences.norm),
    Rule("prior too wide", NATS, readings.gain("spread"), sentences.spread),
    Rule("β too large", NATS, readings.gain("strength"), sentences.strength),
    Rule("inner step too long", NATS, readings.rate, sentences.rate),
    Rule("too few steps", NATS, readings.gain("steps"), sentences.steps),
    Rule("CG starved", 0.2, readings.starved, sentences.starved),
    Rule("gradient unfit", 4.0, readings.longer, sentences.gradient),
    Rule("confidence", NATS, readings.confidence, sentences.confidence),
    Rule("nothing learned", 1.0, readings.untrained, sentences.untrained),
)


def findings(case: Case) -> tuple[Finding, ...]:
    """What is wrong, the cause of the rest first."""
    found = []
    for rule in RULES:
        reading = rule.read(case)
        if reading >= rule.threshold:
            found.append(Finding(rule.fault, *rule.say(case), reading, rule.threshold))
    return tuple(found)


def over_thresholds(case: Case) -> dict[str, float]:
    """The reading of every fault over its threshold: 1 and above is a finding."""
    return {rule.fault: rule.read(case) / rule.threshold for rule in RULES}
