"""A plain loop: a learner is a module, and its call is a loss. Any optimizer, any schedule.

    python examples/plain_loop.py

Vectors of 100 classes; four of their numbers tell classes apart, sixteen tell nothing. The prior
learns which, so that one example of a new class is enough. (`ibaml train --data FILE.npz` does the
same, with logs, checkpoints and validation.)
"""

import numpy as np
import torch

import ibaml

rng = np.random.default_rng(0)
centers = 2 * rng.normal(size=(100, 1, 4))
x = np.concatenate(
    [centers + 0.4 * rng.normal(size=(100, 20, 4)), 2 * rng.normal(size=(100, 20, 16))], axis=-1
)
data = ibaml.tasks.feature_vectors(x.reshape(2000, 20), np.repeat(np.arange(100), 20))

torch.manual_seed(0)
network = ibaml.nn.mlp(20, 5, hidden=(32,))  # or any torch.nn.Module
learner = ibaml.methods.ibaml(network, data=data)  # or maml, imaml, abml, …
optimizer = torch.optim.AdamW(learner.parameters(), lr=0.01)


def tasks(split):
    return ibaml.tasks.Episodes(data, split, ways=5, shots=1, queries=10)


def accuracy():
    batch = tasks("test").batch(range(100))  # of classes that were not seen in training
    answers = learner.adapt_all(batch).predict_proba(batch.query_x).argmax(-1)
    return (answers == batch.query_y).double().mean().item()


print(f"before: {accuracy():.0%}")
for step, batch in enumerate(tasks("train").stream(tasks=8, steps=100), start=1):
    optimizer.zero_grad()
    loss = learner(batch)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(learner.parameters(), 10.0)
    optimizer.step()
    if step % 50 == 0:
        unsolved = int(learner.diagnostics.diverged.sum())  # what happened, task by task
        print(f"step {step}: loss {loss.item():.3f}, {unsolved} tasks diverged")
print(f"after:  {accuracy():.0%}")

learner.save("clusters.ibaml")
again = ibaml.load("clusters.ibaml")
new = tasks("test").batch([0])
posterior = again.adapt(new.support_x[0], new.support_y[0])
print(f"a new task: {posterior.predict_proba(new.query_x[0][:1])[0].round(decimals=2).tolist()}")
