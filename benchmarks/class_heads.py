"""Which head answers best on whitened embeddings, with one temperature for all ways and shots?

    python benchmarks/class_heads.py embeddings.npz --splits splits.json

The test classes are not read. Training and validation classes are dealt into five folds; each is
answered with the map of the other folds' classes. For every head one temperature is chosen for all
episodes together; in brackets what the best temperature for a row alone would give, and which.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ibaml.heads.class_means import class_directions
from ibaml.heads.dual import laplace
from ibaml.heads.from_base import Whitening, reduced
from ibaml.heads.from_data import class_folds, class_statistics
from ibaml.heads.prior import HeadPrior
from ibaml.tasks import EpisodeTasks, Inputs
from ibaml.tasks.catalog import open_data

SHRINKAGE, DIAGONAL, BETWEEN = 0.85, -3.6, -6.1  # as `ibaml train` finds them, within a little
EPISODES, QUERIES = 25, 8
TEMPERATURES = torch.linspace(-0.5, 5, 80).exp()
Head = Callable[[Tensor, Tensor, Tensor, int, Tensor], Tensor]


def centroids(support: Tensor, labels: Tensor, query: Tensor, ways: int, between: Tensor) -> Tensor:
    """Cosines to the plain means: LDA and centroids."""
    certain = torch.full_like(between, 1e12)
    return class_directions(support, labels, ways, certain).moments(query)[0]


def shrunk(support: Tensor, labels: Tensor, query: Tensor, ways: int, between: Tensor) -> Tensor:
    """`ibaml.ClassMeans`."""
    return class_directions(support, labels, ways, between).moments(query)[0]


def softmax(support: Tensor, labels: Tensor, query: Tensor, ways: int, between: Tensor) -> Tensor:
    """The mean of `ibaml.FullGaussian` with the same prior, up to its scale, where κ = 1/W."""
    scale = (between / between.mean() * 30).sqrt()
    prior = HeadPrior(torch.zeros_like(scale), torch.zeros_like(scale))
    shots = support.shape[1] / ways
    return laplace(prior, support * scale, labels, ways, shots).mean_logits(query * scale)


HEADS: dict[str, Head] = {"centroids": centroids, "softmax": softmax, "class means": shrunk}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path)
    parser.add_argument("--splits", type=Path, required=True)
    given = parser.parse_args()
    torch.set_num_threads(1)
    data = open_data(str(given.data), splits=given.splits)
    prepare = Inputs.of(EpisodeTasks(data, 5))
    assert prepare is not None
    rows = np.isin(data.labels, [*data.members("train"), *data.members("val")])
    y = torch.from_numpy(np.asarray(data.labels[rows])).long()
    x = reduced(prepare(data.examples[rows]).flatten(1), 2048)[0]
    everything, classes = class_statistics(x, y), y.unique()
    generator = torch.Generator().manual_seed(0)
    found: dict[str, dict[tuple[int, int], list[Tensor]]] = {name: {} for name in HEADS}
    for kept, left_out in class_folds(y, 5):
        here = torch.isin(y, left_out)
        moments = everything.without(class_statistics(x[here], y[here]), torch.isin(classes, kept))
        map = Whitening.of(moments)
        axes, spread = map.axes(SHRINKAGE)
        between = math.exp(DIAGONAL) + math.exp(BETWEEN) * spread
        z = torch.nn.functional.normalize((x - map.center) @ axes, dim=-1)
        members = [(y == c).nonzero()[:, 0] for c in left_out.tolist()]
        for ways in (5, 10):
            for shots in (1, 2, 5, 10):
                enough = [m for m in members if len(m) >= shots + QUERIES]
                shown, asked = [], []
                for _ in range(EPISODES):
                    chosen = torch.randperm(len(enough), generator=generator)[:ways].tolist()
                    drawn = torch.stack(
                        [
                            m[torch.randperm(len(m), generator=generator)[: shots + QUERIES]]
                            for m in (enough[c] for c in chosen)
                        ]
                    )
                    shown.append(drawn[:, :shots].flatten())
                    asked.append(drawn[:, shots:].flatten())
                labels = torch.arange(ways).repeat_interleave(shots).expand(EPISODES, -1)
                truth = torch.arange(ways).repeat_interleave(QUERIES).expand(EPISODES, -1)
                for name, head in HEADS.items():
                    logits = head(
                        z[torch.stack(shown)], labels, z[torch.stack(asked)], ways, between
                    )
                    nll = torch.stack(
                        [
                            -(t * logits).log_softmax(-1).gather(-1, truth[..., None]).mean()
                            for t in TEMPERATURES
                        ]
                    )
                    found[name].setdefault((ways, shots), []).append(nll)
    for name, rows_of in found.items():
        table = {size: torch.stack(parts).mean(0) for size, parts in rows_of.items()}
        total = torch.stack(list(table.values())).sum(0)
        best = int(total.argmin())
        print(f"{name}: one t = {TEMPERATURES[best]:.1f}, sum of the rows {total[best]:.3f}")
        for (ways, shots), nll in table.items():
            alone = f"({nll.min():.3f} at {TEMPERATURES[nll.argmin()]:.1f})"
            print(f"  {ways:2}-way {shots:2}-shot  {nll[best]:.3f}  {alone}")


if __name__ == "__main__":
    main()
