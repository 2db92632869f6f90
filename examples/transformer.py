"""A transformer as the task's network: words in which only the capital letter matters.

    python examples/transformer.py

Which letters are the five classes differs from task to task, and there are three examples of each.
That the capital matters is what all tasks share: the encoder learns it. The last layer is adapted
to each task.
"""

import torch
from torch import nn

import ibaml

LETTERS, LENGTH = 20, 8


class Reader(nn.Module):
    def __init__(self, ways, width=32):
        super().__init__()
        self.letters = nn.Embedding(LETTERS, width)
        self.cases = nn.Embedding(2, width)
        self.encoder = nn.TransformerEncoderLayer(
            width, nhead=4, dim_feedforward=64, dropout=0.0, batch_first=True
        )
        self.head = nn.Linear(width, ways)

    def forward(self, text):
        words = self.letters(text % LETTERS) + self.cases(text // LETTERS)
        return self.head(self.encoder(words).mean(1))


def tasks(count, ways=5, shots=3, queries=6, seed=0):
    generator = torch.Generator().manual_seed(seed)
    size = (count, ways, shots + queries)
    text = torch.randint(LETTERS, (*size, LENGTH), generator=generator)
    letters = torch.rand(count, LETTERS, generator=generator).argsort(1)[:, :ways, None]
    place = torch.randint(LENGTH, (*size, 1), generator=generator)
    text.scatter_(3, place, LETTERS + letters.expand(size)[..., None])  # one capital
    labels = torch.arange(ways)[None, :, None].expand(size)

    def part(rows):
        return text[:, :, rows].flatten(1, 2), labels[:, :, rows].flatten(1, 2)

    return ibaml.TaskBatch(*part(slice(shots)), *part(slice(shots, None)))


torch.manual_seed(0)
learner = ibaml.methods.ibaml(Reader(ways=5), adapt="head")
steps = 100
optimizer = torch.optim.Adam(learner.parameters(), lr=0.01)
new = tasks(50, seed=10_000)


def accuracy():
    answers = learner.adapt_all(new).predict_proba(new.query_x).argmax(-1)
    return (answers == new.query_y).double().mean().item()


print(f"before: {accuracy():.0%} (by chance 20%)")
for step in range(steps):
    optimizer.zero_grad()
    learner(tasks(8, seed=step)).backward()
    optimizer.step()
print(f"after {steps} steps: {accuracy():.0%}")
