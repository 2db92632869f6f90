"""What do the studies that compare arms share? Their sentences, rows and findings."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ibaml.assessment import differences, plain
from ibaml.evaluation import ClassScores, Interval, paired
from ibaml.paper.study import Findings
from ibaml.paper.trained.arms import ARMS, Settings
from ibaml.paper.trained.results import Result

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PAPER = Settings()
_SOLVED = 0.1  # of ‖∇E‖ at the prior: above it a task is called not solved
_LEARNED = 0.05  # above chance; an arm with less has learned next to nothing
_NEARLY = (0.9, 0.98)  # ratio and cosine from which a gradient is called nearly first order
_TUNED = {  # settings in which a protocol can differ from the paper's
    "channels": "channels of Conv4",
    "queries": "queries a class in training",
    "train_tasks": "training tasks of an arm",
    "meta_lr": "meta step size",
    "inner_lr": "α",
    "samples": "samples S in training",
    "test_samples": "samples in the test",
    "cg_steps": "L",
    "beta": "β",
    "test_tasks": "test tasks",
}
Judged = tuple[list[str], list[str]]


def compared(
    name: str,
    settings: Settings,
    results: Sequence[Result],
    judged: Judged,
    *,
    table: Sequence[Mapping[str, Any]],
    pictures: Mapping[str, Callable[[], Figure]],
    shown: Sequence[Mapping[str, Any]],
    tables: Mapping[str, Sequence[Mapping[str, Any]]] | None = None,
    also: Sequence[str] = (),
    leaning: Sequence[str] = (),
) -> Findings:
    """The findings of a study.

    Args:
        table, pictures, shown: its main table, its pictures, and the rows in its text.
        tables: further tables, by the suffix of their file names.
        also, leaning: more sentences, after the set-up and before the notes.
    """
    named = {
        **(tables or {}), "differences": difference_rows(results), "inside": inside_rows(results)
    }  # fmt: skip
    agrees, differs = judged
    return Findings(
        setup=[*setup(settings, results), *also],
        agrees=agrees,
        differs=differs,
        numbers=numbers(results),
        tables={name: table, **{f"{name}_{n}": rows for n, rows in named.items() if rows}},
        pictures=pictures,
        shown=shown,
        notes=[*leaning, *notes(settings, results)],
        machine=" and ".join(dict.fromkeys(r.training["machine"] for r in results)),
    )


def scored(results: Sequence[Result]) -> dict[str, ClassScores]:
    """Scores by the arms' names; an arm that failed has none."""
    return {r.name: r.scores for r in results if r.scores is not None}


def has_learned(settings: Settings, scores: ClassScores) -> bool:
    """Whether an arm is clearly better than chance. An arm that is not gives every query the same
    answer, which is calibrated without having learned anything."""
    return scores.summary()["accuracy"].low > 1 / settings.ways + _LEARNED


def setup(settings: Settings, results: Sequence[Result]) -> list[str]:
    """Data, protocol and length of training, as sentences."""
    data = results[0].training["data"]
    shape = "×".join(map(str, data["example_shape"]))
    protocol = next((r.tested["protocol"] for r in results if r.scores is not None), "")
    split = next((_SPLITS[r.inside["split"]] for r in results if r.inside), "validation")
    lengths = "; ".join(
        f"{r.title}: {r.training['iterations']:,} steps of {r.training['tasks a step']} tasks, "
        f"{r.training['seconds']:,.0f} s"
        for r in results
    )
    return [
        f"{data['name']} ({shape}), {settings.ways}-way {settings.shots}-shot, Conv4 with "
        f"{settings.channels} channels; {settings.test_tasks:,} test tasks of new classes, "
        f"{settings.test_queries} queries a class, the same for every arm.",
        f"Adam, meta step size {settings.meta_lr:g}; α = {settings.inner_lr:g}, S = "
        f"{settings.samples} ({settings.test_samples} in the test), L = {settings.cg_steps}, β = "
        f"{settings.beta:g}, ρ starts at {settings.init_log_var:g}; ABML with its hyper-prior; "
        f"iMAML's λ = {settings.lam:g}. Arms that adapt the head have `ibaml train`'s defaults"
        f"{_head(settings)}, and so have those called ours, which adapt everything.",
        f"Length of training. {lengths}.",
        f"Tested: the {_WEIGHTS[settings.which]} weights, {_after(results)}"
        + (
            f", with K = {settings.test_steps} (the head as in training)"
            if settings.test_steps
            else ""
        )
        + (f"; batch norm's statistics {protocol}." if protocol else "."),
        f"‖∇E‖, CG residuals and first-order ratios are of the last weights, with training's K, on "
        f"{settings.diagnosed} tasks of {split}.",
        "Intervals are 95 %, over test tasks; differences are paired, task by task. One training "
        "of each arm: other seeds (--seed) say what training again would give.",
        f"Not the paper's protocol: {'; '.join(deviations(settings, results))}.",
    ]


def _after(results: Sequence[Result]) -> str:
    early = [
        f"{r.title} ({r.tested['step']:,})"
        for r in results
        if r.scores is not None and r.tested["step"] != r.training["iterations"]
    ]
    return "of the last step" + (f" but for {', '.join(early)}" if early else "")


def _head(settings: Settings) -> str:
    changed = {"K": settings.head_steps, "β": settings.head_beta}
    values = ", ".join(f"{name} = {value:g}" for name, value in changed.items() if value)
    return f", but for {values}" if values else ""


_SPLITS = {"val": "validation", "test": "the test"}
_WEIGHTS = {"best": "best (by validation nll)", "last": "last"}


def deviations(settings: Settings, results: Sequence[Result]) -> list[str]:
    """Where the protocol differs from the paper's, or the paper does not say."""
    sentences = []
    if (name := results[0].training["data"]["name"]) != PAPER.data:
        sentences.append(f"data {name}, not miniImageNet")
    for field, words in _TUNED.items():
        ours, theirs = getattr(settings, field), getattr(PAPER, field)
        if ours != theirs:
            sentences.append(f"{words} {ours:,}, not {theirs:,}")
    if settings.test_steps:
        sentences.append(f"K = {settings.test_steps} in the test")
    tasks = settings.train_tasks
    if "abml5" in settings.arms and tasks != PAPER.train_tasks:
        sentences.append(
            f"ABML's one hyper-prior is spread over {tasks:,} tasks and so weighs × "
            f"{PAPER.train_tasks / tasks:.3g}"
        )
    if settings.batch != PAPER.batch:
        scaled = "" if settings.meta_lr == PAPER.meta_lr else ", another"
        sentences.append(
            f"{settings.batch} tasks a step, not {PAPER.batch} (meta step size "
            f"{settings.meta_lr:g}{scaled or ', not scaled'})"
        )
    if settings.precision != PAPER.precision:
        sentences.append(f"activations in {settings.precision}")
    if any(ARMS[name].implicit and ARMS[name].curvature == "ggn" for name in settings.arms):
        sentences.append("H is ggn, not Lemma 1's (arms ibaml5_lemma, ibaml15_lemma have that)")
    return [
        *sentences,
        "adaptation keeps its noise, the meta-gradient's norm is clipped at 10",
        "the paper does not say where ρ starts, which meta-loss iBaML has (here the query nll), "
        "which weights were tested, nor which statistics batch norm had",
    ]


def rows(results: Sequence[Result]) -> list[dict[str, Any]]:
    """A row per arm: every figure with its interval, and how it was trained."""
    table = []
    for r in results:
        summary = {} if r.scores is None else r.scores.summary()
        figures = {
            f"{metric}{end}": interval[key]
            for metric in ("nll", "accuracy", "brier", "ece", "mce")
            for interval in [plain(summary[metric]) if summary else dict.fromkeys(_ENDS)]
            for key, end in _ENDS.items()
        }
        table.append(
            {
                "arm": r.name,
                "title": r.title,
                **figures,
                "tested iteration": r.tested["step"],
                "diverged test tasks": r.tested["diverged"],
                **{
                    name: r.training[name]
                    for name in ("iterations", "tasks a step", "tasks", "seconds", "failed")
                },
            }
        )
    return table


def numbers(results: Sequence[Result]) -> dict[str, Any]:
    """All results, by the arms' names."""
    return {
        r.name: {"training": r.training, "tested": r.tested, "inside": r.inside} for r in results
    }


_ENDS = {"value": "", "low": " low", "high": " high"}


def difference_rows(results: Sequence[Result]) -> list[dict[str, Any]]:
    """Every arm minus the first, task by task: a row per arm and figure."""
    scores = scored(results)
    first = next(iter(scores), "")
    pairs = differences(scores) if len(scores) > 1 else {}
    return [
        {"arm": name, "minus": first, "figure": figure, **plain(interval)}
        for name, figures in pairs.items()
        for figure, interval in figures.items()
    ]


def inside_rows(results: Sequence[Result]) -> list[dict[str, Any]]:
    """A row per arm: what was seen at the end of training."""
    table = []
    for r in results:
        inside: Mapping[str, Any] = r.inside or {}
        against = inside.get("against first order", {})
        table.append(
            {
                "arm": r.name,
                "iteration": inside.get("step"),
                "split": inside.get("split"),
                "tasks": inside.get("tasks"),
                "diverged": inside.get("diverged"),
                **{
                    f"inner gradient, {block}{where}": inside.get(key, {}).get(block)
                    for block in ("mean", "log_var")
                    for where, key in (
                        ("", "inner gradient"),
                        (" at the prior", "inner gradient at the prior"),
                    )
                },
                "CG residual": inside.get("CG residual"),
                "deviation over weights": inside.get("deviation over weights"),
                **{
                    f"{what} to first order, {group}": against.get(group, {}).get(what)
                    for group in ("all", "mean", "log_var", "shared")
                    for what in ("ratio", "cosine")
                },
            }
        )
    return table


def claim(
    scores: Mapping[str, ClassScores], better: str, than: str, metric: str, paper: float | None
) -> tuple[bool, str] | None:
    """Whether an arm is better than another by a figure (lower is better, but for accuracy), and
    the sentence; None if one is missing. An undecided interval does not count as agreement."""
    if better not in scores or than not in scores:
        return None
    interval = paired(scores[than], scores[better])[metric]
    sign = -1 if metric == "accuracy" else 1
    low, high = sorted((sign * interval.low, sign * interval.high))
    ours, theirs = ARMS[better].title, ARMS[than].title
    if high < 0 or low > 0:
        text = f"{ours} is {'better' if high < 0 else 'worse'} than {theirs} by {_name(metric)}: "
    else:
        text = f"{ours} and {theirs} are not told apart by {_name(metric)}: "
    text += f"{written(interval, metric, '+')}"
    if paper is not None:
        text += f" (paper {paper:+.{_DIGITS[metric]}f}{_UNIT[metric]})"
    return high < 0, f"{text}."


_DIGITS = {"nll": 3, "accuracy": 1, "brier": 3, "ece": 1, "mce": 1}
_UNIT = {"nll": "", "accuracy": " %", "brier": "", "ece": " %", "mce": " %"}


def _name(metric: str) -> str:
    return metric.upper() if metric in ("ece", "mce") else metric


def written(interval: Interval, metric: str, sign: str = "") -> str:
    """A figure with its interval."""
    scale, digits, unit = 100 if _UNIT[metric] else 1, _DIGITS[metric], _UNIT[metric]
    value, low, high = (scale * n for n in (interval.value, interval.low, interval.high))
    if abs((high - value) - (value - low)) < 0.5 * 10**-digits:
        return f"{value:{sign}.{digits}f} ± {high - value:.{digits}f}{unit}"
    return f"{value:{sign}.{digits}f} [{low:{sign}.{digits}f}, {high:{sign}.{digits}f}]{unit}"


def notes(settings: Settings, results: Sequence[Result]) -> list[str]:
    """Arm by arm: what happened in training, and what was seen inside at its end."""
    return [sentence for r in results for sentence in _about(settings, r)]


def _about(settings: Settings, r: Result) -> Iterator[str]:
    if r.training["failed"]:
        yield f"{r.title}: training failed. {r.training['failed']}"
    if r.scores is not None:
        accuracy = r.scores.summary()["accuracy"]
        if accuracy.low <= 1 / settings.ways:
            yield f"{r.title}: no better than chance ({written(accuracy, 'accuracy')})."
        elif not has_learned(settings, r.scores):
            yield f"{r.title}: next to nothing was learned ({written(accuracy, 'accuracy')})."
    if r.tested["diverged"]:
        yield (
            f"{r.title}: adaptation diverged in {r.tested['diverged']} of {settings.test_tasks} "
            "test tasks; there the prior answered."
        )
    validations = [v for v in r.training["validation"] if v[1] is not None]
    if validations:
        best, last = min(validations, key=lambda v: v[1]), validations[-1]
        text = f"{r.title}: validation nll {last[1]:.3f} at the end"
        if best[0] != last[0]:
            text += f", lowest ({best[1]:.3f}) at iteration {best[0]:,}"
        yield f"{text}."
    if r.inside is not None:
        yield f"{r.title}: {_inside(r)}"


_BLOCKS = {"mean": "means", "log_var": "log-variances", "shared": "shared weights"}


def _inside(r: Result) -> str:
    """The diagnostics of an arm, and what they mean."""
    inside = r.inside or {}
    before, after = inside["inner gradient at the prior"], inside["inner gradient"]
    parts = [
        f"‖∇E‖ of the {_BLOCKS[b]} {_short(after[b])} ({_short(before.get(b))} at the prior)"
        for b in after
    ]
    if inside["CG residual"] is not None:
        parts.append(f"CG residual {_short(inside['CG residual'])}")
    if (spread := inside.get("deviation over weights")) is not None:
        parts.append(f"the prior's deviation {_short(spread)} times the size of its means")
    against = inside["against first order"]
    comparisons = [
        f"{_BLOCKS[g]} × {_short(c['ratio'])}, cosine {_short(c['cosine'])}"
        for g, c in against.items()
        if g != "all" and c["ratio"] is not None
    ]
    parts.append(f"its meta-gradient against the first-order one: {'; '.join(comparisons)}")
    return f"{', '.join(parts)}.{_meaning(r)}"


def _meaning(r: Result) -> str:
    """What the diagnostics of an implicit arm mean, if anything."""
    inside = r.inside or {}
    if not ARMS[r.name].implicit:
        return ""
    before, after = inside["inner gradient at the prior"], inside["inner gradient"]
    text = ""
    unsolved = [
        _BLOCKS[b] for b in after if after[b] and before.get(b) and after[b] > _SOLVED * before[b]
    ]
    if unsolved:
        text += f" Tasks are not solved in their {' and '.join(unsolved)} (‖∇E‖ above a tenth of "
        text += "the prior's), and the implicit rule assumes they are."
    means = inside["against first order"]["mean"]
    ratio, cosine = means["ratio"] or 0.0, means["cosine"] or 0.0
    if _NEARLY[0] <= ratio <= 1 / _NEARLY[0] and cosine >= _NEARLY[1]:
        text += " In the means it is nearly the first-order gradient."
    return text


def _short(value: float | None) -> str:
    return "–" if value is None else f"{value:.2g}"
