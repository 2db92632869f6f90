"""Your own module, your own loss, your own tasks: visitors of shops, counted.

    python examples/own_module.py

Every shop has its own level and its own best day. Counts are not Gaussian, so the loss is
Poisson's. A new shop is known for six days; how many come on the other days of a week?
"""

import torch
from torch import nn

import ibaml


class Week(nn.Module):
    """The log of the expected count, from the day (0 … 6) as a point on a circle."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh())
        self.head = nn.Linear(32, 1)  # what every task adapts

    def forward(self, day):
        angle = 2 * torch.pi * day / 7
        return self.head(self.body(torch.cat([angle.sin(), angle.cos()], -1)))


def poisson(outputs, counts):  # the nll of every example
    log_rate = outputs.squeeze(-1)
    return log_rate.exp() - counts * log_rate + torch.lgamma(counts + 1)


def shops(count, days=28, seed=0):
    """Tasks: six days of a shop are known, the others are asked for."""
    generator = torch.Generator().manual_seed(seed)
    level = 1.5 + torch.randn(count, 1, 1, generator=generator) / 2
    best = 7 * torch.rand(count, 1, 1, generator=generator)
    day = torch.randint(0, 7, (count, days, 1), generator=generator).float()
    rate = (level + torch.cos(2 * torch.pi * (day - best) / 7)).exp()
    counts = torch.poisson(rate, generator).squeeze(-1)
    return ibaml.TaskBatch(day[:, :6], counts[:, :6], day[:, 6:], counts[:, 6:])


torch.manual_seed(0)
learner = ibaml.methods.ibaml(Week(), likelihood=poisson, posterior="diagonal", beta=1.0)
optimizer = torch.optim.Adam(learner.parameters(), lr=0.01)
new = shops(50, seed=10_000)


def nll():
    """Of the other days of the new shops, averaged over the posterior."""
    return learner.adapt_all(new).nll(new.query_x, new.query_y).mean().item()


print(f"before: {nll():.2f} nats a day")
for step in range(150):
    optimizer.zero_grad()
    learner(shops(16, seed=step)).backward()
    optimizer.step()
known = new.support_y.mean(1, keepdim=True).clamp(min=0.5).log().expand_as(new.query_y)
flat = poisson(known.reshape(-1, 1), new.query_y.reshape(-1)).mean().item()
print(f"after:  {nll():.2f} nats a day; with the mean of the six days {flat:.2f}")
