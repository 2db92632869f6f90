"""Logits of few classes with the classes first in memory give what torch gives row by row."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ibaml.evaluation import temperature
from ibaml.evaluation.temperature import fit_log_temperature
from ibaml.heads import few
from ibaml.heads.points import gaussian_points, place, place_first


@pytest.mark.parametrize("classes", [2, 5, few.FEW - 1, few.FEW])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_values_and_both_derivatives_are_torchs(classes: int, dtype: torch.dtype) -> None:
    rng = torch.Generator().manual_seed(classes)
    logits = (3 * torch.randn(4100, classes, generator=rng, dtype=dtype)).requires_grad_()
    labels = torch.randint(classes, (4100,), generator=rng)
    weight = torch.randn(4100, generator=rng, dtype=dtype)
    direction = torch.randn(logits.shape, generator=rng, dtype=dtype)

    def thrice(nll: Tensor) -> list[Tensor]:
        (slope,) = torch.autograd.grad((nll * weight).sum(), logits, create_graph=True)
        (product,) = torch.autograd.grad((slope * direction).sum(), logits)
        return [nll.detach(), slope.detach(), product]

    assert logits.numel() >= few.SMALL
    ours = thrice(few.cross_entropy(logits, labels))
    for one, other in zip(
        ours, thrice(F.cross_entropy(logits, labels, reduction="none")), strict=True
    ):
        torch.testing.assert_close(one, other)
    rows = logits.detach().view(41, 100, classes)
    torch.testing.assert_close(few.softmax(rows), rows.softmax(-1))
    torch.testing.assert_close(few.log_softmax(rows), rows.log_softmax(-1))


def test_a_label_outside_is_refused_as_by_torch() -> None:
    with pytest.raises(IndexError):
        few.cross_entropy(torch.zeros(few.SMALL, 5), torch.full((few.SMALL,), 5))


@pytest.mark.parametrize("classes", [5, few.FEW])
@pytest.mark.parametrize("diagonal", [False, True])
def test_points_before_examples_are_the_same_points(classes: int, diagonal: bool) -> None:
    rng = torch.Generator().manual_seed(0)
    mean = torch.randn(3, 7, classes, generator=rng, dtype=torch.float64)
    root = torch.randn(3, 7, classes, classes, generator=rng, dtype=torch.float64)
    covariance = root @ root.mT + torch.eye(classes)
    if diagonal:
        covariance = covariance.diagonal(dim1=-2, dim2=-1)
    points = gaussian_points(64, classes, torch.float64)
    expected = place(mean, covariance, points).transpose(1, 2)
    torch.testing.assert_close(place_first(mean, covariance, points), expected)


def test_the_fitted_temperature_is_that_of_the_plain_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    """In pieces of any size, as from all predictions at once in torch's own layout."""
    rng = torch.Generator().manual_seed(1)
    z = 2 * torch.randn(7, 8, 30, 5, generator=rng)
    y = z.mean(1).argmax(-1)
    y = torch.where(torch.rand(y.shape, generator=rng) < 0.2, (y + 1) % 5, y)

    def plain(log_t: float) -> float:
        log_p = (z.double() * torch.tensor(log_t, dtype=torch.float64).exp()).log_softmax(-1)
        p = log_p.exp().mean(1)
        return -float(p.gather(-1, y[..., None]).log().sum())

    fits = []
    for size in (1, 3000, 10**9):
        monkeypatch.setattr(temperature, "_AT_ONCE", {"cpu": size})
        fits.append(fit_log_temperature([z[:4], z[4:]], [y[:4], y[4:]]))
    assert len(set(fits)) == 1
    around = [plain(fits[0] + step) for step in (-0.004, 0.0, 0.004)]
    assert around[1] == min(around)
