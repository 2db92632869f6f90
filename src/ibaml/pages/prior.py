"""What did the prior learn? Its layers, how far they moved, and the numbers beside them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import nn

from ibaml.energy import Categorical
from ibaml.learner import MetaLearner
from ibaml.nn import Discriminant
from ibaml.pages.blocks import Block, Figure, Table, Text
from ibaml.pages.drawing import drawn
from ibaml.pages.words import number, percent
from ibaml.report.charts import ranges_chart, spectrum_chart

_ROWS = 12  # of layers; a table of more is folded


def prior_blocks(
    learner: MetaLearner, start: nn.Module | None, log_var: float | None, name: str
) -> list[Block]:
    """What the prior of a learner holds.

    Args:
        start: the network as training began; None if that is not known.
        log_var: ρ as training began.
        name: for the drawings, unique on the page.
    """
    blocks: list[Block] = [Text(_sentence(learner))]
    if rows := _numbers(learner):
        blocks.append(Table("Numbers learned beside the weights", ("number", "value", ""), rows,
                            words=frozenset({2})))  # fmt: skip
    layers = _layers(learner, start)
    table = Table(
        "The layers of the network",
        ("layer", "role", "shape", "size of the weights (RMS)", "moved in training",
         "prior’s deviation exp(ρ/2): middle (lowest to highest)"),
        [row for row, _ in layers],
        words=frozenset({1, 2}),
        folded=len(layers) > _ROWS,
    )  # fmt: skip
    ranges = [found for _, found in layers if found is not None]
    if ranges:
        numbered = [row[0] for row, found in layers if found is not None]
        blocks.append(
            Figure(
                "Log-variance ρ of the adapted layers",
                drawn(
                    lambda: ranges_chart(ranges, "log-variance ρ", log_var),
                    f"{name}-widths", "Log-variance of the prior in each adapted layer",
                ),
                "A small ρ says that a task hardly moves these weights."
                + ("" if log_var is None else " The dashed line is where training began."),
                Table(
                    "ρ by layer", ("layer", "lowest", "middle", "highest"),
                    [(f"{i + 1}: {layer}", *map(number, found))
                     for i, (layer, found) in enumerate(zip(numbered, ranges, strict=True))],
                    folded=True,
                ),
                note=" · ".join(f"{i + 1} {layer}" for i, layer in enumerate(numbered)),
            )
        )  # fmt: skip
    if isinstance(learner.model, Discriminant):
        blocks.append(spectrum(learner.model.between.double().cpu().numpy(), name))
    blocks.append(table)
    return blocks


def spectrum(between: object, name: str) -> Figure:
    """How class means spread along the directions of a map."""
    import numpy as np

    values = np.sort(np.asarray(between, dtype=float))[::-1]
    picked = sorted({0, 1, 3, 9, 31, 99, len(values) - 1} & set(range(len(values))))
    return Figure(
        "How far classes lie apart in each direction",
        drawn(
            lambda: spectrum_chart(values), f"{name}-spectrum",
            "Variance of class means along each direction, falling",
        ),
        "In the first directions classes differ most from each other, so that an example says most "
        "about its class there; in the last ones the prior believes an example little.",
        Table(
            "Variance of class means (within a class it is 1)", ("direction", "variance"),
            [(f"{i + 1:,}", number(float(values[i]))) for i in picked], folded=True,
        ),
    )  # fmt: skip


def _sentence(learner: MetaLearner) -> str:
    def size(names: Sequence[str]) -> int:
        return sum(learner.model.get_parameter(n).numel() for n in names)

    roles = learner.roles
    adapted, shared, frozen = (size(n) for n in (roles.adapted, roles.shared, roles.frozen))
    parts = [f"{adapted:,} weights are adapted to each task"]
    if shared:
        parts.append(f"{shared:,} are the same for all tasks")
    if frozen:
        parts.append(f"{frozen:,} do not learn")
    tied = " All classes share one prior." if learner.layout.rows else ""
    return "; ".join(parts) + "." + tied


def _numbers(learner: MetaLearner) -> list[tuple[str, str, str]]:
    rows = []
    likelihood = learner.likelihood
    if isinstance(likelihood, Categorical):
        t = likelihood.temperature
        effect = "as sure as" if abs(t - 1) < 0.005 else "surer than" if t > 1 else "less sure than"
        text = f"answers are softmax(t·z), {effect} adaptation leaves them"
        rows.append(("temperature t", number(t), text))
    variance = likelihood.noise_variance()
    if variance is not None and variance.numel() == 1:
        text = "deviation of an observation from the truth, in the units the network sees"
        rows.append(("noise σ", number(math.sqrt(float(variance.detach()))), text))
    if learner.log_beta is not None:
        text = "weight of the prior against one example"
        rows.append(("β", number(math.exp(float(learner.log_beta.detach()))), text))
    for name, rate in learner.log_lr.items():
        rows.append(
            (f"step size of {name}", number(math.exp(float(rate.detach()))), "of adaptation, α")
        )
    return rows


def _layers(
    learner: MetaLearner, start: nn.Module | None
) -> list[tuple[tuple[str, ...], tuple[float, float, float] | None]]:
    """A row for every weight tensor, and the lowest, middle and highest ρ of those adapted."""
    begun = {} if start is None else dict(start.named_parameters())
    with torch.no_grad():
        prior = learner.meta_parameters().prior
        names = list(learner.belief.prior_parameters({}, 0.0)) if len(prior) > 1 else []
        means = learner.layout.split(prior[0])
        widths = (
            learner.layout.split(prior[1 + names.index("log_var")]) if "log_var" in names else {}
        )
        found: list[tuple[tuple[str, ...], tuple[float, float, float] | None]] = []
        for name, weight in learner.weights().items():
            role = next(r for r in ("adapted", "shared", "frozen")
                        if name in getattr(learner.roles, r))  # fmt: skip
            value = means.get(name, weight).double().flatten()
            moved = "–"
            if name in begun and not (role == "adapted" and name in learner.layout.rows):
                before = begun[name].to(value).flatten()
                size = float(before.norm())
                moved = percent(float((value - before).norm()) / size) if size else "from 0"
            rho = widths.get(name)
            span, ranges = "–", None
            if rho is not None:
                ends = tuple(float(q) for q in (rho.min(), rho.median(), rho.max()))
                ranges = (ends[0], ends[1], ends[2])
                low, middle, high = (number(math.exp(end / 2)) for end in ends)
                span = middle if low == high else f"{middle} ({low} to {high})"
            shape = " × ".join(map(str, weight.shape)) or "1"
            rms = number(float(value.square().mean().sqrt()))
            found.append(((name, role, shape, rms, moved, span), ranges))
    return found
