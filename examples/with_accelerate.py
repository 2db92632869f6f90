"""Hugging Face Accelerate: its processes, its devices; the learner is never wrapped.

    pip install accelerate
    torchrun --nproc-per-node 2 examples/with_accelerate.py      # on GPUs: accelerate launch …

Accelerate makes the process group. Every process takes its share of each step's tasks, and
`sum_gradients` gives all of them the gradient of all tasks. `prepare` is for a data loader of
yours: do not pass the learner to it.
"""

import torch
from accelerate import Accelerator

import ibaml
from ibaml.training import broadcast, sum_gradients

accelerator = Accelerator(cpu=True)
me, all_of_us = accelerator.process_index, accelerator.num_processes

tasks = ibaml.tasks.Sinusoids()
learner = ibaml.methods.ibaml(ibaml.nn.mlp(1, 1, activation="tanh")).to(accelerator.device)
broadcast(learner)  # the first process's weights
optimizer = torch.optim.Adam(learner.parameters(), lr=0.01)
for step in range(30):
    keys = range(16 * step, 16 * step + 16)[me::all_of_us]
    batch = tasks.batch(seed=0, keys=keys, support=5, query=10).to(accelerator.device)
    with sum_gradients(learner):  # in place of zero_grad and accelerator.backward
        loss = learner(batch, torch.Generator().manual_seed(step))
        loss.backward()
    optimizer.step()

same = accelerator.gather(torch.cat([p.detach().flatten() for p in learner.parameters()])[None])
if accelerator.is_main_process:
    new = tasks.batch(seed=1, keys=range(50), support=5, query=50)
    nll = learner.adapt_all(new).nll(new.query_x, new.query_y).mean()
    print(f"{all_of_us} processes, weights equal: {bool((same[0] == same[-1]).all())}")
    print(f"new sinusoids: {nll:.2f} nats a point")
accelerator.wait_for_everyone()  # nobody leaves before the others have ended
accelerator.end_training()
