"""What does a measurement show? Growth in K and L, parity at K = L, the cost of variances."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ibaml.paper.complexity.result import Cost, Measured, Point
from ibaml.paper.complexity.sweep import label


@dataclass(frozen=True)
class Finding:
    """A question, the method or methods it is about, and the answer in words."""

    question: str
    subject: str
    answer: str


def findings(measured: Measured) -> list[Finding]:
    """All findings, computed from the measured points."""
    return [
        *_growth_in_steps(measured),
        *_growth_in_cg_steps(measured),
        *_parity(measured),
        *_price_of_variance(measured),
        *_share_of_forward(measured),
    ]


def written(measured: Measured) -> Iterator[str]:
    """The findings as lines, each question above its answers."""
    before = ""
    for finding in findings(measured):
        if finding.question != before:
            before = finding.question
            yield before
        yield f"  {finding.subject}: {finding.answer}"


def slope(xs: Sequence[float], ys: Sequence[float]) -> float:
    """The least-squares slope."""
    x0, y0 = sum(xs) / len(xs), sum(ys) / len(ys)
    spread = sum((x - x0) ** 2 for x in xs)
    return sum((x - x0) * (y - y0) for x, y in zip(xs, ys, strict=True)) / spread


def _ratios(cost: Cost, over: Cost) -> str:
    return f"time × {cost.ms / over.ms:.2f}, memory × {cost.mb / over.mb:.2f}"


def _growth(question: str, points: Sequence[Point], xs: Sequence[float], letter: str) -> Finding:
    """Growth from the first to the last point, in all and per step."""
    costs = [p.backward_cost for p in points]
    ms, mb = slope(xs, [c.ms for c in costs]), slope(xs, [c.mb for c in costs])
    ends = f"{letter} = {xs[-1]:.0f} over {letter} = {xs[0]:.0f}"
    answer = f"{_ratios(costs[-1], costs[0])} ({ms:+.3g} ms, {mb:+.3g} MB a step)"
    return Finding(question, f"{points[0].arm.label}, {ends}", answer)


def _growth_in_steps(measured: Measured) -> Iterator[Finding]:
    question = f"backward as K grows (L = {measured.sweep.fixed_cg_steps})"
    for curve in measured.curves():
        points = measured.along_steps(*curve)
        if len(points) > 1:
            ks = [float(p.arm.steps) for p in points]
            yield _growth(question, points, ks, "K")


def _growth_in_cg_steps(measured: Measured) -> Iterator[Finding]:
    question = f"backward as L grows (K = {measured.sweep.fixed_steps})"
    for curve in measured.curves():
        points = measured.along_cg_steps(*curve)
        if len(points) > 1:
            ls = [float(p.arm.cg_steps or 0) for p in points]
            yield _growth(question, points, ls, "L")


def _parity(measured: Measured) -> Iterator[Finding]:
    """An implicit backward with L = n beside an explicit one through K = n."""
    for implicit, explicit, times in measured.parity():
        said = ", ".join(f"× {ratio:.2f} at {n}" for n, ratio in times.items())
        yield Finding(
            "backward's time at K = L, implicit over explicit", f"{implicit} over {explicit}", said
        )


def _price_of_variance(measured: Measured) -> Iterator[Finding]:
    sweep = measured.sweep
    place = f"K = {sweep.fixed_steps}, L = {sweep.fixed_cg_steps}"
    for method, samples in measured.curves():
        for ours, plain in measured.beside_deterministic(method, samples):
            if ours.arm.steps == sweep.fixed_steps:
                yield Finding(
                    f"backward, Bayesian over deterministic ({place})",
                    f"{label(method, samples)} over {plain.arm.label}",
                    _ratios(ours.backward_cost, plain.backward_cost),
                )


def _share_of_forward(measured: Measured) -> Iterator[Finding]:
    """The forward's share at the first, the fixed and the last K of every curve."""
    question = "the forward's share of forward + backward, in time"
    for curve in measured.curves():
        points = measured.along_steps(*curve)
        few = {0, len(points) - 1}
        few |= {i for i, p in enumerate(points) if p.arm.steps == measured.sweep.fixed_steps}
        said = [_share(points[i]) for i in sorted(few) if points]
        if said:
            yield Finding(question, label(*curve), ", ".join(said))


def _share(point: Point) -> str:
    assert point.forward is not None
    part = point.forward.ms / (point.forward.ms + point.backward_cost.ms)
    return f"{100 * part:.0f} % at K = {point.arm.steps}"
