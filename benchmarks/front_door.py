"""How long does `ibaml predict` take for 10 classes of 5 photographs and 100 odd queries?

    python benchmarks/front_door.py caltech101-84.zip splits.json

Classes of the validation split in nested folders, 80 queries of them in eight kinds of files and 20
of two other classes, two broken files, and an empty cache. The command is a process of its own.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image

from ibaml.tasks.tree import Tree


def rotated(picture: Image.Image, file: Path) -> None:
    exif = Image.Exif()
    exif[0x112] = 6
    picture.rotate(90, expand=True).save(file.with_suffix(".jpg"), exif=exif)


def see_through(picture: Image.Image, file: Path) -> None:
    picture = picture.copy()
    picture.putalpha(255)
    picture.save(file.with_suffix(".png"))


def deep_gray(picture: Image.Image, file: Path) -> None:
    pixels = np.asarray(picture.convert("L")).astype(np.uint16) * 257
    Image.fromarray(pixels).save(file.with_suffix(".png"))


KINDS: list[Callable[[Image.Image, Path], None]] = [
    rotated,
    see_through,
    lambda p, f: p.quantize(64).save(f.with_suffix(".gif")),
    lambda p, f: p.convert("CMYK").save(f.with_suffix(".jpeg")),
    lambda p, f: p.save(f.with_suffix(".webp")),
    lambda p, f: p.resize((3000, 4000)).save(f.with_suffix(".bmp")),
    deep_gray,
    lambda p, f: p.resize((42, 31)).save(f.with_suffix(".jpg")),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("pictures", type=Path)
    parser.add_argument("splits", type=Path)
    given = parser.parse_args()
    tree, rng = Tree.open(given.pictures), random.Random(1)
    members: dict[str, list[str]] = {}
    for name in tree.names:
        if name.endswith(".jpg"):
            members.setdefault(name.split("/")[-2], []).append(name)
    classes = json.loads(given.splits.read_text())["val"][:12]
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        new = root / "new" / "deep" / "er"
        new.mkdir(parents=True)
        for number, name in enumerate(classes[:10]):
            files = rng.sample(members[name], 13)
            place = root / "products" / f"shelf {number % 3}" / name
            place.mkdir(parents=True)
            for at, file in enumerate(files):
                if at < 5:
                    (place / f"{at}.jpg").write_bytes(tree.read(file))
                else:
                    picture = Image.open(io.BytesIO(tree.read(file))).convert("RGB")
                    kind = 4 if at == 10 and number else at - 5  # one large BMP is enough
                    KINDS[kind](picture, new / f"{name}={at}")
        for name in classes[10:]:
            for at, file in enumerate(rng.sample(members[name], 10)):
                (root / "new" / f"stranger={name}{at}.jpg").write_bytes(tree.read(file))
        (root / "new" / "broken.jpg").write_bytes(b"\xff\xd8 no picture")
        (root / "new" / "empty.png").write_bytes(b"")
        began = time.monotonic()
        subprocess.run(
            [sys.executable, "-m", "ibaml", "predict", root / "products", root / "new", "--out",
             root / "out", "--save", root / "shop.ibaml"],
            check=True, env={**os.environ, "IBAML_CACHE": str(root / "cache")},
        )  # fmt: skip
        seconds = time.monotonic() - began
        with (root / "out" / "predictions.csv").open(newline="") as table:
            rows = [row for row in csv.DictReader(table) if not row["note"]]
        saved = (root / "shop.ibaml").stat().st_size
    named = [(row, row["file"].rsplit("/", 1)[-1].split("=")[0]) for row in rows]
    known = [(row, name) for row, name in named if name != "stranger"]
    strangers = [row for row, name in named if name == "stranger"]
    right = sum(row["best"] == name for row, name in known)
    print(
        f"{seconds:.0f} s; {right} of {len(known)} right, "
        f"{sum(row['unknown'] == 'yes' for row, _ in known)} of them called unknown, and "
        f"{sum(row['unknown'] == 'yes' for row in strangers)} of {len(strangers)} strangers; the "
        f"saved classifier has {saved / 1e6:.1f} MB"
    )


if __name__ == "__main__":
    main()
