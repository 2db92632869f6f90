"""What do the curves of Figure 1 show, compared with what the paper says?"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from ibaml.paper.gradients.curves import EXPLICIT, Curves, crossing, quartiles
from ibaml.paper.gradients.linear import SCANNED

if TYPE_CHECKING:
    from ibaml.paper.gradients.fig1 import Settings

_EXPECTATIONS = {"mc": "Monte Carlo", "exact": "closed form"}
_NEAR = 0.05  # mean errors that differ by less count as the same


def summary_rows(curves: Curves) -> list[dict[str, Any]]:
    rows = []
    for expectation, rules in curves.ratio.items():
        for rule, ratio in rules.items():
            low, middle, high = np.quantile(ratio, [0.1, 0.5, 0.9], axis=0)
            wins = curves.wins(expectation, rule)
            for i, k in enumerate(curves.steps):
                rows.append(
                    {
                        "expectation": expectation,
                        "rule": rule,
                        "K": k,
                        "mean": float(ratio[:, i].mean()),
                        "standard deviation": float(ratio[:, i].std(ddof=1)),
                        "10 %": float(low[i]),
                        "median": float(middle[i]),
                        "90 %": float(high[i]),
                        "pooled": float(curves.pooled[expectation][rule][i]),
                        "seeds": len(ratio),
                        "closer than explicit": int(wins[i]),
                    }
                )
    return rows


def seed_rows(curves: Curves) -> list[dict[str, Any]]:
    return [
        {"expectation": e, "rule": rule, "seed": key, "K": k, "NRMSE": float(ratio[key, i])}
        for e, rules in curves.ratio.items()
        for rule, ratio in rules.items()
        for key in range(len(ratio))
        for i, k in enumerate(curves.steps)
    ]


def numbers_of(settings: Settings, curves: Curves) -> dict[str, Any]:
    """The figures behind the sentences, for both expectations."""
    numbers: dict[str, Any] = {}
    positive = [i for i, k in enumerate(curves.steps) if k]
    for e in _EXPECTATIONS:
        ratio, pooled = curves.ratio[e], curves.pooled[e]
        mean = {rule: ratios.mean(0) for rule, ratios in ratio.items()}
        lost = len(ratio[EXPLICIT]) - curves.wins(e, "energy exact")
        ever = (ratio["energy exact"] >= ratio[EXPLICIT])[:, positive].any(1)
        numbers[e] = {
            "lemma crosses explicit, means": crossing(
                curves.steps, mean["lemma exact"], mean[EXPLICIT]
            ),
            "lemma crosses explicit, pooled": crossing(
                curves.steps, pooled["lemma exact"], pooled[EXPLICIT]
            ),
            "lemma crosses explicit, single seeds": quartiles(curves.crossings(e)),
            "energy above explicit in the mean at K": [
                curves.steps[i] for i in positive if mean["energy exact"][i] >= mean[EXPLICIT][i]
            ],
            "seeds in which energy is not below explicit, by K": {
                str(curves.steps[i]): int(lost[i]) for i in positive if lost[i]
            },
            "median size of the true gradient, those seeds and all": [
                float(np.median(curves.size[ever])) if ever.any() else None,
                float(np.median(curves.size)),
            ],
            "mean NRMSE at the last K": {rule: float(m[-1]) for rule, m in mean.items()},
        }
    return numbers


def setup(settings: Settings) -> list[str]:
    test = settings.test()
    return [
        f"Linear regression, d = {test.dimension}, σ = {test.noise}, condition number "
        f"{test.condition:g}, {test.support} support and {test.query} query examples; prior mean 0 "
        f"and variance 1; K steps of descent on (m, ρ) with α = {test.rate} on the summed loss.",
        f"X: spectrum {test.spectrum!r}, α·σ_max²/σ² = {test.stiffness:g}, so σ_max = "
        f"{test.noise * math.sqrt(test.stiffness / test.rate):.4f}; query inputs {test.queries!r}.",
        SCANNED,
        f"{test.samples} Monte-Carlo samples, kept during adaptation, fresh for the meta-loss "
        "(mc); or the expectation in closed form, by noise with exact moments (exact).",
        "NRMSE: ‖g − g*‖/‖g*‖ in (m, ρ) with g* from the closed-form optimum, the exact one in "
        f"both cases; mean over {settings.seeds} seeds, bands from 10 to 90 % of them.",
        f"CG: L = {settings.cg_steps} steps, from 0 (plain), from b/diag (warm), or preconditioned "
        "by the prior's diagonal; in (m, d) for lemma, in (m, ρ) for energy and ggn.",
        f"Crossing: closed form, exact solve, {settings.scan_seeds} seeds a point.",
    ]


def judged(
    settings: Settings, curves: Curves, numbers: dict[str, Any]
) -> tuple[list[str], list[str]]:
    """What agrees with the paper and what does not, in the figures of this run."""
    agrees: list[str] = []
    differs: list[str] = []
    for e, name in _EXPECTATIONS.items():
        summary = numbers[e]
        at = summary["lemma crosses explicit, means"]
        text = f"{name}: the paper's form, solved exactly, overtakes the explicit gradient at K = "
        if at is None:
            differs.append(f"{name}: the paper's form does not overtake the explicit gradient.")
        else:
            each = summary["lemma crosses explicit, single seeds"]
            text += (
                f"{at:.1f} in the mean ({_k(summary['lemma crosses explicit, pooled'])} pooled; "
            )
            text += f"single seeds: median {_k(each['median'])}, quartiles "
            text += f"{_k(each['lower quartile'])} and {_k(each['upper quartile'])}). Paper: 5."
            (agrees if 3 <= at <= 7 else differs).append(text)
        above = summary["energy above explicit in the mean at K"]
        text = f"{name}: with nothing substituted (energy, exact solve) "
        if above:
            text += "the mean is above explicit's at K = " + ", ".join(map(str, above))
            text += ", and below at every other K ≥ 1."
        else:
            text += "there is no crossing: the mean is below explicit's at every K ≥ 1."
        lost = summary["seeds in which energy is not below explicit, by K"]
        text += f" Seeds in which it is not: {_listed(lost, settings.seeds) if lost else 'none'}."
        some, every = summary["median size of the true gradient, those seeds and all"]
        if some is not None:
            text += f" They have a small true gradient: median ‖g*‖ {some:.0f}, of all seeds "
            text += f"{every:.0f}."
        differs.append(text)
    last = numbers["mc"]["mean NRMSE at the last K"]
    k, length = curves.steps[-1], settings.cg_steps
    mean = {rule: summary.mean(0) for rule, summary in curves.ratio["mc"].items()}
    first = min(5, k)
    plain = mean["lemma plain"][[i for i, s in enumerate(curves.steps) if s >= first]]
    differs.append(
        f"“L = {length} suffices” does not hold for CG from zero: lemma plain stays between "
        f"{plain.min():.2f} and {plain.max():.2f} for all K ≥ {first} (at K = {k}: "
        f"{last['lemma plain']:.2f}, exact solve {last['lemma exact']:.2f})."
    )
    for e, name in _EXPECTATIONS.items():
        summary = numbers[e]["mean NRMSE at the last K"]
        for solver, words in (("warm", "from b/diag"), ("preconditioned", "preconditioned")):
            near = summary[f"lemma {solver}"] - summary["lemma exact"] <= _NEAR
            (agrees if near else differs).append(
                f"{name}: “L = {length} suffices” {'holds' if near else 'does not hold'} for lemma "
                f"with CG {words}: {summary[f'lemma {solver}']:.3f} at K = {k}, exact solve "
                f"{summary['lemma exact']:.3f}."
            )
    agrees.append(
        "Errors fall as K grows, explicit and implicit: in the mean from "
        f"{mean[EXPLICIT][0]:.2f} and {mean['lemma exact'][0]:.2f} at K = {curves.steps[0]} to "
        f"{last[EXPLICIT]:.2f} and {last['lemma exact']:.2f} at K = {k}."
    )
    return agrees, differs


def _k(value: float | None) -> str:
    return "never" if value is None else f"{value:.1f}"


def _listed(lost: dict[str, int], seeds: int) -> str:
    return ", ".join(f"{count} of {seeds} at K = {k}" for k, count in lost.items())
