"""How fast are episodes drawn? Ours, against a torch DataLoader that decodes JPEGs item by item.

    python benchmarks/episodes.py [--folder CLASS_FOLDERS_OR_ZIP]

One core, both in one run, taking turns: 5-way 1-shot episodes with 15 queries of 84×84 color
images, float tensors ready for the network. Without a folder, JPEGs of noise-like pictures are made
for the purpose.
"""

from __future__ import annotations

import argparse
import io
import os
import statistics
import tempfile
import time
import zipfile
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset

from ibaml.tasks import Episodes, image_folder

WAYS, SHOTS, QUERIES = 5, 1, 15


class JpegItems(Dataset[tuple[torch.Tensor, int]]):
    """The usual first version: open, decode, convert, normalize, one image at a time."""

    def __init__(self, files: list[tuple[Path, int]]) -> None:
        self.files = files

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        path, label = self.files[i]
        with Image.open(path) as image:
            pixels = np.asarray(image.convert("RGB"), dtype=np.float32)
        x = torch.from_numpy(pixels).permute(2, 0, 1) / 255
        return (x - 0.5) / 0.3, label


class EpisodeRows:
    """A batch sampler with our own draws, so that both do the same work."""

    def __init__(self, episodes: Episodes, keys: range) -> None:
        self.rows = [episodes.draw(k)[0].reshape(-1).tolist() for k in keys]

    def __iter__(self):  # type: ignore[no-untyped-def]
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)


def make_jpegs(root: Path, classes: int = 20, count: int = 30) -> Path:
    rng = np.random.default_rng(0)
    for c in range(classes):
        (root / f"class{c:02d}").mkdir(parents=True)
        for i in range(count):
            small = rng.integers(0, 256, (12, 12, 3), dtype=np.uint8)
            image = Image.fromarray(small).resize((84, 84), Image.Resampling.BICUBIC)
            image.save(root / f"class{c:02d}" / f"{i}.jpg", quality=90)
    return root


def unpack(folder: Path, to: Path) -> Path:
    """The zip's images as files, checked by being decoded and written again."""
    with zipfile.ZipFile(folder) as archive:
        for name in archive.namelist():
            if name.lower().endswith(".jpg"):
                parts = Path(name).parts[-2:]
                target = to.joinpath(*parts)
                target.parent.mkdir(parents=True, exist_ok=True)
                data = archive.read(name)
                Image.open(io.BytesIO(data)).verify()
                target.write_bytes(data)
    return to


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        os.environ["IBAML_CACHE"] = f"{scratch}/cache"
        folder = options.folder or make_jpegs(Path(scratch) / "jpegs")
        if folder.suffix == ".zip":
            folder = unpack(folder, Path(scratch) / "unpacked")
        data = image_folder(folder, image_size=84)
        files = [(folder / f, int(c)) for f, c in zip(data.files, data.labels, strict=True)]
        episodes = Episodes(data, "all", WAYS, SHOTS, QUERIES)
        ours: dict[int, list[float]] = {1: [], 4: []}
        loader = []
        for turn in range(options.rounds):
            for tasks, rates in ours.items():
                began = time.perf_counter()
                for first in range(turn * 1000, turn * 1000 + 200, tasks):
                    episodes.batch(range(first, first + tasks))
                rates.append(200 / (time.perf_counter() - began))
            rows = EpisodeRows(episodes, range(turn * 1000, turn * 1000 + 20))
            items = DataLoader(JpegItems(files), batch_sampler=rows, num_workers=0)
            began = time.perf_counter()
            for x, _ in items:
                assert x.shape == (WAYS * (SHOTS + QUERIES), 3, 84, 84)
            loader.append(20 / (time.perf_counter() - began))
    base = statistics.median(loader)
    print(f"DataLoader, JPEGs decoded per item: {base:8.1f} episodes/s")
    for tasks, rates in ours.items():
        rate = statistics.median(rates)
        print(
            f"ibaml, {tasks} episodes a batch:      {rate:8.1f} episodes/s, {rate / base:.1f} times"
        )


if __name__ == "__main__":
    main()
