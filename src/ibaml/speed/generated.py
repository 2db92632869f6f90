"""Which data are runs timed on, if a person gives none? They teach nothing and cost what real ones
cost."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np

from ibaml.extras import need

CLASSES, DIFFERENT = 64, 20  # classes, and different pictures of each
SIDE, FEATURES = 84, 1280


def photographs(folder: Path, count: int) -> Path:
    """A folder of small JPEGs of blurs, with a folder for each class, whose twenty pictures are
    repeated."""
    need("PIL")
    from PIL import Image

    rng = np.random.default_rng(0)
    for c in range(CLASSES):
        (folder / f"class{c:02d}").mkdir(parents=True)
        contents = []
        for _ in range(DIFFERENT):
            blur = rng.integers(0, 256, (3, 3, 3), dtype=np.uint8)
            file = io.BytesIO()
            image = Image.fromarray(blur).resize((SIDE, SIDE), Image.Resampling.BILINEAR)
            image.save(file, "JPEG", quality=30)
            contents.append(file.getvalue())
        for i in range(count // CLASSES + (c < count % CLASSES)):
            content = contents[i % DIFFERENT]
            (folder / f"class{c:02d}" / f"{i:05d}.jpg").write_bytes(content)
    return folder


def vectors(file: Path) -> Path:
    """An .npz of 1,280 numbers for each of 60 examples of 100 classes."""
    rng = np.random.default_rng(0)
    centers = rng.normal(size=(100, 40)) @ rng.normal(size=(40, FEATURES)) / 2
    x = np.repeat(centers, 60, 0) + 4 * rng.normal(size=(6000, FEATURES))
    np.savez(file, x=x.astype(np.float32), y=np.repeat(np.arange(100), 60).astype(str))
    return file
