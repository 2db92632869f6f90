"""A table: curves of many people, and a new person known by three rows.

    python examples/table.py

The table has a column that names the task (who), one feature (age) and a target (height). The
prior learns what growing looks like; a new person's curve comes with its uncertainty.
"""

import csv

import numpy as np
import torch

import ibaml

rng = np.random.default_rng(0)
with open("heights.csv", "w", newline="") as file:  # yours has its own columns
    rows = csv.writer(file)
    rows.writerow(["who", "age", "height"])
    for who in range(120):
        adult, spurt = rng.normal(170, 8), rng.normal(12, 1)
        for age in range(2, 20):
            share = 0.5 + 0.3 * (age - 2) / 17 + 0.2 / (1 + np.exp(spurt - age))
            rows.writerow([f"person {who}", age, round(adult * share + rng.normal(0, 0.7), 1)])

table = ibaml.tasks.Table.read("heights.csv", task="who", features=["age"], target="height")
torch.manual_seed(0)
learner = ibaml.methods.ibaml(
    ibaml.nn.mlp(1, 1, hidden=(40, 40), activation="tanh", skip=True),
    likelihood=ibaml.Gaussian(0.2, learn=True),
)
steps = 150
optimizer = torch.optim.Adam(learner.parameters(), lr=0.01)
for step in range(steps):
    for batch in table.batches("train", range(16 * step, 16 * step + 16), support=3):
        optimizer.zero_grad()
        learner(batch).backward()
        optimizer.step()

new = table.batches("test", range(20), support=3)[0]  # people who were not in training
low, spread = table.center[-1], table.spread[-1]  # the table is standardized
posteriors = learner.adapt_all(new)
mean, variance = posteriors.predict(new.query_x)
off = (mean - new.query_y).abs() * spread
inside = ((mean - new.query_y).abs() < 1.96 * variance.sqrt()).double().mean()
print(f"a new person, 3 rows: off by {off.mean():.1f} cm; {inside:.0%} inside the 95 % interval")
name = table.drawn("test", [new.task_keys[0]], support=3)[0]
for i in (0, 5, 10):
    age = new.query_x[0, i, 0].item() * table.spread[0] + table.center[0]
    answer, error = mean[0, i].item() * spread + low, variance[0, i].sqrt().item() * spread
    truth = new.query_y[0, i].item() * spread + low
    print(f"{name} at {age:.0f}: {answer:.0f} ± {1.96 * error:.0f} cm, was {truth:.0f}")
