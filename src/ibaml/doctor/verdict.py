"""What is wrong, and which setting is to be changed? A table of findings, the first one counts.

Causes stand above what follows from them: data that leak or have wrong labels first, then what
predictions use, then the prior, then how a task is solved, then its gradient, then how sure answers
are. Every line compares one reading with one threshold.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable
from dataclasses import dataclass

from ibaml.doctor.facts import RunFacts
from ibaml.doctor.measure import Change, Measured
from ibaml.fields import flag
from ibaml.training.settings import Settings

NATS = 0.1  # of a query's nll: what another setting must gain, for sure, to be a finding
SKILL = 0.05  # of 1: with less, answers count as guesses
DEVIATIONS = 3.0  # of random orders: with less, targets have nothing to do with inputs
FACTORS = {0.1: "a tenth", 0.01: "a hundredth", 0.001: "a thousandth"}
FACTORS |= {1 / 4: "a quarter", 1 / 16: "a sixteenth", 1 / 64: "a 64th"}


@dataclass(frozen=True)
class Case:
    """What a verdict is about: the measurements, and for a run its facts, settings and folder."""

    measured: Measured
    facts: RunFacts | None = None
    settings: Settings | None = None
    folder: str = "RUN"


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


Words = tuple[str, str, str]  # sentence, change, command


@dataclass(frozen=True)
class Rule:
    """A fault, what is read, and from which reading on it is a finding."""

    fault: str
    threshold: float
    read: Callable[[Case], float]
    say: Callable[[Case], Words]


def findings(case: Case) -> tuple[Finding, ...]:
    """What is wrong, the cause of the rest first."""
    found = []
    for rule in RULES:
        reading = rule.read(case)
        if reading >= rule.threshold:
            found.append(Finding(rule.fault, *rule.say(case), reading, rule.threshold))
    return tuple(found)


def readings(case: Case) -> dict[str, float]:
    """The reading of every rule over its threshold: 1 and above is a finding."""
    return {rule.fault: rule.read(case) / rule.threshold for rule in RULES}


# --- what is read --------------------------------------------------------------------------------


def _leak(case: Case) -> float:
    return max((leak.share for leak in case.facts.leaks), default=0.0) if case.facts else 0.0


def _labels(case: Case) -> float:
    """Above 1 if answers are guesses under every setting, and a query's target is no nearer to that
    of its nearest example than to the others'."""
    m = case.measured
    skill = max(m.answers.skill, *(change.skill for change in m.changes), SKILL / 10)
    return min(SKILL / skill, DEVIATIONS / max(m.association.z, DEVIATIONS / 10))


def _norm(case: Case) -> float:
    norm = case.measured.norm
    if norm is None:
        return 0.0
    if not norm.filled:
        return 100.0
    others = [nll for kind, nll in norm.alone.items() if kind != "used"]
    return norm.alone["used"] - min(others) if others else 0.0


def _gain(setting: str) -> Callable[[Case], float]:
    """What another value of a setting gains for sure. Where answers are guesses, weights that never
    learned can show little of it, and a fifth is enough: such a run is not healthy anyway."""

    def read(case: Case) -> float:
        best = case.measured.best_change(setting)
        guesses = case.measured.answers.skill < SKILL
        return 0.0 if best is None else max(0.0, best.gain.low) * (5 if guesses else 1)

    return read


def _rate(case: Case) -> float:
    """Diverged tasks count like nats: a quarter of them is a finding."""
    m = case.measured
    left_out = 0.0 if case.facts is None else case.facts.left_out
    if m.best_change("rate") is None:
        return 0.0
    return max(_gain("rate")(case), 4 * NATS * max(m.answers.diverged, left_out))


def _starved(case: Case) -> float:
    gradient = case.measured.gradient
    return (gradient.starved or 0.0) * (gradient.error or 0.0)


def _gradient(case: Case) -> float:
    """How much longer an implicit gradient is than the unrolled one of the same steps."""
    gradient = case.measured.gradient
    if gradient.residual is None or gradient.partly or not gradient.ratio:
        return 0.0
    return max(gradient.ratio.values())


def _confidence(case: Case) -> float:
    """What one number would gain. Too wide intervals of a regression are a finding only where they
    are ten times too wide: they follow the errors down while σ is learned."""
    m, answers = case.measured, case.measured.answers
    if m.regression and answers.scale < 1:
        return NATS * math.log10(1 / answers.scale)
    return answers.nll - answers.informed


def _untrained(case: Case) -> float:
    return SKILL / max(case.measured.answers.skill, SKILL / 10)


# --- what is said --------------------------------------------------------------------------------


def _say_leak(case: Case) -> Words:
    assert case.facts is not None
    worst = max(case.facts.leaks, key=lambda leak: leak.share)
    train, held, count = worst.pairs[0]
    many = f" ({count} examples)" if count > 1 else ""
    data = shlex.quote(case.settings.data) if case.settings else "DATA"
    return (
        f"data leak between splits: {_percent(worst.share)} of {worst.split} is in the training "
        f"split too, e.g. {train!r} there is {held!r} in {worst.split}{many}, so figures on "
        f"{worst.split} say nothing about new data",
        "put what is equal into one split (--splits FILE), or remove it",
        "" if case.settings and case.settings.target else f"ibaml data check {data}",
    )


def _say_repeated(case: Case) -> Words:
    return (
        f"{_percent(case.measured.repeated)} of the queries are in their own support set, so the "
        "answer was given with the question",
        "draw queries from other examples than the support set",
        "",
    )


def _say_labels(case: Case) -> Words:
    m = case.measured
    what = "the targets have nothing to do with the inputs: labels look shuffled. "
    data = shlex.quote(case.settings.data) if case.settings else "DATA"
    table = case.settings is not None and case.settings.regression
    return (
        f"{what}The answers are guesses (skill {m.answers.skill:.2f} of 1) under every setting "
        "tried, and the nearest example's target is no nearer than another's "
        f"({m.association.z:+.1f} deviations of a random order)",
        "check how targets are matched to inputs, also between support and query set",
        "" if case.settings is None or table else f"ibaml data preview {data}",
    )


def _say_norm(case: Case) -> Words:
    norm = case.measured.norm
    assert norm is not None
    if not norm.filled:
        return (
            "batch norm is misused: its running statistics were never filled, and predictions use "
            "them",
            'train with learner.train() in force, or predict with norm_stats="support"',
            f"ibaml evaluate {_folder(case)} --norm-stats support" if case.settings else "",
        )
    best = min((kind for kind in norm.alone if kind != "used"), key=norm.alone.__getitem__)
    used = " and ".join(norm.used)
    why = (
        "statistics of the queries, which one query does not have"
        if "batch" in norm.used
        else f"{used} statistics"
    )
    return (
        f"batch norm is misused: predictions use {why}. Asked one query at a time the nll is "
        f"{norm.alone['used']:.2f}, with {best} statistics {norm.alone[best]:.2f}",
        f'norm_stats="{best}"',
        f"ibaml evaluate {_folder(case)} --norm-stats {best}" if case.settings else "",
    )


def _say_spread(case: Case) -> Words:
    best = _best(case, "spread")
    m, settings = case.measured, case.settings
    start = None if settings is None else settings.init_log_var
    to = "" if start is None else f" from {start:g} to {start + best.factor:g}"
    flags = {} if start is None else {"init_log_var": start + best.factor}
    change = f"lower init_log_var (ρ){to}"
    if settings is not None and settings.beta is not None:
        flags["beta"] = _round(settings.beta * math.exp(best.factor))
        change += f", and beta to {flags['beta']:g}, which keeps the prior as strong"
    noise = f"{m.prior.noise:.1f} times the weights" if m.prior.noise else "wide"
    return (
        f"the prior is too wide (ρ): its draws are {noise} in size, {_percent(m.answers.drawn)} of "
        f"what the network says is noise, and with less the same weights answer {_nats(best)}",
        change,
        _train(case, flags),
    )


def _say_strength(case: Case) -> Words:
    best = _best(case, "strength")
    name, now = _strength(case)
    word = {"beta": "β", "lam": "λ"}[name]
    to = "" if now is None else f" from {now:g} to {_round(now * best.factor):g}"
    strength = case.measured.prior.strength
    held = "" if strength is None else f" (λ = κ·exp(−ρ) = {strength:.2g})"
    return (
        f"{word} is too large: the prior holds every task where it starts{held}; with "
        f"{FACTORS[best.factor]} of it the same weights answer {_nats(best)}",
        f"lower {name}{to}",
        _train(case, {} if now is None else {name: _round(now * best.factor)}),
    )


def _say_rate(case: Case) -> Words:
    m, best = case.measured, _best(case, "rate")
    now = None if case.settings is None else case.settings.inner_lr
    out = max(m.answers.diverged, 0.0 if case.facts is None else case.facts.left_out)
    why = []
    if out > 0:
        why.append(f"adaptation diverged in {_percent(out)} of the tasks")
    factor = best.factor if best.gain.low > 0 else 1 / 16
    if best.gain.low > 0:
        why.append(f"with {FACTORS[factor]} of it the same weights answer {_nats(best)}")
    to = "" if now is None else f" from {now:g} to {_round(now * factor):g}"
    return (
        f"the inner step is too long: {', and '.join(why)}",
        f"lower {'lr' if case.settings is None else 'inner_lr'}{to}, or take --solver polyak",
        _train(case, {} if now is None else {"inner_lr": _round(now * factor)}),
    )


def _say_steps(case: Case) -> Words:
    best = _best(case, "steps")
    now = None if case.settings is None else case.settings.steps
    to = "" if now is None else f" from {now} to {int(now * best.factor)}"
    return (
        f"too few steps of adaptation: with {best.factor:g} times as many the same weights answer "
        f"{_nats(best)}",
        f"raise steps{to} (or take longer ones: inner_lr)",
        _train(case, {} if now is None else {"steps": max(1, int(now * best.factor))}),
    )


def _say_starved(case: Case) -> Words:
    gradient = case.measured.gradient
    return (
        f"CG is starved: its steps end with a relative residual of {gradient.residual:.2g}, and the "
        f"meta-gradient is {_percent(gradient.error or 0.0)} off the one of solved systems",
        "leave cg_steps out, so that it takes as many as it needs, or raise it",
        _train(case, {"cg_steps": 64}),
    )


def _say_gradient(case: Case) -> Words:
    gradient = case.measured.gradient
    return (
        f"the implicit gradient does not fit the steps: it is {_gradient(case):.1f} times as long "
        f"as the unrolled one of the same {gradient.steps} steps",
        "stopping auto, which knows that descent was stopped early; or more steps",
        _train(case, {"stopping": "auto"}),
    )


def _say_confidence(case: Case) -> Words:
    a = case.measured.answers
    over = a.scale < 1 if not case.measured.regression else a.scale > 1
    word = "over" if over else "under"
    if case.measured.regression:
        return (
            f"answers are {word}confident: errors are {a.scale:.2g} times the predicted "
            f"deviations, and {_percent(a.confidence)} of the targets lie in the 95 % interval",
            "learn_noise, or noise_std times that",
            _train(case, {} if case.settings is None else {"learn_noise": True}),
        )
    return (
        f"answers are {word}confident: they claim {_percent(a.confidence)} and "
        f"{_percent(a.right)} are right (ECE {_percent(a.error)}); a temperature {a.scale:.2g} "
        f"times the present one takes {a.nll - a.informed:.2f} nats off the nll",
        'temperature "fitted", on validation tasks',
        _train(case, {"temperature": "fitted"}),
    )


def _say_untrained(case: Case) -> Words:
    skill = case.measured.answers.skill
    more = ""
    if case.settings is not None:
        many = 2 * max(case.settings.iterations, 500)
        more = f"ibaml train --resume {_folder(case)} --iterations {many}"
    return (
        f"the answers are guesses still (skill {skill:.2f} of 1), though the data and the settings "
        "tried give no reason",
        "train longer, with another meta_lr, or with a larger network",
        more,
    )


RULES = (
    Rule("data leak", 0.01, _leak, _say_leak),
    Rule("queries in the support set", 0.01, lambda case: case.measured.repeated, _say_repeated),
    Rule("labels shuffled", 1.0, _labels, _say_labels),
    Rule("batch norm misused", 2 * NATS, _norm, _say_norm),
    Rule("prior too wide", NATS, _gain("spread"), _say_spread),
    Rule("β too large", NATS, _gain("strength"), _say_strength),
    Rule("inner step too long", NATS, _rate, _say_rate),
    Rule("too few steps", NATS, _gain("steps"), _say_steps),
    Rule("CG starved", 0.2, _starved, _say_starved),
    Rule("gradient unfit", 4.0, _gradient, _say_gradient),
    Rule("confidence", NATS, _confidence, _say_confidence),
    Rule("nothing learned", 1.0, _untrained, _say_untrained),
)


# --- words ---------------------------------------------------------------------------------------


def _best(case: Case, setting: str) -> Change:
    best = case.measured.best_change(setting)
    assert best is not None
    return best


def _strength(case: Case) -> tuple[str, float | None]:
    """The setting that says how strong the prior is, and its value if that is known."""
    settings = case.settings
    if settings is None:
        return "beta", None
    return ("beta", settings.beta) if settings.beta is not None else ("lam", settings.lam)


def _nats(change: Change) -> str:
    return f"{change.gain.value:.2f} nats better (95 % from {change.gain.low:.2f})"


def _percent(share: float) -> str:
    digits = 0 if share >= 0.1 else 1
    return f"{100 * share:.{digits}f} %"


def _round(number: float) -> float:
    return float(f"{number:.2g}")


def _folder(case: Case) -> str:
    return shlex.quote(case.folder)


def _train(case: Case, changes: dict[str, object]) -> str:
    """The command that trains again with other settings."""
    if case.settings is None or not changes:
        return ""
    words = [
        flag(name) if value is True else f"{flag(name)} {_written(value)}"
        for name, value in changes.items()
    ]
    config = shlex.quote(f"{case.folder}/config.toml")
    return (
        f"ibaml train --config {config} {' '.join(words)} --out {shlex.quote(case.folder + '-2')}"
    )


def _written(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
