"""The priors that come with the package, rebuilt.

    ibaml embed caltech101-84.zip --splits splits.json --out embeddings.npz
    python benchmarks/packaged_prior.py embeddings.npz splits.json \\
        src/ibaml/answers/priors/photos.safetensors

`photos_lite0` is the same with `ibaml embed --backbone efficientnet_lite0`. From the training
classes of Caltech-101 alone; the file says where it comes from.
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ibaml.answers.calibrate import calibrate
from ibaml.answers.compact import compacted, expanded
from ibaml.answers.prior import Prior, rooted
from ibaml.heads.from_base import Scalars, fit

SOURCE = {
    "made from": "the 64 training classes of Caltech-101 at 84 pixels",
    "attribution": "Caltech 101 by Fei-Fei Li, Marco Andreetto, Marc'Aurelio Ranzato and Pietro "
    "Perona, California Institute of Technology (2022), https://doi.org/10.22002/D1.20086, "
    "licensed under CC BY 4.0 (https://creativecommons.org/licenses/by/4.0/); changed: only "
    "statistics of network features of the pictures are kept",
}


def prior_of(
    x: Tensor, y: Tensor, scalars: Scalars, rank: int, embed: dict[str, object], name: str = "own"
) -> Prior:
    parts = compacted(rooted(x), y, scalars, rank)
    center, map, between = expanded(parts, scalars)
    facts = {**SOURCE, "embed": embed, "scalars": asdict(scalars), "directions": rank}
    temperature = math.exp(scalars.log_temperature)
    return Prior(name, center, map, between, temperature, True, True, facts=facts, compact=parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("embeddings", type=Path)
    parser.add_argument("splits", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--rank", type=int, default=128)
    given = parser.parse_args()
    torch.set_num_threads(1)
    with np.load(given.embeddings) as data:
        x, y = data["x"].astype(np.float32), data["y"]
        embed = json.loads(str(data["embed"]))["embed"]
    base = np.isin(y, json.loads(given.splits.read_text())["train"])
    labels = torch.from_numpy(np.unique(y[base], return_inverse=True)[1])
    vectors = torch.from_numpy(x[base])
    found = fit(rooted(vectors), labels)
    print(found.scalars, "nll", found.nll)
    prior = prior_of(vectors, labels, found.scalars, given.rank, embed, given.out.stem)

    def again(some: Tensor, their: Tensor) -> Prior:
        return prior_of(some, their, found.scalars, given.rank, embed, given.out.stem)

    promises = calibrate(vectors, labels, again)
    without = calibrate(vectors, labels, None)
    given.out.parent.mkdir(parents=True, exist_ok=True)
    whole = replace(prior, promises=promises, without=without)
    print(whole.save(given.out), given.out.stat().st_size, "bytes")


if __name__ == "__main__":
    main()
