"""What is believed about a linear head before a task, seen only through products of features?

The head is z_c = w_c·φ. A priori its rows w_c are independent,

    w_c ~ N(m_c, diag(exp ρ_c) + W Wᵀ),

with m and ρ tied over the classes or not, and a low-rank part W over features that all classes
share: that is what discriminant analysis knows and a diagonal cannot say. Solvers need only the
Gram matrices Φ D Φᵀ, so that nothing of size features × features is ever made.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class HeadPrior:
    """A Gaussian over the rows of a linear head.

    Args:
        mean: (F,) tied over classes, (C, F), or (T, C, F) with one for every task.
        log_var: ρ, the same shapes; a tied ρ has one Gram matrix instead of C.
        low_rank: W, (F, R), shared by all classes, or None.
    """

    mean: Tensor
    log_var: Tensor
    low_rank: Tensor | None = None

    def __post_init__(self) -> None:
        width = self.mean.shape[-1]
        for name, value in (("log_var", self.log_var), ("mean", self.mean)):
            if value.dim() not in (1, 2, 3) or value.shape[-1] != width:
                raise ValueError(
                    f"{name} must be (F,), (C, F) or (T, C, F) with F = {width} features, got "
                    f"{tuple(value.shape)}"
                )
        if self.low_rank is not None and (
            self.low_rank.dim() != 2 or self.low_rank.shape[0] != width
        ):
            raise ValueError(
                f"low_rank must be (F, R) with F = {width} features, got "
                f"{tuple(self.low_rank.shape)}"
            )

    def logits(self, features: Tensor, classes: int) -> Tensor:
        """Logits of the mean head, (T, N, C), for features (T, N, F)."""
        mean = self.mean if self.mean.dim() > 1 else self.mean.expand(classes, -1)
        if mean.shape[-2] != classes:
            raise ValueError(f"the prior's mean has {mean.shape[-2]} classes, the task {classes}")
        return features @ mean.mT

    def gram(self, left: Tensor, right: Tensor) -> Tensor:
        """Φ D Φ′ᵀ of every class, (T, C or 1, N, N′), for features (T, N, F) and (T, N′, F)."""
        scaled = left[:, None] * self._variance
        out = scaled @ right[:, None].mT
        if self.low_rank is not None:
            out = out + ((left @ self.low_rank) @ (right @ self.low_rank).mT)[:, None]
        return out

    def gram_diagonal(self, features: Tensor) -> Tensor:
        """Prior variances of the logits, (T, C or 1, N): the diagonal of `gram`."""
        root = features[:, None] * (0.5 * self._tidy(self.log_var)).exp()
        out = root.square().sum(-1)
        if self.low_rank is not None:
            out = out + (features @ self.low_rank).square().sum(-1)[:, None]
        return out

    def times(self, rows: Tensor) -> Tensor:
        """D·r of every class, (T, C, F), for rows (T, C, F)."""
        out = self._tidy(self.log_var).exp()[..., 0, :] * rows
        if self.low_rank is not None:
            out = out + (rows @ self.low_rank) @ self.low_rank.mT
        return out

    def reached(self, features: Tensor, classes: int) -> Tensor:
        """D φ_n of every class and example, (T, C, N, F), for features (T, N, F)."""
        out = features[:, None] * self._variance
        if self.low_rank is not None:
            out = out + ((features @ self.low_rank) @ self.low_rank.mT)[:, None]
        return out.expand(-1, classes, -1, -1)

    def weight_variances(self, classes: int) -> Tensor:
        """The variance of every weight, (T or 1, C, F)."""
        out = self._variance[..., 0, :]
        if self.low_rank is not None:
            out = out + self.low_rank.square().sum(-1)
        return out.expand(-1, classes, -1)

    @property
    def rank(self) -> int:
        """Columns of the low-rank part."""
        return 0 if self.low_rank is None else self.low_rank.shape[-1]

    def draw(self, own: Tensor, common: Tensor, classes: int) -> Tensor:
        """Heads around zero, (T, C, F), from normal numbers (T, C·F) and (T, C·rank)."""
        root = (0.5 * self._tidy(self.log_var)).exp()[..., 0, :]
        out = root * own.unflatten(-1, (classes, -1))
        if self.low_rank is not None:
            out = out + common.unflatten(-1, (classes, -1)) @ self.low_rank.mT
        return out

    @property
    def _variance(self) -> Tensor:
        return self._tidy(self.log_var).exp()

    @staticmethod
    def _tidy(value: Tensor) -> Tensor:
        """(T or 1, C or 1, 1, F)."""
        value = value if value.dim() > 1 else value[None]
        value = value if value.dim() > 2 else value[None]
        return value[..., None, :]
