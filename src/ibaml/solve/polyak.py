"""How long may a step of descent be, where the curvature is not known? At most Polyak's length.

    v ← v − s·α∇E,      s = min{1, (E − E₀) / ⟨∇E, α∇E⟩},      E₀ ≤ E everywhere

If E is convex and E₀ its minimum, every step of at most that length leads nearer to it, whatever
the curvature (Polyak, 1969). Value and gradient are known anyway, so the bound costs nothing. It
counts where α is too long for a network: each feature adds to the curvature of the layer that reads
it. Where E stays far above E₀ the bound says little, so a task whose E rose halves its α from there
on. Then one α serves networks of any size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ibaml.arguments import check_number
from ibaml.energy import Energy
from ibaml.solve.base import Progress, Rate
from ibaml.solve.gradient_descent import GradientDescent


@dataclass(frozen=True)
class PolyakDescent(GradientDescent):
    """Gradient descent whose steps are at most ``lr`` long, and never longer than Polyak's, task by
    task; when E rose, half as long from there on. `Implicit(stopping="auto")` adds up the steps
    that were taken.

    With momentum (0.7, say) it goes further in the same number of steps. A single step is then
    1 + μ times as long, which still leads nearer; of several, that is not certain.

    Args:
        lowest: E₀, a number that the energy never falls below; by default the likelihood's: 0 for
            labels, that of a perfect fit for Gaussian noise.

    >>> PolyakDescent(steps=15).lr
    0.03
    """

    lr: Rate = 0.03
    lowest: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.lowest is not None:
            check_number("lowest", self.lowest)

    def share(
        self, energy: Energy, value: Tensor, gradient: Tensor, rate: Tensor | float
    ) -> Tensor:
        lowest = energy.lowest if self.lowest is None else self.lowest
        if lowest is None:
            raise ValueError(
                "PolyakDescent needs a number that the energy never falls below, and this "
                "likelihood does not say one: give it, PolyakDescent(lowest=…), or use "
                "GradientDescent"
            )
        falls = (gradient * (rate * gradient)).sum(-1)
        steep = falls > 0
        share = (value - lowest).clamp(min=0) / torch.where(steep, falls, 1.0)
        return torch.where(steep, share, 1.0).clamp(max=1.0)

    def longest(self, value: Tensor, progress: Progress) -> Tensor:
        return torch.where(value > progress.energy, progress.longest / 2, progress.longest)
