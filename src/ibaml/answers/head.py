"""What does a support set answer to a query, and how familiar does the query look?"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize

from ibaml.answers.prior import Prior
from ibaml.answers.promises import Promises
from ibaml.heads.class_means import class_directions
from ibaml.heads.plda import class_means, plda_logits

_WARM, _LIKE = 20.0, 50.0  # as many left-out answers weigh as much as what was known before
_CHANCE = 1.25  # times what chance explains is left in what class means have in common
_ENOUGH = 20  # left-out examples say how familiar a query looks, where nothing was measured
_STEPS = torch.linspace(-1.5, 1.5, 31)  # of the logarithm of the temperature


@dataclass(frozen=True)
class Head:
    """A prior and a support set of mapped vectors z (n, K) with labels (n,), 0 … classes − 1.

    ``promises`` stand in where the prior has none.
    """

    prior: Prior
    z: Tensor
    y: Tensor
    classes: int
    promises: Promises | None = None

    @classmethod
    def of(
        cls, prior: Prior | None, x: Tensor, y: Tensor, classes: int,
        promises: Promises | None = None,
    ) -> Head:  # fmt: skip
        """From vectors (n, F). Without a prior the support set makes its own."""
        prior = Prior.of_support(x, y, classes) if prior is None else prior
        return cls(prior, prior.mapped(x), y, classes, prior.promises or promises)

    @cached_property
    def counts(self) -> Tensor:
        """Examples of every class, (C,)."""
        return self.y.bincount(minlength=self.classes)

    def scores(self, z: Tensor) -> Tensor:
        """Of queries (m, K) for every class, (m, C): t·cosines, or log densities."""
        if not self.prior.unit:
            parts = (self.z[None], self.y[None], z[None], self.classes, self.prior.between)
            return plda_logits(*parts)[0]
        return self.prior.temperature * z @ self._rows.mT

    @cached_property
    def _rows(self) -> Tensor:
        support = (self.z[None], self.y[None], self.classes)
        return class_directions(*support, self.prior.between).rows[0]

    def log_probabilities(self, z: Tensor) -> Tensor:
        """The answers, (m, C)."""
        return (self.warmth * self.scores(z)).log_softmax(-1)

    def familiar(self, z: Tensor) -> np.ndarray:
        """For every query, which share of the examples of known classes looks less familiar, (m,).
        NaN where nothing is known of that: many features, no prior, and few examples."""
        if not self.prior.unit:
            return self._densities(z)
        if self.promises is None:
            return self._among_examples(z)
        nearest = self._nearness(z).argmax(-1)
        total = self.likeness(z).double().numpy() - self.shift
        return self.promises.familiar(total, self.classes, self.counts[nearest].numpy())

    def _among_examples(self, z: Tensor) -> np.ndarray:
        """By how many of the examples the others find less familiar, if these are enough."""
        if len(self._several) < _ENOUGH:
            return np.full(len(z), np.nan)
        own = self.alike.sort().values
        below = torch.searchsorted(own, self.likeness(z))
        result: np.ndarray = ((1 + below) / (1 + len(own))).double().numpy()
        return result

    def likeness(self, z: Tensor) -> Tensor:
        """log Σ_c exp(t·cos_c) of queries to the class means as they are, (m,). Directions in which
        classes hardly differ tell classes shown from new ones, so that nothing is shrunk here, and
        what all examples have in common (`drift`) is taken away."""
        return self._nearness(z).logsumexp(-1)

    def _nearness(self, z: Tensor) -> Tensor:
        return self.prior.temperature * self._moved(z) @ self._plain.mT

    @cached_property
    def drift(self) -> Tensor | float:
        """What the class means have in common beyond chance (the light, the background)."""
        if self.promises is None:
            return 0.0
        common = self._means.mean(0)
        within = (1 - self.promises.apart) * float((1 / self.counts).mean())
        chance = _CHANCE * (self.promises.apart + within) / self.classes
        return (1 - chance / common.square().sum()).clamp_min(0) * common

    def _moved(self, z: Tensor) -> Tensor:
        return normalize(z - self.drift, dim=-1)

    @cached_property
    def _plain(self) -> Tensor:
        """Directions of the class means of the moved examples, (C, K)."""
        moved = self._moved(self.z)
        return normalize(class_means(moved[None], self.y[None], self.classes)[1][0], dim=-1)

    @cached_property
    def _means(self) -> Tensor:
        return class_means(self.z[None], self.y[None], self.classes)[1][0]

    def _densities(self, z: Tensor) -> np.ndarray:
        """Hotelling's test of the nearest class."""
        from scipy.special import chdtrc, fdtrc

        width, between = z.shape[1], self.prior.between
        gain = self.counts[:, None] * between / (self.counts[:, None] * between + 1)
        variance = 1 + between - gain * between
        apart = (z[:, None] - gain * self._means).square() / variance
        square = apart.sum(-1).amin(-1).double().numpy()
        free = self.prior.freedom
        if np.isinf(free):
            return np.asarray(chdtrc(width, square))
        rest = free - width + 1
        return np.asarray(fdtrc(width, rest, square * rest / (free * width)))

    # --- what the examples say of each other ---

    @cached_property
    def _several(self) -> Tensor:
        """Examples whose class has others, (n′,)."""
        return (self.counts[self.y] > 1).nonzero()[:, 0]

    def _left_out(self, z: Tensor, rows: Tensor, gain: Tensor | float) -> Tensor:
        """Scores of those examples (n′, C), vectors z (n, K), with rows for all classes, and the
        mean of the others, times a gain, for their own."""
        which = self._several
        y, own = self.y[which], z[which]
        counts = self.counts[y, None].to(z)
        means = class_means(z[None], self.y[None], self.classes)[1][0]
        rest = gain * (counts * means[y] - own) / (counts - 1)
        cosines = own @ rows.mT
        cosines[torch.arange(len(y)), y] = (normalize(rest, dim=-1) * own).sum(-1)
        return self.prior.temperature * cosines

    @cached_property
    def warmth(self) -> float:
        """The temperature's factor: 1, unless examples answer otherwise for each other."""
        if self.classes < 2 or not self.prior.unit or not len(self._several):
            return 1.0
        y = self.y[self._several]
        known = (self.counts[y, None] - 1) * self.prior.between
        scores = self._left_out(self.z, self._rows, known / (known + 1))
        steps = _STEPS.to(scores)
        tempered = (steps.exp()[:, None, None] * scores).log_softmax(-1)
        nll = -tempered[:, torch.arange(len(y)), y].sum(-1)
        return float(steps[(nll + _WARM * steps.square()).argmin()].exp())

    @cached_property
    def alike(self) -> Tensor:
        """The likeness of those examples to the others, (n′,)."""
        return self._left_out(self._moved(self.z), self._plain, 1.0).logsumexp(-1)

    @cached_property
    def shift(self) -> float:
        """How much more familiar the examples are to each other than was measured."""
        count = len(self._several)
        if self.promises is None or not self.prior.unit or not count:
            return 0.0
        shots = (self.counts[self.y[self._several]] - 1).tolist()
        usual = torch.tensor([self.promises.median(self.classes, k) for k in shots])
        return float((self.alike - usual).median() * count / (count + _LIKE))
