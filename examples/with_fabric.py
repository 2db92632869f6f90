"""Lightning Fabric: its processes, its devices; the learner is never wrapped.

    pip install lightning-fabric
    python examples/with_fabric.py        # two processes on this machine's processors

Fabric starts the processes and moves the data. Every process takes its share of each step's tasks,
and `sum_gradients` gives all of them the gradient of all tasks.
"""

import torch
from lightning_fabric import Fabric

import ibaml
from ibaml.training import broadcast, sum_gradients

fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
fabric.launch()

tasks = ibaml.tasks.Sinusoids()
learner = ibaml.methods.ibaml(ibaml.nn.mlp(1, 1, activation="tanh")).to(fabric.device)
broadcast(learner)  # the first process's weights
optimizer = torch.optim.Adam(learner.parameters(), lr=0.01)
for step in range(30):
    keys = range(16 * step, 16 * step + 16)[fabric.global_rank :: fabric.world_size]
    batch = tasks.batch(seed=0, keys=keys, support=5, query=10).to(fabric.device)
    with sum_gradients(learner):  # in place of zero_grad and fabric.backward
        loss = learner(batch, torch.Generator().manual_seed(step))
        loss.backward()
    optimizer.step()

# every process has the same weights; one of them evaluates and saves
same = fabric.all_gather(torch.cat([p.detach().flatten() for p in learner.parameters()]))
if fabric.is_global_zero:
    new = tasks.batch(seed=1, keys=range(50), support=5, query=50)
    nll = learner.adapt_all(new).nll(new.query_x, new.query_y).mean()
    print(f"{fabric.world_size} processes, weights equal: {bool((same[0] == same[1]).all())}")
    print(f"new sinusoids: {nll:.2f} nats a point")
fabric.barrier()  # nobody leaves before the others have ended
