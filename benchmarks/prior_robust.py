"""What do few directions cost the packaged prior, and what do other pictures?

    python benchmarks/prior_robust.py caltech101-84.zip splits.json embeddings.npz \\
        --backbone efficientnet_lite0

Validation classes of Caltech-101, 10-way, 200 tasks, paired. There are no full-size photographs of
named classes here: a prior from pictures of half the size stands in for the step from 84 pixels to
more, and pictures that are compressed, blurred, cropped, gray, turned or small for other cameras.
"""

from __future__ import annotations

import argparse
import io
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from packaged_prior import prior_of
from PIL import Image, ImageFilter
from torch import Tensor

import ibaml
from ibaml.answers.head import Head
from ibaml.answers.prior import Prior, packaged_for, rooted
from ibaml.answers.promises import Promises
from ibaml.backbones import DEFAULT
from ibaml.evaluation.intervals import mean_interval
from ibaml.heads.from_base import fit
from ibaml.tasks.tree import Tree

TASKS, WAYS, QUERIES = 200, 10, 15


def compressed(picture: Image.Image) -> Image.Image:
    content = io.BytesIO()
    picture.save(content, "JPEG", quality=20)
    return Image.open(content).convert("RGB")


OTHER: dict[str, Callable[[Image.Image], Image.Image]] = {
    "JPEG of quality 20": compressed,
    "blurred": lambda p: p.filter(ImageFilter.GaussianBlur(1)),
    "middle 60 pixels": lambda p: p.crop((12, 12, 72, 72)),
    "gray": lambda p: p.convert("L").convert("RGB"),
    "turned by 90°": lambda p: p.transpose(Image.Transpose.ROTATE_90),
    "42 pixels": lambda p: p.resize((42, 42)),
    "28 pixels": lambda p: p.resize((28, 28)),
}


Priors = dict[str, Prior | None]


def judge(
    name: str,
    priors: Priors,
    x: Tensor,
    y: np.ndarray,
    classes: list[str],
    without: Promises | None = None,
) -> None:
    """Accuracy and nll of every prior, and nll minus that of the first; how many known ones are
    called unknown at 5 % false alarms, where that is known."""
    for shots in (1, 5):
        rng, tasks = np.random.default_rng(shots), []
        members = [np.flatnonzero(y == c) for c in classes]
        for _ in range(TASKS):
            rows = [
                rng.permutation(members[c])[: shots + QUERIES]
                for c in rng.permutation(len(members))[:WAYS]
            ]
            tasks.append([np.concatenate([r[s] for r in rows]) for s in
                          (slice(shots), slice(shots, None))])  # fmt: skip
        shown = torch.arange(WAYS).repeat_interleave(shots)
        asked = torch.arange(WAYS).repeat_interleave(QUERIES)
        first = None
        for word, prior in priors.items():
            z = x if prior is None else prior.mapped(x)
            nll, right, alarms = [], [], []
            for support, query in tasks:
                own = None if prior is None else prior.done
                head = Head.of(own, z[support], shown, WAYS, without)
                asked_z = head.prior.mapped(z[query])
                log_p = head.log_probabilities(asked_z)
                nll.append(-float(log_p[torch.arange(len(asked)), asked].mean()))
                right.append(float((log_p.argmax(-1) == asked).float().mean()))
                if head.promises is not None:
                    alarms.append(float((head.familiar(asked_z) < 0.05).mean()))
            first = first or nll
            less = mean_interval(np.array(nll) - np.array(first))
            print(
                f"{name:20} {shots} shots  {word:24} accuracy {100 * np.mean(right):.1f} "
                f"nll {np.mean(nll):.4f} ({less.value:+.4f} ± {less.high - less.value:.4f}) "
                + (f"called unknown {100 * np.mean(alarms):.1f} %" if alarms else ""),
                flush=True,
            )


def characters(path: Path, embed: ibaml.Embed, photos: Prior) -> None:
    """Sixty characters of Omniglot: no photographs at all."""
    tree = Tree.open(path)
    of = {name: name.rsplit("/", 1)[0] for name in tree.names if name.endswith(".png")}
    folders = sorted(set(of.values()))
    kept = [folders[i] for i in np.random.default_rng(0).permutation(len(folders))[:60]]
    names = [name for name, folder in of.items() if folder in kept]
    pictures = [Image.open(io.BytesIO(b)).convert("RGB") for _, b in tree.read_all(names)]
    x = torch.from_numpy(embed(pictures))
    y = np.array([of[name] for name in names])
    judge("Omniglot", {"photos": photos, "none": None}, x, y, kept, photos.without)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("pictures", type=Path)
    parser.add_argument("splits", type=Path)
    parser.add_argument("embeddings", type=Path)
    parser.add_argument("--backbone", default=DEFAULT)
    parser.add_argument("--omniglot", type=Path, help="images_evaluation.zip: drawn characters")
    parser.add_argument("--most", type=int, default=60, help="pictures of each class to change")
    given = parser.parse_args()
    torch.set_num_threads(1)
    splits = json.loads(given.splits.read_text())
    with np.load(given.embeddings) as data:
        x, y = torch.from_numpy(data["x"]), data["y"]
    base = np.isin(y, splits["train"])
    labels = torch.from_numpy(np.unique(y[base], return_inverse=True)[1])
    found = fit(rooted(x[base]), labels)
    priors: Priors = {"all directions": Prior.of_base(found, "all", True)}
    for rank in (16, 32, 64, 128, 256):
        priors[f"{rank} directions"] = prior_of(x[base], labels, found.scalars, rank, {})
    judge("84 pixels", {**priors, "none": None}, x, y, splits["val"])
    tree, embed = Tree.open(given.pictures), ibaml.Embed(given.backbone)
    names = [n for n in tree.names if n.endswith(".jpg")]
    names = [n for n in names if n.split("/")[-2] in {*splits["val"], *splits["train"]}]
    seen: Counter[str] = Counter()
    for name in list(names):  # the first of each class
        seen[name.split("/")[-2]] += 1
        if seen[name.split("/")[-2]] > given.most:
            names.remove(name)
    of = np.array([n.split("/")[-2] for n in names])
    pictures = [Image.open(io.BytesIO(b)).convert("RGB") for _, b in tree.read_all(names)]
    small = torch.from_numpy(embed([p.resize((42, 42)) for p in pictures]))
    here = np.isin(of, splits["train"])
    theirs = torch.from_numpy(np.unique(of[here], return_inverse=True)[1])
    half = fit(rooted(small[here]), theirs)
    photos = packaged_for(embed.described())
    assert photos is not None
    compared: Priors = {
        "photos": photos,
        "from pictures of 42": prior_of(small[here], theirs, half.scalars, 128, {}),
        "none": None,
    }
    judge("84 pixels", compared, x, y, splits["val"])
    several = {"photos": photos, "none": None}
    rows = [i for i, c in enumerate(of) if c in splits["val"]]
    for name, change in OTHER.items():
        changed = torch.from_numpy(embed([change(pictures[i]) for i in rows]))
        judge(name, several, changed, of[rows], splits["val"], photos.without)
    if given.omniglot is not None:
        characters(given.omniglot, embed, photos)


if __name__ == "__main__":
    main()
