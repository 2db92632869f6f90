"""Figure 3: which method is calibrated best? ECE and MCE, 5-way 1-shot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from ibaml.evaluation import ClassScores
from ibaml.paper.study import Findings, Progress, Study
from ibaml.paper.trained import table1
from ibaml.paper.trained.arms import ARMS, Settings
from ibaml.paper.trained.compared import Judged, claim, compared, has_learned, rows, scored, written
from ibaml.paper.trained.fig3_picture import draw
from ibaml.paper.trained.results import Result, results
from ibaml.parts import Parts
from ibaml.report import reliability_figure

PAPERS = ("maml5", "abml5", "ibaml5", "ibaml10", "ibaml15")  # methods the paper has
METRICS = ("ece", "mce")
FULL = replace(table1.FULL, shots=1)
QUICK = replace(table1.QUICK, shots=1, train_tasks=320, head_tasks=1600)


def run(settings: Settings, parts: Parts, progress: Progress) -> Findings:
    arms_results = results(settings, parts, progress)
    name = arms_results[0].training["data"]["name"]
    title = f"{name}, {settings.ways}-way {settings.shots}-shot, {settings.test_tasks:,} test tasks"
    by_title = {r.title: r.scores for r in arms_results if r.scores is not None}
    return compared(
        "fig3",
        settings,
        arms_results,
        judgment(settings, scored(arms_results)),
        table=rows(arms_results),
        tables={"bins": _bins(arms_results)},
        pictures={
            "fig3": partial(draw, by_title, title),
            "fig3_reliability": partial(reliability_figure, by_title, title),
        },
        shown=[_shown(r) for r in arms_results],
        also=["ECE and MCE: top label, 15 bins of equal width."],
        leaning=_confidence_gaps(arms_results),
    )


def _bins(arms_results: Sequence[Result]) -> list[dict[str, Any]]:
    """What a reliability diagram shows: a row per arm and bin that is not empty."""
    lines = []
    for name, scores in scored(arms_results).items():
        for place, (count, confidence, right) in enumerate(scores.bins().sum(0).tolist()):
            if count:
                lines.append(
                    {
                        "arm": name,
                        "bin": place,
                        "predictions": int(count),
                        "confidence": confidence / count,
                        "accuracy": right / count,
                    }
                )
    return lines


def _shown(r: Result) -> dict[str, str]:
    columns = {"ECE": "ece", "MCE": "mce", "nll": "nll", "accuracy": "accuracy"}
    if r.scores is None:
        return {"method": r.title, **dict.fromkeys(columns, "–")}
    summary = r.scores.summary()
    return {"method": r.title, **{n: written(summary[m], m) for n, m in columns.items()}}


def _confidence_gaps(arms_results: Sequence[Result]) -> list[str]:
    """Whether each arm is over- or underconfident, and by how much."""
    sentences = []
    for r in arms_results:
        if r.scores is not None:
            gap = float(r.scores.confidence.mean() - r.scores.correct.mean())
            direction = "over" if gap > 0 else "under"
            sentences.append(
                f"{r.title}: {direction}confident by {100 * abs(gap):.1f} points on average "
                f"(confidence {100 * float(r.scores.confidence.mean()):.1f} %)."
            )
    return sentences


def judgment(settings: Settings, scores: Mapping[str, ClassScores]) -> Judged:
    """The paper: iBaML is the most competitive in both figures."""
    agrees: list[str] = []
    differs: list[str] = []

    def judge(ours: str, theirs: str, metric: str, before: str = "") -> None:
        judged = claim(scores, ours, theirs, metric, None)
        if judged is None:
            return
        better, text = judged
        for name in (ours, theirs):
            if not has_learned(settings, scores[name]):
                better = False
                accuracy = written(scores[name].summary()["accuracy"], "accuracy")
                text += f" But {ARMS[name].title} learned next to nothing ({accuracy}): who says "
                text += "the same to everything is calibrated."
        (agrees if better else differs).append(f"{before}{text}")

    of_paper = {name: s.summary() for name, s in scores.items() if name in PAPERS}
    for metric in METRICS if len(of_paper) > 1 else ():
        order = sorted(of_paper, key=lambda name: of_paper[name][metric].value)
        ranked = ", ".join(
            f"{ARMS[name].title} {written(of_paper[name][metric], metric)}" for name in order
        )
        order.sort(key=lambda name: not has_learned(settings, scores[name]))  # those that have
        best, rival = _first(order, "ibaml", True), _first(order, "ibaml", False)
        before = f"{metric.upper()}, lowest first, of the paper's methods: {ranked}. "
        judge(best, rival, metric, before)
    for end in ("5", "15", "_ours"):
        rivals = "_ours" if end == "_ours" else "5"
        for theirs in ("maml", "abml"):
            for metric in METRICS:
                judge(f"ibaml{end}", f"{theirs}{rivals}", metric)
    return agrees, differs


def _first(order: Sequence[str], method: str, of_it: bool) -> str:
    """The first arm that is (or is not) of the method."""
    return next((name for name in order if (ARMS[name].method == method) is of_it), "")


STUDY = Study("fig3", "Figure 3: calibration, 5-way 1-shot", FULL, QUICK, run)
