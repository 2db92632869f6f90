"""How do integers become seeds? Draws depend on numbers (seed, task, purpose), not on order."""

from __future__ import annotations

import torch

_MASK = (1 << 64) - 1


def mix(*numbers: int) -> int:
    """Hash integers to 63 bits (splitmix64), so that neighboring keys give unrelated streams."""
    state = 0x9E3779B97F4A7C15
    for number in numbers:
        state = (state + (number & _MASK) + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state >> 1


def draw_seed(generator: torch.Generator | None) -> int:
    """One seed from the generator (from torch's global one if None)."""
    device = generator.device if generator is not None else "cpu"
    return int(torch.randint(2**62, (), generator=generator, device=device))
