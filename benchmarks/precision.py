"""How far are meta-gradients of every precision from those of float64 and of the float32 loop?

    python benchmarks/precision.py [--images FILE.npy] [--steps 300]

At a network that was meta-trained for some steps (and at an untrained one), on episodes of smooth
pictures or of real images: an array uint8 (classes, images, height, width, 3). Relative errors of
the whole meta-gradient of two tasks, S = K = L = 5, over some batches. The oracle is the loop.
"""

from __future__ import annotations

import argparse
import copy
import statistics
from typing import Any

import numpy as np
import torch
from meta_step import ARMS, make

import ibaml
from ibaml import TaskBatch


class Images:
    """Episodes of 5 classes, 1 example and 15 queries each, from an array of images by class."""

    def __init__(self, images: torch.Tensor) -> None:
        self.images = images

    def __call__(self, tasks: int, seed: int) -> TaskBatch:
        rng = torch.Generator().manual_seed(seed)
        classes, each = self.images.shape[:2]
        which = torch.stack([torch.randperm(classes, generator=rng)[:5] for _ in range(tasks)])
        some = torch.rand(tasks, 5, each, generator=rng).argsort(-1)[..., :16]
        device = self.images.device
        pictures = self.images[which[..., None].to(device), some.to(device)]  # (T, 5, 16, H, W, 3)
        pictures = pictures.movedim(-1, 3).float().div(127.5).sub(1)
        labels = torch.arange(5, device=device)
        return TaskBatch(
            pictures[:, :, 0],
            labels.expand(tasks, -1),
            pictures[:, :, 1:].flatten(1, 2),
            labels.repeat_interleave(15).expand(tasks, -1),
            range(tasks),
            validate=False,
            classes=5,
        )


def smooth_pictures() -> torch.Tensor:
    """64 classes of 24 images: smooth pictures of their own, seen through noise."""
    rng = torch.Generator().manual_seed(0)
    coarse = torch.randn(64, 3, 7, 7, generator=rng)
    classes = torch.nn.functional.interpolate(coarse, size=84, mode="bilinear").movedim(1, -1)
    seen = classes[:, None] + 0.5 * torch.randn(64, 24, 84, 84, 3, generator=rng)
    return (127.5 + 40 * seen).clamp(0, 255).to(torch.uint8)


def trained(arm: str, device: str, episodes: Images, steps: int) -> ibaml.MetaLearner:
    """A learner after some meta-steps of 16 tasks."""
    learner = make(arm, device)
    optimizer = torch.optim.Adam(learner.parameters(), 1e-3)
    for step in range(steps):
        loss = learner(episodes(16, step), torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if steps:
        print(f"    {steps} meta-steps of 16 tasks, loss {float(loss.detach()):.3f}", flush=True)
    return learner


def gradient(
    arm: str, state: dict[str, Any], batch: TaskBatch, dtype: torch.dtype, tf32: bool, **extra: Any
) -> torch.Tensor:
    device = str(batch.support_x.device)
    learner = make(arm, device, capture=False, **extra)
    learner.load_state_dict(state)
    learner.to(dtype)
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=tf32):
        learner(batch.to(dtype), torch.Generator().manual_seed(0)).backward()
    parts = [p.grad.reshape(-1) for p in learner.parameters() if p.grad is not None]
    return torch.cat(parts).double()


def errors(arm: str, learner: ibaml.MetaLearner, batches: list[TaskBatch], exact: bool) -> None:
    state = copy.deepcopy(learner.state_dict())
    single, double = torch.float32, torch.float64
    ways: dict[str, tuple[torch.dtype, bool, dict[str, Any]]] = {
        "loop float32": (single, False, {"execution": "loop"}),
        "loop TF32": (single, True, {"execution": "loop"}),
        "float64": (double, False, {}),
        "float32": (single, False, {}),
        "TF32": (single, True, {}),
        "bfloat16": (single, True, {"precision": "bfloat16"}),
    }
    oracles = {"float64": double, "float32": single} if exact else {"float32": single}
    error_lists: dict[tuple[str, str], list[float]] = {}
    for batch in batches:
        loops = {
            name: gradient(arm, state, batch, dtype, False, execution="loop")
            for name, dtype in oracles.items()
        }
        for way, (dtype, tf32, extra) in ways.items():
            if not exact and way == "float64":
                continue
            g = gradient(arm, state, batch, dtype, tf32, **extra)
            for name, loop in loops.items():
                far = float((g - loop).norm() / loop.norm())
                error_lists.setdefault((way, name), []).append(far)
    print(f"    {'median (largest)':<18}" + "".join(f"{f'to {n} loop':>24}" for n in oracles))
    for way in ways:
        cells = [error_lists[way, n] for n in oracles if (way, n) in error_lists]
        shown = (f"{statistics.median(c):.1e} ({max(c):.1e})" for c in cells)
        if cells:
            print(f"    {way:<18}" + "".join(f"{text:>24}" for text in shown), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", help="uint8 (classes, images, height, width, 3), .npy")
    parser.add_argument("--steps", type=int, nargs="+", default=[0, 300])
    parser.add_argument("--only", default="ibaml")
    parser.add_argument("--batches", type=int, default=5)
    parser.add_argument("--no-float64", action="store_true", help="compare with float32 alone")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    images = torch.from_numpy(np.load(options.images)) if options.images else smooth_pictures()
    episodes = Images(images.to(options.device))
    for arm in ARMS:
        if options.only not in arm:
            continue
        for steps in options.steps:
            print(f"{arm}, {'trained' if steps else 'untrained'}", flush=True)
            learner = trained(arm, options.device, episodes, steps)
            batches = [episodes(2, 10**6 + i) for i in range(options.batches)]
            errors(arm, learner, batches, not options.no_float64)


if __name__ == "__main__":
    main()
