"""torchrun and nothing else: a process group of your own around a learner.

    torchrun --nproc-per-node 2 examples/with_torchrun.py

(`torchrun --nproc-per-node 2 -m ibaml train` needs no program at all.)
"""

import torch
import torch.distributed as dist

import ibaml
from ibaml.training import broadcast, sum_gradients

torch.set_num_threads(1)
dist.init_process_group("gloo")  # "nccl" on GPUs
me, all_of_us = dist.get_rank(), dist.get_world_size()

tasks = ibaml.tasks.Sinusoids()
learner = ibaml.methods.ibaml(ibaml.nn.mlp(1, 1, activation="tanh"))
broadcast(learner)  # the first process's weights
optimizer = torch.optim.Adam(learner.parameters(), lr=0.01)
for step in range(30):
    keys = range(16 * step, 16 * step + 16)[me::all_of_us]  # this process's tasks
    batch = tasks.batch(seed=0, keys=keys, support=5, query=10)
    with sum_gradients(learner):
        learner(batch, torch.Generator().manual_seed(step)).backward()
    optimizer.step()  # the same step everywhere

if me == 0:
    new = tasks.batch(seed=1, keys=range(50), support=5, query=50)
    nll = learner.adapt_all(new).nll(new.query_x, new.query_y).mean()
    print(f"{all_of_us} processes; new sinusoids: {nll:.2f} nats a point")
dist.barrier()  # nobody leaves before the others have ended
dist.destroy_process_group()
