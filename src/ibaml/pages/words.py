"""How are figures written on a page?"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from ibaml.evaluation import Interval

METHODS = {
    "ibaml": "iBaML", "abml": "ABML", "imaml": "iMAML", "maml": "MAML", "fomaml": "FOMAML",
    "reptile": "Reptile",
}  # fmt: skip


class Metric(NamedTuple):
    """How one figure is named, scaled and explained."""

    name: str
    percent: bool
    digits: int
    meaning: str


METRICS: Mapping[str, Metric] = {
    "accuracy": Metric("accuracy", True, 1, "share of right answers"),
    "nll": Metric("nll", False, 3, "−log of what it gave the truth, on average; lower is better"),
    "brier": Metric("Brier score", False, 3, "squared error of its probabilities; lower is better"),
    "ece": Metric("ECE", True, 1, "how far confidence and accuracy lie apart; lower is better"),
    "mce": Metric("MCE", True, 1, "the same in the worst bin"),
    "rmse": Metric("RMSE", False, 3, "root of the mean squared error; lower is better"),
    "coverage": Metric("in 95 % interval", True, 1, "targets inside; 95 % is right"),
}


_UNIT = "\u00a0%"  # a number and its unit stay on one line


def percent(share: float, digits: int = 0) -> str:
    """A share: 80 %."""
    return f"{100 * share:.{digits}f}{_UNIT}"


def metric_name(metric: str, target: str | None = None) -> str:
    """The name of a figure; an error may be of a target with units."""
    if metric == "rmse" and target is not None:
        return f"RMSE of {target}"
    return METRICS[metric].name


def value(metric: str, number: float, sign: str = "") -> str:
    """A figure alone: 97.5 %."""
    _, scaled, digits, _ = METRICS[metric]
    if not math.isfinite(number):
        return "–"
    digits = _digits(number, digits) if metric == "rmse" else digits
    return (
        f"{_fixed(100 * number, digits, sign)}{_UNIT}" if scaled else _fixed(number, digits, sign)
    )


def with_interval(metric: str, interval: Interval, sign: str = "") -> str:
    """A figure and its 95 % interval: 97.5 ± 0.6 %, or 0.094 (0.070 to 0.121)."""
    _, scaled, digits, _ = METRICS[metric]
    scale, unit = (100.0, _UNIT) if scaled else (1.0, "")
    middle, low, high = (scale * n for n in (interval.value, interval.low, interval.high))
    digits = _digits(interval.value, digits) if metric == "rmse" else digits
    if not math.isfinite(high - low):
        return value(metric, interval.value, sign)
    written = _fixed(middle, digits, sign)
    if abs((high - middle) - (middle - low)) < 0.5 * 10**-digits:
        return f"{written} ± {_fixed(high - middle, digits)}{unit}"
    return f"{written}{unit} ({_fixed(low, digits, sign)} to {_fixed(high, digits, sign)})"


def span(metric: str, interval: Interval) -> str:
    """The interval alone: 97.0 to 98.1 %."""
    _, scaled, digits, _ = METRICS[metric]
    if not math.isfinite(interval.high - interval.low):
        return "one task: no interval"
    scale, unit = (100.0, _UNIT) if scaled else (1.0, "")
    digits = _digits(interval.value, digits) if metric == "rmse" else digits
    return (
        f"{_fixed(scale * interval.low, digits)} to {_fixed(scale * interval.high, digits)}{unit}"
    )


def _fixed(number: float, digits: int, sign: str = "") -> str:
    """A number with so many decimals and a proper minus."""
    return f"{number:{sign}.{digits}f}".replace("-", "−")


def _digits(number: float, usual: int) -> int:
    """Decimals that show at least three digits of a number in units of its own."""
    size = abs(number)
    return max(usual if size < 10 else 0, 2 - math.floor(math.log10(size))) if size > 0 else usual


def number(size: float, digits: int = 3) -> str:
    """A number in so many digits."""
    return f"{size:.{digits}g}".replace("-", "−") if math.isfinite(size) else "–"


def count(things: int, one: str, many: str | None = None) -> str:
    """1 task, 2,000 tasks."""
    return f"{things:,} {one if things == 1 else many or one + 's'}"


def duration(seconds: float) -> str:
    """A time as a person says it."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def plain(setting: object) -> str:
    """The value of a setting."""
    if setting is None:
        return "–"
    if isinstance(setting, bool):
        return "yes" if setting else "no"
    return f"{setting:g}" if isinstance(setting, float) else str(setting)
