"""Table 1: do nll and accuracy improve with K under implicit gradients, and beyond MAML and ABML?

5-way 5-shot, the paper's five rows, and beside them FOMAML, iMAML and iBaML with the head adapted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from ibaml.evaluation import ClassScores
from ibaml.paper.study import Findings, Progress, Study
from ibaml.paper.trained.arms import Settings
from ibaml.paper.trained.compared import PAPER, Judged, claim, compared, rows, scored, written
from ibaml.paper.trained.results import Result, results
from ibaml.paper.trained.table1_picture import draw
from ibaml.parts import Parts

# value and half of the 95 % interval, as printed
PRINTED: dict[str, dict[str, tuple[float, float]]] = {
    "maml5": {"nll": (0.967, 0.017), "accuracy": (63.1, 0.92)},
    "abml5": {"nll": (0.957, 0.016), "accuracy": (62.8, 0.74)},
    "ibaml5": {"nll": (0.965, 0.018), "accuracy": (63.2, 0.74)},
    "ibaml10": {"nll": (0.947, 0.017), "accuracy": (64.0, 0.75)},
    "ibaml15": {"nll": (0.943, 0.017), "accuracy": (64.0, 0.74)},
}
_CLAIMS = (  # better, than, by
    ("ibaml10", "ibaml5", "nll"),
    ("ibaml15", "ibaml10", "nll"),
    ("ibaml15", "ibaml5", "nll"),
    ("ibaml15", "ibaml5", "accuracy"),
    ("ibaml15", "abml5", "nll"),
    ("ibaml15", "maml5", "nll"),
    ("ibaml15", "maml5", "accuracy"),
)
# the same claims of the arms with our defaults
_OURS = {"ibaml15": "ibaml_ours", "abml5": "abml_ours", "maml5": "maml_ours"}
FULL = Settings()
# what two cores do in minutes: a small network, few steps, and step sizes and a prior that learn
# in them (docs/training.md says why β and ρ are small)
QUICK = replace(
    FULL, data="glyphs", channels=8, queries=5, train_tasks=192, batch=4, head_tasks=1200,
    meta_lr=0.003, inner_lr=0.1, samples=2, beta=0.001, init_log_var=-9.0, validations=2,
    val_tasks=20, test_tasks=60, diagnosed=8,
)  # fmt: skip


def run(settings: Settings, parts: Parts, progress: Progress) -> Findings:
    arms_results = results(settings, parts, progress)
    return compared(
        "table1",
        settings,
        arms_results,
        _judged(settings, arms_results),
        table=[{**row, **_printed(row["arm"])} for row in rows(arms_results)],
        pictures={
            "table1": partial(draw, arms_results, PRINTED, _headline(settings, arms_results))
        },
        shown=[_shown(r) for r in arms_results],
    )


def _headline(settings: Settings, arms_results: Sequence[Result]) -> str:
    tasks = {r.training["tasks"] for r in arms_results}
    length = " to ".join(f"{n:,}" for n in sorted({min(tasks), max(tasks)}))
    name = arms_results[0].training["data"]["name"]
    return (
        f"{name}, {settings.ways}-way {settings.shots}-shot, {length} training tasks; "
        f"{settings.test_tasks:,} test tasks, 95 % intervals"
    )


def _printed(arm: str) -> dict[str, float | None]:
    printed = PRINTED.get(arm)
    return {
        f"paper {metric}": printed[metric][0] if printed else None for metric in ("nll", "accuracy")
    }


def _shown(r: Result) -> dict[str, str]:
    printed = PRINTED.get(r.name)
    paper = {
        "paper nll": f"{printed['nll'][0]:.3f} ± {printed['nll'][1]:.3f}" if printed else "",
        "paper accuracy": (
            f"{printed['accuracy'][0]:.1f} ± {printed['accuracy'][1]:.2f} %" if printed else ""
        ),
    }
    if r.scores is None:
        return {"method": r.title, "nll": "–", "accuracy": "–", "ECE": "–", **paper}
    summary = r.scores.summary()
    figures = {n: written(summary[m], m) for n, m in _SHOWN.items()}
    return {"method": r.title, **figures, **paper}


_SHOWN = {"nll": "nll", "accuracy": "accuracy", "ECE": "ece"}


def _judged(settings: Settings, arms_results: Sequence[Result]) -> Judged:
    agrees: list[str] = []
    differs: list[str] = []
    scores = scored(arms_results)
    for better, than, metric in _CLAIMS:
        paper = PRINTED[better][metric][0] - PRINTED[than][metric][0]
        pairs = [(better, than)]
        if better in _OURS and than in _OURS:
            pairs.append((_OURS[better], _OURS[than]))
        for pair in pairs:
            judged = claim(scores, *pair, metric, paper)
            if judged is not None:
                (agrees if judged[0] else differs).append(judged[1])
    if arms_results[0].training["data"]["name"] == PAPER.data:
        for verdict, text in _levels(scores):
            (agrees if verdict else differs).append(text)
    else:
        differs.append(
            f"The levels of the table are of miniImageNet, and these of "
            f"{arms_results[0].training['data']['name']}: only the order can agree."
        )
    return agrees, differs


def _levels(scores: Mapping[str, ClassScores]) -> list[tuple[bool, str]]:
    """Whether each figure is the paper's, within both intervals."""
    judged = []
    for name, one in scores.items():
        for metric, (value, half) in PRINTED.get(name, {}).items():
            interval = one.summary()[metric]
            scale = 100 if metric == "accuracy" else 1
            near = abs(scale * interval.value - value) <= half + scale * (
                interval.high - interval.value
            )
            text = f"{name}: {metric} {written(interval, metric)}, paper {value} ± {half}."
            judged.append((near, text))
    return judged


STUDY = Study("table1", "Table 1: nll and accuracy, 5-way 5-shot", FULL, QUICK, run)
