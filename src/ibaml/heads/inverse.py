"""How is (K + Λ⁻¹)⁻¹ applied, where K is block diagonal over classes and Λ over examples?

K holds the examples' Gram matrices over β, one a class (T, C or 1, N, N); Λ_n is the Hessian of
example n's loss in its logits, C×C and singular (a common shift costs nothing), so that the inverse
is meant as P = Λ(I + KΛ)⁻¹, which always exists. At one point Λ_n = diag π − ππᵀ, and P
costs O(C·N³) (Rasmussen and Williams, 2006, section 3.5); for any other Λ it is dense, O((NC)³).

Both kinds give P·v and the quadratic forms k_cᵀ P_cd k_d from which queries' covariances come.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ibaml.heads.factor import cholesky, lower_factor, solve


@dataclass(frozen=True)
class SoftmaxInverse:
    """P for Λ_n = diag π_n − π_nπ_nᵀ.

    With E_c = (K_c + diag(1/π_c))⁻¹:  P_cd = δ_cd·E_c − E_c (Σ_j E_j)⁻¹ E_d.

    Args:
        each: E, (T, C, N, N).
        factor: the lower Cholesky factor of Σ_c E_c, (T, N, N).
        probabilities: π, (T, N, C).
    """

    each: Tensor
    factor: Tensor
    probabilities: Tensor

    @classmethod
    def at(cls, gram: Tensor, probabilities: Tensor) -> SoftmaxInverse:
        """From Gram matrices (T, C or 1, N, N) and probabilities π, (T, N, C)."""
        # √π has no derivative at 0, which is where exp underflows
        root = probabilities.clamp_min(torch.finfo(gram.dtype).tiny).sqrt().mT
        eye = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
        lower = cholesky(eye + root[..., :, None] * gram * root[..., None, :])
        half = torch.linalg.solve_triangular(lower, torch.diag_embed(root), upper=False)
        each = half.mT @ half
        return cls(each, cholesky(each.sum(1)), probabilities)

    def times(self, vectors: Tensor) -> Tensor:
        """P·v for v (T, N, C)."""
        first = torch.einsum("tcnm,tmc->tnc", self.each, vectors)
        shared = solve(self.factor, first.sum(-1, keepdim=True))
        return first - torch.einsum("tcnm,tm->tnc", self.each, shared[..., 0])

    def quadratic(self, cross: Tensor) -> Tensor:
        """k_cᵀ P_cd k_d for every query, (T, Q, C, C), from cross Grams (T, C or 1, N, Q)."""
        first = self.each @ cross
        own = (cross * first).sum(-2)
        mixed = torch.linalg.solve_triangular(self.factor[:, None], first, upper=False)
        return torch.diag_embed(own.mT) - torch.einsum("tcnq,tdnq->tqcd", mixed, mixed)

    def blocks(self) -> Tensor:
        """P_cc, (T, C, N, N)."""
        mixed = torch.linalg.solve_triangular(self.factor[:, None], self.each, upper=False)
        return self.each - mixed.mT @ mixed

    def root_times(self, vectors: Tensor) -> Tensor:
        """R·v for v (T, N, C), with R_nR_nᵀ = Λ_n: R = diag √π − π√πᵀ."""
        root = self.probabilities.sqrt()
        scaled = root * vectors
        return scaled - self.probabilities * scaled.sum(-1, keepdim=True)


@dataclass(frozen=True)
class DenseInverse:
    """P for any symmetric, positive semidefinite Λ_n (T, N, C, C), as one (T, N, C, N, C)."""

    matrix: Tensor
    curvature: Tensor

    @classmethod
    def at(cls, gram: Tensor, curvature: Tensor) -> DenseInverse:
        """From Gram matrices (T, C or 1, N, N) and Λ, (T, N, C, C)."""
        tasks, examples, classes = curvature.shape[:3]
        size = examples * classes
        same = torch.eye(examples, dtype=gram.dtype, device=gram.device)
        blocks = same[:, None, :, None] * curvature[:, :, :, None, :]
        solved, _ = torch.linalg.solve_ex(
            dense_system(gram, curvature), blocks.reshape(tasks, size, size)
        )
        solved = 0.5 * (solved + solved.mT)
        return cls(solved.reshape(tasks, examples, classes, examples, classes), curvature)

    def times(self, vectors: Tensor) -> Tensor:
        """P·v for v (T, N, C)."""
        return torch.einsum("tncmd,tmd->tnc", self.matrix, vectors)

    def quadratic(self, cross: Tensor) -> Tensor:
        """k_cᵀ P_cd k_d for every query, (T, Q, C, C), from cross Grams (T, C or 1, N, Q)."""
        cross = cross.expand(-1, self.matrix.shape[2], -1, -1)
        by_class = self.matrix.permute(0, 2, 4, 1, 3)  # (T, C, D, N, M)
        right = by_class @ cross[:, None]  # (T, C, D, N, Q)
        return (cross[:, :, None] * right).sum(-2).permute(0, 3, 1, 2)

    def blocks(self) -> Tensor:
        """P_cc, (T, C, N, N)."""
        return self.matrix.diagonal(dim1=2, dim2=4).movedim(-1, 1)

    def root_times(self, vectors: Tensor) -> Tensor:
        """R·v for v (T, N, C), with R_nR_nᵀ = Λ_n."""
        return (lower_factor(self.curvature) @ vectors[..., None])[..., 0]


def dense_system(gram: Tensor, curvature: Tensor) -> Tensor:
    """I + ΛK, (T, N·C, N·C), from Gram matrices (T, C or 1, N, N) and Λ, (T, N, C, C)."""
    tasks, examples, classes = curvature.shape[:3]
    size = examples * classes
    spread = gram.expand(-1, classes, -1, -1).permute(0, 2, 3, 1)  # (T, N, N′, C)
    product = curvature[:, :, :, None, :] * spread[:, :, None, :, :]
    eye = torch.eye(size, dtype=gram.dtype, device=gram.device)
    return eye + product.reshape(tasks, size, size)
