"""Sinusoids with bands: learn what curves look like, then draw one from three points.

    python examples/sinusoids.py        # writes sinusoids.png

A task is one curve. Where it has no points, the band says how little is known.
"""

import sys
from pathlib import Path

import torch

import ibaml
from ibaml.report import Fit, draw_fits

torch.manual_seed(0)
sinusoids = ibaml.tasks.Sinusoids()
learner = ibaml.methods.ibaml(
    ibaml.nn.mlp(1, 1, hidden=(64, 64), activation="tanh"),
    likelihood=ibaml.Gaussian(0.1, learn=True),
)

steps = 500
optimizer = torch.optim.Adam(learner.parameters(), lr=0.01)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
for step in range(steps):
    keys = range(16 * step, 16 * step + 16)  # each number is a sinusoid
    batch = sinusoids.batch(seed=0, keys=keys, support=1 + step % 10, query=15)
    optimizer.zero_grad()
    learner(batch).backward()
    optimizer.step()
    schedule.step()

new = sinusoids.batch(seed=1, keys=[1], support=10, query=1)  # one that was not seen in training
amplitude, phase, _ = sinusoids.task(seed=1, key=1)
grid = torch.linspace(-5, 5, 200)[:, None]
panels = []
for count in (1, 3, 5, 10):
    x, y = new.support_x[0, :count], new.support_y[0, :count]
    mean, variance = learner.adapt(x, y).predict(grid)
    truth = amplitude * torch.sin(grid + phase)
    inside = ((mean - truth).abs() < 2 * variance.sqrt()).float().mean()
    print(f"{count:2} points: {inside:.0%} of the curve inside two standard deviations")
    panels.append(Fit(f"{count} given", grid, truth, mean, variance.sqrt(), x, y))
out = Path(sys.argv[1] if len(sys.argv) > 1 else "sinusoids.png")
print(draw_fits([("iBaML", panels)], out, "A sinusoid from a few points"))
