"""Which pre-trained backbone is the better bargain, and how much of a picture should it see?

    python benchmarks/backbones.py caltech101-84.zip splits.json --out runs/backbones

Embeds at most 60 pictures of every training and validation class with each backbone and crop. Test
classes are not read: the 16 validation classes are the test here, and 16 training classes are kept
for what has to be chosen. Then `ibaml train` and `ibaml bench heads` on the vectors.
"""

from __future__ import annotations

import argparse
import io
import json
import subprocess
import sys
import time
import zipfile
from collections import defaultdict
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from rich.progress import track
from torch import Tensor

import ibaml
from ibaml.backbones import pretrained

_EACH = 60


def transform(name: str, crop: float):
    """What the backbone reads of a picture: its middle, ``crop`` of the shorter side."""
    known = pretrained(name)

    def transformed(picture: Image.Image) -> Tensor:
        width, height = picture.size
        seen = crop * min(width, height)
        box = ((width - seen) / 2, (height - seen) / 2, (width + seen) / 2, (height + seen) / 2)
        small = picture.resize((known.side, known.side), Image.Resampling.BICUBIC, box=box)
        pixels = torch.from_numpy(np.array(small).transpose(2, 0, 1)).float()
        return (pixels - known.mean) / known.deviation

    return transformed


def seconds(name: str, images: list) -> float:
    """Processor time of one picture, as `ibaml embed` takes it without its cache."""
    embed = ibaml.Embed(name, cache=False)
    embed(images[:4])
    began = time.process_time()
    embed(images)
    return (time.process_time() - began) / len(images)


def photograph(side: int = 4000) -> bytes:
    """A JPEG of 12 million pixels with some noise, as telephones make them."""
    rng = np.random.default_rng(0)
    coarse = Image.fromarray(rng.integers(0, 256, (30, 40, 3), dtype=np.uint8))
    smooth = np.asarray(coarse.resize((side, side * 3 // 4), Image.Resampling.BICUBIC), np.int16)
    noisy = smooth + rng.integers(-12, 13, smooth.shape, dtype=np.int16)
    content = io.BytesIO()
    Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(content, "JPEG", quality=90)
    return content.getvalue()


def pictures(archive: Path, classes: set[str]) -> tuple[list[Image.Image], list[str]]:
    found, labels = defaultdict(list), []
    with zipfile.ZipFile(archive) as content:
        for member in sorted(content.namelist()):
            label = Path(member).parent.name
            if label in classes and member.endswith(".jpg") and len(found[label]) < _EACH:
                found[label].append(Image.open(io.BytesIO(content.read(member))).convert("RGB"))
                labels.append(label)
    return [picture for label in found for picture in found[label]], labels


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pictures", type=Path)
    parser.add_argument("splits", type=Path)
    parser.add_argument("--out", type=Path, default=Path("runs/backbones"))
    given = parser.parse_args()
    torch.set_num_threads(1)
    given.out.mkdir(parents=True, exist_ok=True)
    theirs = json.loads(given.splits.read_text())
    held_out = theirs["train"][::4]
    splits = {"train": sorted(set(theirs["train"]) - set(held_out)), "val": held_out}
    splits["test"] = theirs["val"]
    split_file = given.out / "splits.json"
    split_file.write_text(json.dumps(splits))
    images, labels = pictures(given.pictures, {*theirs["train"], *theirs["val"]})
    print(f"{len(images)} pictures of {len(set(labels))} classes")
    large = given.out / "12 million pixels.jpg"
    large.write_bytes(photograph())
    for name in ("efficientnet_lite0", "efficientnet_lite2"):
        small, full = seconds(name, images[::14]), seconds(name, [large] * 20)
        print(f"{name}: {1000 * small:.1f} ms a picture of 84 × 84, {1000 * full:.1f} ms of 12 MP")
    for name in ("efficientnet_lite0", "efficientnet_lite2"):
        for crop in (0.875, 1.0):
            vectors = given.out / f"{name}_{crop}.npz"
            if not vectors.exists():
                net = pretrained(name).load().to(memory_format=torch.channels_last)
                embed = ibaml.Embed(net, transform(name, crop), batch_size=8)
                starts = range(0, len(images), 64)
                parts = [embed(images[i : i + 64]) for i in track(starts, vectors.stem)]
                np.savez(vectors, x=np.concatenate(parts), y=np.array(labels))
            run = given.out / vectors.stem
            common = [str(vectors), "--splits", str(split_file)]
            cli = [sys.executable, "-m", "ibaml"]
            if not run.exists():
                train = ["train", "--threads", "1", "--out", str(run), "--data", *common]
                subprocess.run([*cli, *train], check=True)
            heads = ["--heads", "centroid,lda", "--ways", "5", "--shots", "1,5", "--tasks", "1000"]
            saved = ["--run", str(run), "--out", str(run) + ".json"]
            subprocess.run([*cli, "bench", "heads", *common, *heads, *saved], check=True)


if __name__ == "__main__":
    main()
