"""Does an accelerator give the CPU's meta-gradients, without waiting for the host?

    python benchmarks/device_check.py [--device cuda]

CI has no accelerator, so this is run by hand and its output kept in benchmarks/results/.
"""

from __future__ import annotations

import argparse
import platform
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
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
# every option is fixed here, so that the check does not change with recommended settings
ALL: dict[str, Any] = {"adapt": "all", "solver": "descent", "steps": 3, "lr": 0.01}
GAUSSIAN = {"samples": 5, "noise": "independent", "beta": 1.0, "init_log_var": -6.0}
IBAML = {**ALL, **GAUSSIAN, "curvature": "ggn", "damping": 0.0, "block": "all"}
METHODS: dict[str, dict[str, Any]] = {
    "maml": ALL,
    "fomaml": ALL,
    "reptile": ALL,
    "imaml": {**ALL, "lam": 1.0, "curvature": "energy", "damping": 0.0},
    "abml": {**ALL, **GAUSSIAN},
    "ibaml": IBAML,
    "ibaml energy": {**IBAML, "curvature": "energy"},
    "ibaml lemma": {**IBAML, "curvature": "lemma"},
    "ibaml head": {**IBAML, "adapt": "head"},
    "ibaml full": {"adapt": "head", "posterior": "full"},
}


def batch(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> ibaml.TaskBatch:
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(3, 12, *shape, generator=rng, dtype=dtype)
    y = torch.arange(3).repeat(4).expand(3, 12)
    return ibaml.TaskBatch(x[:, :6], y[:, :6], x[:, 6:], y[:, 6:])


def gradient(method: str, model: str, device: str, dtype: torch.dtype) -> torch.Tensor:
    make, shape = MODELS[model]
    torch.manual_seed(0)
    learner = getattr(ibaml.methods, method.split()[0])(
        make().to(device=device, dtype=dtype), **METHODS[method]
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
    augment = ibaml.tasks.Augment(crop=2, color=0.3)
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
    arms = {
        f"{kind}, adapt={adapt}": {**IBAML, "steps": 5, "curvature": kind, "adapt": adapt}
        for kind in ("ggn", "energy", "lemma")
        for adapt in ("all", "head")
    }
    for name, options in {**arms, "full posterior": METHODS["ibaml full"]}.items():
        model = ibaml.nn.conv4(3, 8, 1, 28).cuda()
        learner = ibaml.methods.ibaml(model, **options)
        tasks = batch((1, 28, 28), torch.float32).to("cuda")
        for _ in range(3):  # the first call checks the kind of batch, the third records
            learner(tasks).backward()
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            learner(tasks).backward()
            print(f"no waiting: {name}")
        except RuntimeError as error:
            print(f"waits: {name}: {error}")
        finally:
            torch.cuda.set_sync_debug_mode("default")


def check_captured() -> None:
    """Replayed meta-steps give the gradients of ordinary ones, for batches and seeds of their own,
    after the parameters moved."""
    for model in ("mlp", "conv4 (batch norm)", "transformer"):
        for method in METHODS:
            gradients = {}
            for capture in (None, False):
                make, shape = MODELS[model]
                torch.manual_seed(0)
                learner = getattr(ibaml.methods, method.split()[0])(
                    make().to("cuda", torch.float64), capture=capture, **METHODS[method]
                )
                gradients[capture] = []
                for call in range(5):
                    tasks = batch(shape, torch.float64, call).to("cuda")
                    learner.zero_grad()
                    (3 * learner(tasks, torch.Generator().manual_seed(call))).backward()
                    with torch.no_grad():
                        for p in learner.parameters():
                            p -= 0.01 * p.grad
                    moved = [p.detach().reshape(-1) for p in learner.parameters()]
                    gradients[capture].append(torch.cat([*moved, *_running(learner)]))
                if capture is None:
                    way = learner.strategy
            error = max(
                float((a - b).norm() / b.norm())
                for a, b in zip(gradients[None], gradients[False], strict=True)
            )
            look = "" if error < 1e-9 and "captured" in way else "   <-- look"
            print(f"replayed: {model:20} {method:14} {way:30} {error:.1e}{look}", flush=True)


def _running(learner: ibaml.MetaLearner) -> list[torch.Tensor]:
    return [b.reshape(-1).double() for n, b in learner.named_buffers() if "running" in n]


def check_memory() -> None:
    """The memory that is estimated before a run, against what its meta-steps then hold; and a run
    that runs out of memory goes on with fewer tasks at a time."""
    from ibaml.tasks import EpisodeTasks
    from ibaml.training import Trainer, resolve
    from ibaml.training.fitting import meta_step_bytes

    def trainer(**given: Any) -> Trainer:
        settings = resolve(
            {"data": "glyphs", "method": "ibaml", "tasks": 16, "val_every": 0, "device": "cuda",
             "solver": "descent", "adapt": "all", "curvature": "energy", **given}
        )  # fmt: skip
        learner = ibaml.methods.ibaml(ibaml.nn.conv4(5, 32, 1, 28).cuda(), **IBAML)
        data = ibaml.tasks.glyphs()
        tasks = EpisodeTasks(data, ways=5, shots=1, queries=15, device="cuda")
        return Trainer(settings, learner, tasks)

    one = trainer()
    estimate = meta_step_bytes(one.learner, one.tasks, one.settings, 16)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    for _ in range(6):
        one.advance()
    held = torch.cuda.memory_reserved() - before
    look = "" if held <= 1.25 * estimate else "   <-- look"
    print(f"memory of 16 tasks: estimated {estimate / 1e6:.0f} MB, held {held / 1e6:.0f}{look}")
    del one
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(
        (torch.cuda.memory_reserved() + estimate / 3) / total
    )
    try:
        one = trainer(iterations=3)
        for _ in range(3):
            one.advance()
        print(f"out of memory: goes on with {one.settings.micro_batch} of 16 tasks at a time")
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def check_kernels() -> None:
    """Our Triton kernels against plain operations, float32 (TF32 off) and bfloat16."""
    from ibaml.execution.block import Plain, norm_relu_pool
    from ibaml.execution.thin import plain_thin, thin

    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        for dtype in (torch.float32, torch.bfloat16):
            for shape in ((5, 64, 84, 84), (75, 24, 21, 21), (3, 40, 2, 3)):
                rng = torch.Generator("cuda").manual_seed(0)

                def draw(*size: int, rng: torch.Generator = rng) -> torch.Tensor:
                    return torch.randn(*size, generator=rng, device="cuda")

                x = (2 + 3 * draw(*shape)).to(dtype).requires_grad_()
                w, b = (draw(shape[1]).requires_grad_() for _ in range(2))
                cotangents = [draw(*size) for size in (shape, shape[1:2], shape[1:2])]
                ways = []
                for plain in (False, True):
                    with (
                        patch("ibaml.execution.block.passes_for", lambda _: Plain)
                        if plain
                        else (nullcontext())
                    ):
                        z = x.float() if plain else x
                        y = norm_relu_pool(z, w, b, 1e-5)[0]
                        g = torch.ones_like(y).requires_grad_()
                        first = torch.autograd.grad(y, (x, w, b), g, create_graph=True)
                        c = [p.to(f.dtype) for p, f in zip(cotangents, first, strict=True)]
                        second = torch.autograd.grad(first, (g, x, w), c)
                        ways.append([t.detach().double() for t in (y, *first, *second)])
                errors = [
                    float((a - e).norm() / (e.norm() + 1e-12)) for a, e in zip(*ways, strict=True)
                ]
                print(f"block {shape} {dtype}: " + " ".join(f"{e:.0e}" for e in errors))
            x, w = draw(6, 12, 30, 20).to(dtype), draw(80, 3, 3, 3).to(dtype).requires_grad_()
            ours, plain_ones = (way(x, w, (1, 1), 4) for way in (thin, plain_thin))
            g = torch.ones_like(ours)
            pairs = [(ours, plain_ones)]
            pairs.append(tuple(torch.autograd.grad(y, w, g)[0] for y in (ours, plain_ones)))
            errors = [
                float((a - e).detach().double().norm() / e.detach().double().norm())
                for a, e in pairs
            ]
            print(f"thin {dtype}: " + " ".join(f"{e:.0e}" for e in errors), flush=True)


@contextmanager
def drawn_on_the_host() -> Iterator[None]:
    """A CPU and an accelerator draw different noise: for a comparison both take the CPU's."""

    def drawn(*arguments: Any, device: torch.device | None = None, **options: Any) -> torch.Tensor:
        return draw_noise(*arguments, **options).to(device)

    with patch("ibaml.learner.meta_learner.draw_noise", drawn):
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
        check_kernels()
        check_no_waiting()
        check_captured()
        check_memory()


if __name__ == "__main__":
    main()
