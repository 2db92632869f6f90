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
_ENOUGH = 20  # left-out examples say how familiar a query looks, where nothing was measured
_STEPS = torch.linspace(-1.5, 1.5, 61)  # of the logarithm of the temperature


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
        which, others = self._others
        if len(which) < _ENOUGH:
            return np.full(len(z), np.nan)
        own = self._left_out(normalize(self._means, dim=-1), others).logsumexp(-1).sort().values
        below = torch.searchsorted(own, self.likeness(z))
        result: np.ndarray = ((1 + below) / (1 + len(own))).double().numpy()
        return result

    def likeness(self, z: Tensor) -> Tensor:
        """log Σ_c exp(t·cos_c) of queries to the class means as they are, (m,). Directions in which
        classes hardly differ tell classes shown from new ones, so that nothing is shrunk here."""
        return self._nearness(z).logsumexp(-1)

    def _nearness(self, z: Tensor) -> Tensor:
        return self.prior.temperature * z @ normalize(self._means, dim=-1).mT

    @cached_property
    def _means(self) -> Tensor:
        return class_means(self.z[None], self.y[None], self.classes)[1][0]

    def _densities(self, z: Tensor) -> np.ndarray:
        """Hotelling's test of the nearest class."""
        from scipy.special import chdtrc, fdtrc

        width, between = z.shape[1], self.prior.between
        counts, means = (p[0] for p in class_means(self.z[None], self.y[None], self.classes))
        gain = counts[:, None] * between / (counts[:, None] * between + 1)
        variance = 1 + between - gain * between
        apart = (z[:, None] - gain * means).square() / variance
        square = apart.sum(-1).amin(-1).double().numpy()
        free = self.prior.freedom
        if np.isinf(free):
            return np.asarray(chdtrc(width, square))
        rest = free - width + 1
        return np.asarray(fdtrc(width, rest, square * rest / (free * width)))

    # --- what the examples say of each other ---

    @cached_property
    def _others(self) -> tuple[Tensor, Tensor]:
        """Examples whose class has others, and the mean of those others, (n′,) and (n′, K)."""
        which = (self.counts[self.y] > 1).nonzero()[:, 0]
        counts = self.counts[self.y[which], None].to(self.z)
        return which, (counts * self._means[self.y[which]] - self.z[which]) / (counts - 1)

    def _left_out(self, rows: Tensor, own: Tensor) -> Tensor:
        """t·cosines of those examples to the rows of all classes, and to their own's others."""
        which, _ = self._others
        z, y = self.z[which], self.y[which]
        cosines = z @ rows.mT
        cosines[torch.arange(len(y)), y] = (normalize(own, dim=-1) * z).sum(-1)
        return self.prior.temperature * cosines

    @cached_property
    def warmth(self) -> float:
        """The temperature's factor: 1, unless examples answer otherwise for each other."""
        which, others = self._others
        if self.classes < 2 or not self.prior.unit or not len(which):
            return 1.0
        y = self.y[which]
        known = (self.counts[y, None] - 1) * self.prior.between
        scores = self._left_out(self._rows, known / (known + 1) * others)
        steps = _STEPS.to(scores)
        tempered = (steps.exp()[:, None, None] * scores).log_softmax(-1)
        nll = -tempered[:, torch.arange(len(y)), y].sum(-1)
        return float(steps[(nll + _WARM * steps.square()).argmin()].exp())

    @cached_property
    def shift(self) -> float:
        """How much more familiar the examples are to each other than was measured."""
        which, others = self._others
        if self.promises is None or not self.prior.unit or not len(which):
            return 0.0
        left_out = self._left_out(normalize(self._means, dim=-1), others).logsumexp(-1)
        shots = (self.counts[self.y[which]] - 1).tolist()
        usual = torch.tensor([self.promises.median(self.classes, k) for k in shots])
        apart = (left_out - usual).median()
        return float(apart * len(which) / (len(which) + _LIKE))
