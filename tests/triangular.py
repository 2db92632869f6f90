"""A belief as a person might write one: a Gaussian with a full triangular factor, in one file."""

from __future__ import annotations

import torch
from torch import Tensor

from ibaml import Belief


class FullGaussian(Belief):
    """q(w; v) = N(m_t, L_t L_tᵀ), the diagonal of L_t as logarithms."""

    def blocks(self, n):
        return {"mean": n, "factor": n * (n + 1) // 2}

    def prior_parameters(self, means, init_log_var):
        like = torch.cat([m.reshape(-1) for m in means.values()])
        return {"factor": torch.diag(torch.full_like(like, init_log_var / 2))[_entries(len(like))]}

    def sample(self, v, noise):
        n = noise.shape[-1]
        return v[:, None, :n] + noise @ root_of(v[:, n:], n).mT

    def penalty(self, v, prior):
        m, n = prior[0], len(prior[0])
        root, root_t = root_of(prior[1], n), root_of(v[:, n:], n)
        off = torch.cat([root_t, (v[:, :n] - m)[:, :, None]], -1)
        solved = torch.linalg.solve_triangular(root, off, upper=False)
        log_det, log_det_t = (_log_det(r) for r in (root, root_t))
        return (solved.square().sum((-1, -2)) - n + log_det - log_det_t) / 2


def _entries(n: int) -> tuple[Tensor, Tensor]:
    rows, columns = torch.tril_indices(n, n)
    return rows, columns


def root_of(entries: Tensor, n: int) -> Tensor:
    """L (…, n, n) from its entries (…, n(n+1)/2)."""
    root = entries.new_zeros(*entries.shape[:-1], n, n)
    root[..., *_entries(n)] = entries
    return root.tril(-1) + torch.diag_embed(root.diagonal(dim1=-2, dim2=-1).exp())


def _log_det(root: Tensor) -> Tensor:
    return 2 * root.diagonal(dim1=-2, dim2=-1).log().sum(-1)
