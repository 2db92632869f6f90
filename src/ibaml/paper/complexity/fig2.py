"""Figure 2: does the cost of a meta-gradient grow with K if it is explicit, and only then?

The points of `measure` are compared with the paper's four claims.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ibaml.fields import setting
from ibaml.files import at_home
from ibaml.paper.complexity.fig2_picture import draw
from ibaml.paper.complexity.findings import findings, slope
from ibaml.paper.complexity.measure import measure
from ibaml.paper.complexity.picture import complexity_figure
from ibaml.paper.complexity.result import Measured, Point, of_content, read
from ibaml.paper.complexity.sweep import IMPLICIT_OF, Sweep, label
from ibaml.paper.study import Findings, Progress, Study
from ibaml.parts import Numbers, Parts

UNITS = {"time": "ms", "memory": "mb"}
_STRAIGHT = 0.98  # growth is called linear if the R² of a line is at least this
_STEADY = {
    "time": 0.15,
    "memory": 0.02,
}  # the change over all K, relative to the mean, up to which a cost is constant
_COMPARABLE = 2.0  # a factor up to which two times are called comparable
_TWICE = (1.6, 2.5)  # factors that are called about two


@dataclass(frozen=True)
class Settings:
    """The settings of `ibaml bench complexity`, with its defaults."""

    measured: str = setting(
        "", "A JSON file from another machine; then nothing is measured, the rest is not read."
    )
    methods: str | None = None
    ks: str | None = None
    ls: str | None = None
    samples: str | None = None
    curvature: str | None = None
    stopping: str | None = None
    tasks: int | None = None
    image_size: int | None = None
    channels: int | None = None
    device: str | None = None
    execution: str | None = None
    precision: str | None = None
    repeats: int | None = None
    threads: int | None = 1

    def __post_init__(self) -> None:
        self.sweep()  # a wrong setting fails now, not after the measurement

    def given(self) -> dict[str, Any]:
        options = asdict(self)
        del options["measured"]
        return options

    def sweep(self) -> Sweep:
        return Sweep.of(self.given())


QUICK = Settings(ks="1,2,5,10,20", ls="1,5,10", image_size=42, channels=16, repeats=5)


def run(settings: Settings, parts: Parts, progress: Progress) -> Findings:
    if settings.measured:
        measured = read(at_home(settings.measured))
    else:
        # by what was given, not by what the device makes of it: elsewhere the folder is only drawn
        key = {k: v for k, v in settings.given().items() if k not in ("device", "threads")}
        measured = of_content(
            parts({"part": "points", **key}, partial(_measured, settings, progress))
        )
    return findings_of(settings, measured)


def _measured(settings: Settings, progress: Progress) -> Numbers:
    return measure(settings.sweep(), progress).content()


def findings_of(settings: Settings, measured: Measured) -> Findings:
    judged = [*_growth(measured), *_parity(measured), *_price(measured)]
    numbers: dict[str, Any] = {name: value for _, _, name, value in judged}
    return Findings(
        setup=_setup(settings, measured),
        agrees=[text for agrees, text, _, _ in judged if agrees],
        differs=[text for agrees, text, _, _ in judged if not agrees],
        numbers=numbers,
        tables={"fig2": [point.row() for point in measured.points]},
        pictures={
            "fig2": partial(draw, measured),
            "fig2_more": partial(complexity_figure, measured),
        },
        notes=[f"{f.question}: {f.subject}: {f.answer}." for f in findings(measured)],
        machine="; ".join(f"{name} {value}" for name, value in measured.machine.items()),
    )


Judgment = tuple[bool, str, str, Any]  # agrees, the sentence, the name of its figures, the figures


def _growth(measured: Measured) -> Iterator[Judgment]:
    """Explicit costs are linear in K, implicit ones constant in K and linear in L."""
    for method, samples in measured.curves():
        name, explicit = label(method, samples), method in IMPLICIT_OF
        points = measured.along_steps(method, samples)
        for what in UNITS if len(points) > 1 else ():
            ks = [p.arm.steps for p in points]
            ys = [_amount(p, what) for p in points]
            judge = _straight if explicit else _steady
            yield judge(name, what, ks, ys, "K")
        points = measured.along_cg_steps(method, samples)
        if len(points) > 1:
            ls = [p.arm.cg_steps or 0 for p in points]
            yield _straight(name, "time", ls, [_amount(p, "time") for p in points], "L")


def _amount(point: Point, what: str) -> float:
    return float(getattr(point.backward_cost, UNITS[what]))


def _straight(
    name: str, what: str, xs: Sequence[int], ys: Sequence[float], letter: str
) -> Judgment:
    """Whether growth is linear: a line fits, and rises."""
    rise, fit = slope(xs, ys), straightness(xs, ys)
    linear = rise > 0 and (len(xs) < 3 or fit >= _STRAIGHT)
    unit = UNITS[what].replace("mb", "MB")
    verdict = "grows linearly" if linear else "grows, not on a line," if rise > 0 else "falls"
    text = (
        f"{name}: the backward's {what} {verdict} in {letter}: "
        f"{ys[0]:.4g} {unit} at {letter} = {xs[0]}, {ys[-1]:.4g} at {xs[-1]}, {rise:+.3g} a step, "
        f"R² {fit:.3f} (from {_STRAIGHT:g} on it is called a line)."
    )
    figures = {"first": ys[0], "last": ys[-1], "a step": rise, "R²": fit}
    return linear, text, f"{name}, {what} over {letter}", figures


def _steady(name: str, what: str, xs: Sequence[int], ys: Sequence[float], letter: str) -> Judgment:
    """Whether there is no growth: a line through the (noisy) points hardly rises."""
    rise, middle = slope(xs, ys), sum(ys) / len(ys)
    trend = rise * (xs[-1] - xs[0]) / middle
    steady = abs(trend) <= _STEADY[what]
    unit = UNITS[what].replace("mb", "MB")
    text = (
        f"{name}: the backward's {what} {'does not depend' if steady else 'depends'} on {letter}: "
        f"{min(ys):.4g} to {max(ys):.4g} {unit} from {letter} = {xs[0]} to {xs[-1]}, a line "
        f"through them changes by {100 * trend:+.1f} % of their mean (up to "
        f"{100 * _STEADY[what]:g} % is called constant)."
    )
    figures = {"least": min(ys), "most": max(ys), "trend": trend}
    return steady, text, f"{name}, {what} over {letter}", figures


def straightness(xs: Sequence[float], ys: Sequence[float]) -> float:
    """R² of the least-squares line; 1 if the values do not vary."""
    rise = slope(xs, ys)
    x0, y0 = sum(xs) / len(xs), sum(ys) / len(ys)
    whole = sum((y - y0) ** 2 for y in ys)
    left = sum((y - y0 - rise * (x - x0)) ** 2 for x, y in zip(xs, ys, strict=True))
    return 1 - left / whole if whole > 0 else 1.0


def _parity(measured: Measured) -> Iterator[Judgment]:
    """The implicit backward with L = n takes about as long as the explicit one with K = n."""
    for implicit, explicit, times in measured.parity():
        near = all(1 / _COMPARABLE <= ratio <= _COMPARABLE for ratio in times.values())
        ratios = ", ".join(f"× {ratio:.2f} at {n}" for n, ratio in times.items())
        name = f"{implicit} over {explicit}"
        text = (
            f"{name}: the backward's time at K = L is {'' if near else 'not '}comparable: "
            f"{ratios} (comparable: within a factor of {_COMPARABLE:g})."
        )
        yield near, text, f"{name}, time at K = L", {str(n): r for n, r in times.items()}


def _price(measured: Measured) -> Iterator[Judgment]:
    """A Bayesian method costs about twice its deterministic one, at every K measured for both."""
    for method, samples in measured.curves():
        pairs = measured.beside_deterministic(method, samples)
        for what in UNITS if pairs else ():
            ratios = [_amount(ours, what) / _amount(plain, what) for ours, plain in pairs]
            low, high = min(ratios), max(ratios)
            twice = _TWICE[0] <= low and high <= _TWICE[1]
            name = f"{label(method, samples)} over {pairs[0][1].arm.label}"
            text = (
                f"{name}: {what} of the backward × {low:.2f} to {high:.2f} over all K. Paper: 2 "
                f"(here {_TWICE[0]:g} to {_TWICE[1]:g} is called two)."
            )
            yield twice, text, f"{name}, {what}", {"least": low, "most": high}


def _setup(settings: Settings, measured: Measured) -> list[str]:
    sweep = measured.sweep
    source = f"Read from {Path(settings.measured).name}. " if settings.measured else ""
    return [
        f"{source}{measured.headline}, all weights adapted, {sweep.precision} precision.",
        f"K = {_listed(sweep.ks)} at L = {sweep.fixed_cg_steps}; L = {_listed(sweep.ls)} at K = "
        f"{sweep.fixed_steps}. H of the implicit methods: {sweep.curvature}"
        f"{', and δ of the start' if sweep.stopping == 'auto' else ''}, L products exactly.",
        "As in the paper the backward pass alone: adaptation is not in it. Time: the median of "
        f"{sweep.repeats} runs, per task; memory: the peak above what stood before, per task.",
        f"The paper does not give S; here {_listed(sweep.samples)}. Its pictures are of "
        "miniImageNet; here smooth random ones, for costs do not depend on what is in a picture.",
        "What each figure contains: docs/complexity.md.",
    ]


def _listed(values: Sequence[int]) -> str:
    return ", ".join(map(str, values))


STUDY = Study("fig2", "Figure 2: time and memory of meta-gradients", Settings(), QUICK, run)
