"""What is a task's energy in double precision? It shows how much single precision rounds."""

from __future__ import annotations

from dataclasses import replace

from ibaml.energy.task import TaskEnergy


def in_double(energy: TaskEnergy) -> TaskEnergy | None:
    """The energy in double precision; None if it has none (complex weights)."""
    tensors = [*energy.theta, *energy.constants.values()]
    if any(t is not None and t.is_complex() for t in tensors):
        return None
    floating = {
        n: t for n, t in energy.constants.items() if t is not None and t.is_floating_point()
    }
    return replace(
        energy,
        x=energy.x.double() if energy.x.is_floating_point() else energy.x,
        y=energy.y.double() if energy.y.is_floating_point() else energy.y,
        noise=energy.noise.double(),
        points=None if energy.points is None else energy.points.double(),
        constants={**energy.constants, **{n: t.double() for n, t in floating.items()}},
        run=energy.run.with_precision(None),
    ).bind(tuple(t.double() for t in energy.theta))
