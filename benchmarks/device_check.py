"""Does an accelerator give the CPU's meta-gradients, without waiting for the host?

    python benchmarks/device_check.py [--device cuda]

CI has no accelerator, so this is run by hand and its output kept in benchmarks/results/.
"""

from __future__ import annotations

import argparse
import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

import ibaml
from ibaml.energy.noise import draw_noise


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 6, batch_first=True)
        self.head = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(x)[0][:, -1])


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
        self.head = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(x).mean(1))


MODELS = {
    "mlp": (lambda: ibaml.nn.mlp(12, 3, activation="tanh"), (3, 4)),
    "conv4 (batch norm)": (lambda: ibaml.nn.conv4(3, 8, 1, 28), (1, 28, 28)),
    "conv4 (group norm)": (lambda: ibaml.nn.conv4(3, 8, 1, 28, "group"), (1, 28, 28)),
    "lstm": (Recurrent, (5, 4)),
    "transformer": (Attention, (5, 4)),
}
METHODS = {
    "maml": {},
    "fomaml": {},
    "reptile": {},
    "imaml": {},
    "abml": {},
    "ibaml": {},
    "ibaml energy": {"curvature": "energy"},
    "ibaml lemma": {"curvature": "lemma"},
    "ibaml head": {"adapt": "head"},
}


def batch(shape: tuple[int, ...], dtype: torch.dtype) -> ibaml.TaskBatch:
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(3, 12, *shape, generator=rng, dtype=dtype)
    y = torch.arange(3).repeat(4).expand(3, 12)
    return ibaml.TaskBatch(x[:, :6], y[:, :6], x[:, 6:], y[:, 6:])


def gradient(method: str, model: str, device: str, dtype: torch.dtype) -> torch.Tensor:
    make, shape = MODELS[model]
    torch.manual_seed(0)
    learner = getattr(ibaml.methods, method.split()[0])(
        make().to(device=device, dtype=dtype), steps=3, **METHODS[method]
    )
    tasks = batch(shape, dtype).to(device)
    learner(tasks, torch.Generator().manual_seed(1)).backward()
    return torch.cat([p.grad.reshape(-1) for p in learner.parameters()]).cpu()


def check_equal(device: str) -> None:
    print(f"{'model':20} {'method':14} relative difference from the CPU, float64")
    for model in MODELS:
        for method in METHODS:
            a, b = (gradient(method, model, d, torch.float64) for d in ("cpu", device))
            error = float((a - b).norm() / a.norm())
            print(f"{model:20} {method:14} {error:.1e}{'' if error < 1e-8 else '   <-- look'}")


def check_episodes(device: str) -> None:
    """Episodes gathered, converted, turned and augmented on the device are the CPU's."""
    import numpy as np

    images = np.random.default_rng(0).integers(0, 256, (200, 3, 20, 20), dtype=np.uint8)
    labels = np.repeat(np.arange(20), 10)
    data = ibaml.tasks.Dataset(
        "noise", images, labels, tuple(map(str, range(20))), {"train": tuple(range(20))}
    )
    augment = ibaml.tasks.Augment(crop=2, colour=0.3)
    options = {"shots": 2, "queries": 3, "rotations": True, "augment": augment}
    a, b = (
        ibaml.tasks.Episodes(data, "train", device=d, **options).batch(range(6)).to("cpu")
        for d in ("cpu", device)
    )
    halves = ((a.support_x, b.support_x), (a.query_x, b.query_x))
    worst = max(float((x - y).abs().max()) for x, y in halves)
    print(f"episodes on {device}: largest difference from the CPU's {worst:.1e}, float32")


def check_no_waiting() -> None:
    """The implicit meta-step never waits for the device (a validated batch is known already)."""
    for kind in ("ggn", "energy", "lemma"):
        for adapt in ("all", "head"):
            model = ibaml.nn.conv4(3, 8, 1, 28).cuda()
            learner = ibaml.methods.ibaml(model, curvature=kind, adapt=adapt)
            tasks = batch((1, 28, 28), torch.float32).to("cuda")
            learner(tasks).backward()  # the first call checks the kind of batch
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error")
            try:
                learner(tasks).backward()
                print(f"no waiting: {kind}, adapt={adapt}")
            except RuntimeError as error:
                print(f"waits: {kind}, adapt={adapt}: {error}")
            finally:
                torch.cuda.set_sync_debug_mode("default")


def baseline() -> None:
    """Time of the loop on the paper's network, before anything was made fast."""
    for kind in ("ggn", "energy"):
        learner = ibaml.methods.ibaml(
            ibaml.nn.conv4(5).cuda(), steps=5, cg_steps=5, samples=5, curvature=kind
        )
        x = torch.randn(4, 80, 3, 84, 84)
        y = torch.arange(5).repeat(16).expand(4, 80)
        tasks = ibaml.TaskBatch(x[:, :5], y[:, :5], x[:, 5:], y[:, 5:]).to("cuda")
        for _ in range(2):
            learner(tasks).backward()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        began = time.perf_counter()
        for _ in range(3):
            learner(tasks).backward()
        torch.cuda.synchronize()
        each = (time.perf_counter() - began) / 12 * 1e3
        peak = torch.cuda.max_memory_allocated() / 2**30
        print(
            f"Conv4-32, 84×84, 5-way 1-shot, 15 queries, S = K = L = 5, T = 4, {kind}, loop: "
            f"{each:.0f} ms per task, peak {peak:.1f} GiB"
        )


@contextmanager
def drawn_on_the_host() -> Iterator[None]:
    """A CPU and an accelerator draw different noise: for a comparison both take the CPU's."""

    def drawn(*arguments: Any, device: torch.device | None = None, **options: Any) -> torch.Tensor:
        return draw_noise(*arguments, **options).to(device)

    with patch("ibaml.learner.draw_noise", drawn):
        yield


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    device = parser.parse_args().device
    name = torch.cuda.get_device_name() if device == "cuda" else platform.processor()
    print(f"ibaml {ibaml.__version__}, torch {torch.__version__}, {name}")
    with drawn_on_the_host():
        check_equal(device)
    check_episodes(device)
    if device == "cuda":
        check_no_waiting()
        baseline()


if __name__ == "__main__":
    main()
