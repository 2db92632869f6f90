"""Does `ibaml predict --suggest` reach 90 % accuracy with fewer labels than chance choice?

    python benchmarks/suggestions.py embeddings.npz splits.json --split test

10 classes, 15 photographs of each to choose from and 15 of each to be judged on. One example of
some of the classes is given, then 5 photographs at a time are labelled: suggested or by chance. A
class that was not given becomes known by its first label. Intervals are over the paired tasks.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ibaml.answers.head import Head
from ibaml.answers.prior import Prior, packaged_for
from ibaml.answers.suggest import suggested
from ibaml.evaluation.intervals import mean_interval

WAYS, EACH, AT_ONCE, MOST = 10, 15, 5, 60


def labels_to_reach(
    prior: Prior, z: Tensor, rows: np.ndarray, given: int, suggest: bool, seed: int
) -> tuple[int, list[float]]:
    """Labels until 90 % of the judged are right, and the accuracy at every step."""
    rng = np.random.default_rng(seed)
    classes = np.repeat(np.arange(WAYS), EACH)
    pool, judged = rows[:, 1 : EACH + 1].ravel(), rows[:, EACH + 1 :].ravel()
    left, shown, labels = rng.permutation(len(pool)), list(rows[:given, 0]), list(range(given))
    accuracy: list[float] = []
    for _ in range(0, MOST + 1, AT_ONCE):
        known, index = np.unique(labels, return_inverse=True)
        head = Head.of(prior, z[shown], torch.from_numpy(index), len(known))
        best = known[head.scores(z[judged]).argmax(-1).numpy()]
        accuracy.append(float((best == classes).mean()))
        picked = suggested(head, z[pool[left]], AT_ONCE) if suggest else list(range(AT_ONCE))
        shown += list(pool[left[picked]])
        labels += list(classes[left[picked]])
        left = np.delete(left, picked)
    reached = [AT_ONCE * i for i, a in enumerate(accuracy) if a >= 0.9]
    return (reached[0] if reached else MOST + AT_ONCE), accuracy


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("embeddings", type=Path)
    parser.add_argument("splits", type=Path)
    parser.add_argument("--split", default="val")
    parser.add_argument("--tasks", type=int, default=100)
    given = parser.parse_args()
    torch.set_num_threads(1)
    with np.load(given.embeddings) as data:
        x, y = torch.from_numpy(data["x"]), data["y"]
        prior = packaged_for(json.loads(str(data["embed"]))["embed"])
    assert prior is not None
    z = prior.mapped(x)
    splits = json.loads(given.splits.read_text())
    need = 2 * EACH + 1
    members = [np.flatnonzero(y == c) for c in splits[given.split]]
    members = [rows for rows in members if len(rows) >= need]
    for known in (10, 5):
        rng, needed = np.random.default_rng(known), []
        curves: list[list[list[float]]] = []
        for seed in range(given.tasks):
            picked = rng.permutation(len(members))[:WAYS]
            rows = np.stack([rng.permutation(members[c])[:need] for c in picked])
            both = [labels_to_reach(prior.done, z, rows, known, how, seed) for how in (True, False)]
            needed.append([labels for labels, _ in both])
            curves.append([curve for _, curve in both])
        said, chance = np.array(needed, dtype=float).T
        less = mean_interval(chance - said)
        print(
            f"{given.split} classes, {known} of {WAYS} given: labels to 90 %, suggested "
            f"{said.mean():.1f}, by chance {chance.mean():.1f} (fewer by {less.value:.1f}, "
            f"{less.low:.1f} … {less.high:.1f})"
        )
        for how, curve in zip(("suggested", "by chance"), np.mean(curves, 0), strict=True):
            print(f"  {how}: " + " ".join(f"{100 * a:.1f}" for a in curve))


if __name__ == "__main__":
    main()
