"""Which map, which prior and which temperature do the base classes give to a head on vectors?

In closed form: vectors are centered, whitened within classes (shrunk by s) and brought to length 1,
z = u/‖u‖; a class's mean is a priori N(0, D) with D low rank plus diagonal,

    D = exp(a)·I + exp(b)·B,        B the covariance of the base classes' whitened means,

which is a diagonal in the axes of B. The head is that of `ibaml.heads.class_means`, the answer
softmax(t·cosines). Four scalars are left: s, a, b and log t.

Whitening fits the classes it was computed from, so the scalars minimize the predictive nll of
episodes from classes that the map has not seen: classes are dealt into folds, each with the map of
the others, and only the scalars, which do not depend on the fold, are kept. The final map is from
all base classes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from math import exp, sqrt

import torch
from torch import Tensor

from ibaml.heads.from_data import ClassStatistics, class_folds, class_statistics

_SHRINKAGES = (0.02, 0.1, 0.3, 0.6, 0.85, 0.97, 1.0)
_FOLDS, _LEFT_OUT = 4, 6  # folds, and as many classes in each if there are enough for two folds
_EPISODES, _QUERIES = 10, 4  # of each size in each fold; queries of each class
_SIZES = ((5, 1), (5, 5), (10, 1), (10, 2), (10, 5), (10, 10), (20, 1))  # ways, shots of episodes
_HOLD = 1e-3  # pulls the scalars to their defaults, where episodes do not say


@dataclass(frozen=True)
class Scalars:
    """What does not depend on the classes: s, a, b and log t. The defaults are for base classes
    that are too few to learn them."""

    shrinkage: float = 0.85
    diagonal: float = -3.5
    between: float = -6.5
    log_temperature: float = 3.0

    def free(self) -> Tensor:
        """a, b and log t, which gradients find (s is searched)."""
        return torch.tensor(astuple(self)[1:], dtype=torch.float64)


@dataclass(frozen=True)
class FromBase:
    """What `fit` found.

    Attributes:
        center: subtracted from vectors, (F,).
        map: (F, K).
        between: variances of class means along the map's directions, (K,).
        scalars: see `Scalars`.
        nll: of episodes of classes that the map had not seen; None if the scalars are defaults.
    """

    center: Tensor
    map: Tensor
    between: Tensor
    scalars: Scalars
    nll: float | None

    @property
    def temperature(self) -> float:
        return exp(self.scalars.log_temperature)


def fit(
    x: Tensor,
    y: Tensor,
    widest: int = 2048,
    seed: int = 0,
    on_step: Callable[[int, int], None] = lambda done, total: None,
) -> FromBase:
    """The head's map, prior and answer from base classes: vectors x (n, F) and integer labels y.

    Deterministic: ``seed`` deals the classes into folds and draws the episodes. Of more than
    ``widest`` features, the widest directions are kept.

    >>> x, y = torch.randn(60, 8), torch.arange(60) % 12
    >>> fit(x, y).map.shape
    torch.Size([8, 8])
    """
    if x.dim() != 2 or y.shape != x.shape[:1] or len(y.unique()) < 2:
        raise ValueError(
            "x must be (n, F) with a label for every row, of two classes or more; got "
            f"{tuple(x.shape)} and {tuple(y.shape)}"
        )
    with torch.inference_mode(False), torch.enable_grad():
        smaller, origin, basis = reduced(x.detach(), widest)
        nll, scalars = _cross_fitted(smaller, y, seed, on_step)
        shape = Whitening.of(class_statistics(smaller, y))
        axes, found = shape.axes(scalars.shrinkage)
    between = exp(scalars.diagonal) + exp(scalars.between) * found
    size = basis.square().sum(0).mean()  # basis/size inverts the reduction
    return FromBase(origin + basis @ shape.center / size, basis @ axes, between, scalars, nll)


def reduced(x: Tensor, widest: int) -> tuple[Tensor, Tensor, Tensor]:
    """x in float64 as (x − origin)·basis, of size about 1, with origin (F,) and basis (F, K)."""
    x = x.double()
    origin = x.mean(0)
    x = x - origin
    largest = x.abs().amax()  # so that squares stay in range
    size = (
        largest * (x / largest).square().mean().sqrt() if largest > 0 else torch.ones_like(largest)
    )
    inputs = x.shape[1]
    if inputs <= widest:
        basis = torch.eye(inputs, dtype=x.dtype, device=x.device)
    else:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            basis = torch.svd_lowrank((x / size).float(), min(widest, *x.shape))[2].to(x)
    basis = basis / size
    return x @ basis, origin, basis


@dataclass(frozen=True)
class Whitening:
    """Within-class whitening at any shrinkage: u = (x − center)·vectors·weights(s)/√F.

    Attributes:
        vectors, values: of S, the covariance within classes.
        means: (B, F), less the center, times the vectors, over √(B − 1).
    """

    center: Tensor
    vectors: Tensor
    values: Tensor
    means: Tensor

    @classmethod
    def of(cls, statistics: ClassStatistics) -> Whitening:
        center = statistics.means.mean(0)
        apart = (statistics.means - center) / sqrt(len(statistics.means) - 1)
        free = statistics.counts.sum() - len(statistics.counts)
        pooled = statistics.scatter / free.clamp_min(1)
        size, between = pooled.diagonal().mean(), apart.square().sum(0).mean()
        if size <= 1e-12 * between or size == 0:
            # classes of one example, or of equal ones, say nothing about the spread within
            pooled = torch.eye(len(pooled)).to(pooled) * (between if between > 0 else 1.0)
        values, vectors = torch.linalg.eigh(pooled)
        return cls(center, vectors, values.clamp_min(0), apart @ vectors)

    def weights(self, shrinkage: float) -> Tensor:
        """One over the standard deviations of (1 − s)·S + s·(tr S/F)·I, over √F."""
        variances = (1 - shrinkage) * self.values + shrinkage * self.values.mean()
        return (len(variances) * variances).rsqrt()

    def axes(self, shrinkage: float) -> tuple[Tensor, Tensor]:
        """The map to the axes of B, the widest first, (F, F), and the variances along them."""
        weights = self.weights(shrinkage)
        factor = sqrt(len(weights)) * self.means * weights
        _, singular, axes = torch.linalg.svd(factor, full_matrices=True)
        variances = torch.zeros_like(self.center)
        variances[: len(singular)] = singular.square()
        return (self.vectors * weights) @ axes.mT, variances


@dataclass(frozen=True)
class Episodes:
    """Episodes of one size from classes that the map has not seen, their support examples first,
    class by class.

    Attributes:
        own: coordinates of z with the products of z, (T, M, R).
        common: coordinates of z in the axes of B, (T, M, A).
        variances: of B along them, (T, A).
        labels: (M,), the same for all episodes.
        ways: how many classes.
        support: how many of the M are support examples.
    """

    own: Tensor
    common: Tensor
    variances: Tensor
    labels: Tensor
    ways: int
    support: int

    def nll(self, free: Tensor) -> Tensor:
        """The mean predictive nll of the queries at a, b and log t."""
        diagonal, between, log_temperature = free.unbind()
        shots = self.support // self.ways
        known = shots * diagonal.exp()
        gain = known / (known + 1)
        known = known + shots * between.exp() * self.variances[:, None]
        more = known / (known + 1) - gain  # in the axes of B
        own, common = (
            part[:, : self.support].unflatten(1, (self.ways, shots)).mean(2)
            for part in (self.own, self.common)
        )
        asked, along = self.own[:, self.support :], self.common[:, self.support :]
        products = gain * asked @ own.mT + (along * more) @ common.mT
        squares = gain**2 * own.square().sum(-1) + (
            ((gain + more).square() - gain**2) * common.square()
        ).sum(-1)
        cosines = products / squares.clamp_min(1e-300).sqrt()[:, None]
        answers = (log_temperature.exp() * cosines).log_softmax(-1)
        labels = self.labels[self.support :].expand(len(answers), -1)
        return -answers.gather(-1, labels[..., None]).mean()


def episodes_nll(episodes: Sequence[Episodes], free: Tensor) -> Tensor:
    """The mean over sizes of episodes, each as important as the others."""
    return torch.stack([some.nll(free) for some in episodes]).mean()


@dataclass(frozen=True)
class _Fold:
    """Episodes of classes that a map has not seen.

    Attributes:
        map: from the other classes.
        examples: that take part, times the map's vectors, (n, F).
        episodes: for ways, shots and queries a class, which of them, (T, M).
    """

    map: Whitening
    examples: Tensor
    episodes: dict[tuple[int, int, int], Tensor]


def _draw(x: Tensor, y: Tensor, seed: int) -> list[_Fold]:
    """Folds with their episodes, as far as there are enough classes and examples."""
    classes = y.unique()
    count = min(_FOLDS, len(classes) // 2, max(2, len(classes) // _LEFT_OUT))
    everything, folds = class_statistics(x, y), []
    for number, (kept, left_out) in enumerate(class_folds(y, count, seed) if count > 1 else []):
        generator = torch.Generator().manual_seed(count * seed + number)
        here = torch.isin(y, left_out)
        rest = everything.without(class_statistics(x[here], y[here]), torch.isin(classes, kept))
        members = [(y == c).nonzero()[:, 0] for c in left_out.tolist()]
        drawn: dict[tuple[int, int, int], Tensor] = {}
        for most, shots in _SIZES:
            left = [len(m) - shots for m in members if len(m) > shots]
            if (ways := min(most, len(left))) > 1:
                size = (ways, shots, min(_QUERIES, *left))
                drawn[size] = _rows(members, *size, generator)
        if drawn:
            used, where = torch.cat([r.flatten() for r in drawn.values()]).unique(
                return_inverse=True
            )
            parts = where.split([r.numel() for r in drawn.values()])
            places = {k: p.view_as(drawn[k]) for k, p in zip(drawn, parts, strict=True)}
            map = Whitening.of(rest)
            folds.append(_Fold(map, (x[used] - map.center) @ map.vectors, places))
    return folds


def _rows(
    members: Sequence[Tensor], ways: int, shots: int, queries: int, generator: torch.Generator
) -> Tensor:
    """Rows of episodes, (T, ways·(shots + queries)), all support examples first."""
    enough = [m for m in members if len(m) >= shots + queries]
    episodes = []
    for _ in range(_EPISODES):
        some = torch.randperm(len(enough), generator=generator)[:ways].tolist()
        picked = [
            enough[c][torch.randperm(len(enough[c]), generator=generator)[: shots + queries]]
            for c in some
        ]
        shown, asked = zip(*(p.split([shots, queries]) for p in picked), strict=True)
        episodes.append(torch.cat([*shown, *asked]))
    return torch.stack(episodes)


def _episodes(folds: Sequence[_Fold], shrinkage: float) -> list[Episodes]:
    """Episodes with every fold's map at one shrinkage, those of equal size together."""
    parts: dict[tuple[int, int, int], list[tuple[Tensor, Tensor, Tensor]]] = {}
    for fold in folds:
        weights = fold.map.weights(shrinkage)
        z = torch.nn.functional.normalize(fold.examples * weights, dim=-1)
        factor = sqrt(len(weights)) * fold.map.means * weights
        _, singular, axes = torch.linalg.svd(factor, full_matrices=False)
        common = z @ axes.mT
        for size, where in fold.episodes.items():
            # coordinates in the examples' own span: the same products, in fewer numbers
            own = torch.linalg.qr(z[where].mT, mode="r").R.mT
            variances = singular.square().expand(len(where), -1)
            parts.setdefault(size, []).append((own, common[where], variances))
    return [_together(size, some) for size, some in parts.items()]


def _together(
    size: tuple[int, int, int], parts: Sequence[tuple[Tensor, Tensor, Tensor]]
) -> Episodes:
    ways, shots, queries = size
    names = torch.arange(ways, device=parts[0][0].device)
    labels = torch.cat([names.repeat_interleave(shots), names.repeat_interleave(queries)])
    widest = max(common.shape[-1] for _, common, _ in parts)
    pad = torch.nn.functional.pad
    return Episodes(
        torch.cat([own for own, _, _ in parts]),
        torch.cat([pad(common, (0, widest - common.shape[-1])) for _, common, _ in parts]),
        torch.cat([pad(along, (0, widest - along.shape[-1])) for _, _, along in parts]),
        labels,
        ways,
        ways * shots,
    )


def _cross_fitted(
    x: Tensor, y: Tensor, seed: int, on_step: Callable[[int, int], None]
) -> tuple[float | None, Scalars]:
    """The scalars of least nll on classes that the map has not seen, and that nll."""
    folds = _draw(x, y, seed)
    if not folds:
        return None, Scalars()
    best = float("inf"), Scalars()
    tried: set[int] = set()
    at = _SHRINKAGES.index(best[1].shrinkage)
    waiting = [at, at + 1, at - 1]
    while waiting:  # downhill, from the default
        here = waiting.pop(0)
        on_step(len(tried), len(_SHRINKAGES))
        tried.add(here)
        shrinkage = _SHRINKAGES[here]
        loss, free = minimize(_episodes(folds, shrinkage), best[1].free(), steps=20)
        if loss < best[0]:
            best = loss, Scalars(shrinkage, *free.tolist())
            waiting = [
                i for i in (*waiting, here - 1, here + 1)
                if i in range(len(_SHRINKAGES)) and i not in tried
            ]  # fmt: skip
    on_step(len(_SHRINKAGES), len(_SHRINKAGES))
    return best


def minimize(episodes: Sequence[Episodes], start: Tensor, steps: int) -> tuple[float, Tensor]:
    """The nll of the episodes and a, b, log t that minimize it, held to the defaults."""
    free = start.detach().clone().requires_grad_()
    usual = Scalars().free()
    optimizer = torch.optim.LBFGS([free], max_iter=steps, line_search_fn="strong_wolfe")
    best = (float("inf"), start)

    def loss() -> Tensor:
        nonlocal best
        optimizer.zero_grad()
        value = episodes_nll(episodes, free) + _HOLD * (free - usual).square().sum()
        value.backward()
        if float(value.detach()) < best[0]:
            best = float(value.detach()), free.detach().clone()
        return value

    optimizer.step(loss)
    return best
