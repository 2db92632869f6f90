"""How is a fault said? What is wrong and how that is known, what to change, and the command."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping

from ibaml.doctor.measure import Change
from ibaml.doctor.readings import Case, longer
from ibaml.fields import flag

Words = tuple[str, str, str]  # sentence, change, command

FACTORS = {0.1: "a tenth", 0.01: "a hundredth", 0.001: "a thousandth"}
FACTORS |= {1 / 4: "a quarter", 1 / 16: "a sixteenth"}


def leak(case: Case) -> Words:
    assert case.facts is not None
    worst = max(case.facts.leaks, key=lambda leak: leak.share)
    train, held, count = worst.pairs[0]
    many = f" ({count} examples)" if count > 1 else ""
    splits = ""
    if case.settings is not None and case.settings.splits is not None:
        splits = f" --splits {shlex.quote(case.settings.splits)}"
    data = shlex.quote(case.settings.data) if case.settings else "DATA"
    return (
        f"data leak between splits: {_percent(worst.share)} of {worst.split} is in the training "
        f"split too, e.g. {train!r} there is {held!r} in {worst.split}{many}, so figures on "
        f"{worst.split} say nothing about new data",
        "put what is equal into one split (--splits FILE), or remove it",
        "" if case.settings is None or case.settings.target else f"ibaml data check {data}{splits}",
    )


def repeated(case: Case) -> Words:
    return (
        f"{_percent(case.measured.repeated)} of the queries are in their own support set, so the "
        "answer was given with the question",
        "draw queries from other examples than the support set",
        "",
    )


def labels(case: Case) -> Words:
    m = case.measured
    data = shlex.quote(case.settings.data) if case.settings else "DATA"
    table = case.settings is not None and case.settings.regression
    return (
        f"labels look shuffled: answers are guesses (skill {m.answers.skill:.2f} of 1) under every "
        "setting tried, and the target of the nearest example is no nearer than another's "
        f"({m.association.z:+.1f} deviations of a random order)",
        "check how targets are matched to inputs, also between support and query set",
        "" if case.settings is None or table else f"ibaml data preview {data}",
    )


def norm(case: Case) -> Words:
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


def spread(case: Case) -> Words:
    best = _best(case, "spread")
    m, settings = case.measured, case.settings
    start = None if settings is None else settings.init_log_var
    to = "" if start is None else f" from {start:g} to {start + best.factor:g}"
    flags: dict[str, float] = {} if start is None else {"init_log_var": start + best.factor}
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


def strength(case: Case) -> Words:
    best = _best(case, "strength")
    name, now = _strength(case)
    word = {"beta": "β", "lam": "λ"}.get(name, "β (or λ)")
    to = "" if now is None else f" from {now:g} to {_round(now * best.factor):g}"
    strength = case.measured.prior.strength
    held = "" if strength is None else f" (λ = κ·exp(−ρ) = {strength:.2g})"
    return (
        f"{word} is too large: the prior holds every task where it starts{held}; with "
        f"{FACTORS[best.factor]} of it the same weights answer {_nats(best)}",
        f"lower {name}{to}",
        _train(case, {} if now is None else {name: _round(now * best.factor)}),
    )


def rate(case: Case) -> Words:
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


def steps(case: Case) -> Words:
    best = _best(case, "steps")
    now = None if case.settings is None else case.settings.steps
    to = "" if now is None else f" from {now} to {int(now * best.factor)}"
    has_rate = case.measured.best_change("rate") is not None
    longer_ones = " (or take longer ones, by inner_lr)" if has_rate else ""
    return (
        f"too few steps of adaptation: with {best.factor:g} times as many the same weights answer "
        f"{_nats(best)}",
        f"raise steps{to}{longer_ones}",
        _train(case, {} if now is None else {"steps": max(1, int(now * best.factor))}),
    )


def starved(case: Case) -> Words:
    gradient = case.measured.gradient
    return (
        f"CG is starved: its steps end with a relative residual of {gradient.residual:.2g}, and "
        f"the meta-gradient is {_percent(gradient.error or 0.0)} off the one of solved systems",
        "leave cg_steps out, so that it takes as many as it needs, or raise it",
        _train(case, {"cg_steps": 64}),
    )


def gradient(case: Case) -> Words:
    gradient = case.measured.gradient
    return (
        f"the implicit gradient does not fit the steps: it is {longer(case):.1f} times as long "
        f"as the unrolled one of the same {gradient.steps} steps",
        "stopping auto, which knows that descent was stopped early; or more steps",
        _train(case, {"stopping": "auto"}),
    )


def confidence(case: Case) -> Words:
    a, settings = case.measured.answers, case.settings
    regression = case.measured.regression
    word = "over" if (a.scale > 1) == regression else "under"
    if regression:
        sentence = (
            f"answers are {word}confident: errors are {a.scale:.2g} times the predicted "
            f"deviations, and {_percent(a.confidence)} of the targets lie in the 95 % interval"
        )
        if settings is not None and settings.learn_noise:
            return sentence, "let σ be learned for longer", _longer_run(case)
        return sentence, "learn the noise (learn_noise)", _train(case, {"learn_noise": True})
    sentence = (
        f"answers are {word}confident: they claim {_percent(a.confidence)} and "
        f"{_percent(a.right)} are right (ECE {_percent(a.error)}); a temperature {a.scale:.2g} "
        f"times the present one takes {a.nll - a.informed:.2f} nats off the nll"
    )
    kind = None if settings is None else settings.temperature
    if kind in ("fitted", "both"):
        return (
            sentence,
            "fit the temperature on more tasks (val_tasks)",
            _train(case, {"val_tasks": 400}),
        )
    kind = "both" if kind == "learned" else "fitted"
    return sentence, f"temperature {kind}, on validation tasks", _train(case, {"temperature": kind})


def untrained(case: Case) -> Words:
    skill = case.measured.answers.skill
    return (
        f"the answers are guesses still (skill {skill:.2f} of 1), though the data and the settings "
        "tried give no reason",
        "train longer, with another meta_lr, or with a larger network",
        _longer_run(case),
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
        return "beta (or lam)", None
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


def _longer_run(case: Case) -> str:
    if case.settings is None:
        return ""
    many = 2 * max(case.settings.iterations, 500)
    return f"ibaml train --resume {_folder(case)} --iterations {many}"


def _train(case: Case, changes: Mapping[str, object]) -> str:
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
