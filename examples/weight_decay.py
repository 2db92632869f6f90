"""Hyper-parameters by `implicit_solve`: a weight decay for every layer, against grid search.

    python examples/weight_decay.py

Handwritten digits of scikit-learn, 150 for training and 300 for validation. The network has two
random hidden layers; the output reads the pixels and both layers, and each of the three has its own
weight decay. They are learned: the outputs' weights are trained to the end, and the gradient of the
validation loss goes through the solution. A grid tries 5 × 5 × 5 decays instead.
"""

import time

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits

import ibaml

torch.manual_seed(0)
x, y = load_digits(return_X_y=True)
x, y = torch.tensor(x) / 16, torch.tensor(y)
first = torch.tanh(2 * x @ torch.randn(64, 100, dtype=torch.float64) / 8)
second = torch.tanh(2 * first @ torch.randn(100, 100, dtype=torch.float64) / 10)
layers = [x - x.mean(0), first - first.mean(0), second - second.mean(0)]
train, val, test = torch.randperm(len(x)).split([150, 300, len(x) - 450])


def nll(w, rows):
    outputs = sum(layer[rows] @ part for layer, part in zip(layers, w, strict=True))
    return F.cross_entropy(outputs, y[rows])


def energy(w, log_decay):
    """What training minimizes: the loss, and the decay of each layer."""
    squares = torch.stack([part.square().sum() for part in w])
    return nll(w, train) + (log_decay.exp() * squares).sum() / 2


def report(name, log_decay, w, begun):
    outputs = sum(layer[test] @ part for layer, part in zip(layers, w, strict=True))
    right = (outputs.argmax(1) == y[test]).double().mean()
    decays = ", ".join(f"{d:.4f}" for d in log_decay.detach().exp())
    losses = f"val {nll(w, val):.4f}, test {nll(w, test):.4f}"
    seconds = time.time() - begun
    print(f"{name:8} {seconds:5.1f} s   decays {decays}   nll {losses}, right {right:.1%}")


start = [torch.zeros(layer.shape[1], 10, dtype=torch.float64) for layer in layers]
solver = ibaml.NewtonCG(steps=15, tol=1e-4, curvature=ibaml.Curvature("energy"))

begun, w = time.time(), start
log_decay = torch.full((3,), -3.0, dtype=torch.float64, requires_grad=True)
steps = 15
optimizer = torch.optim.Adam([log_decay], lr=1.0)
for step in range(steps):
    optimizer.param_groups[0]["lr"] = 1.0 * (1 - step / steps)
    solution = ibaml.implicit_solve(energy, w, log_decay, solver=solver)
    if step == 0:
        report("at first", log_decay, [part.detach() for part in solution], begun)
    optimizer.zero_grad()
    nll(solution, val).backward()
    optimizer.step()
    w = [part.detach() for part in solution]  # the next one begins here
w = ibaml.implicit_solve(energy, w, log_decay.detach(), solver=solver)
report("implicit", log_decay, w, begun)

begun, best = time.time(), None
axis = torch.linspace(-9, -1, 5, dtype=torch.float64)
for tried in torch.cartesian_prod(axis, axis, axis):
    w = ibaml.implicit_solve(energy, w, tried, solver=solver)
    if best is None or nll(w, val) < nll(best[1], val):
        best = tried, w
report("grid", *best, begun)
