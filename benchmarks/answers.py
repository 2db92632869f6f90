"""How good are the answers of `ibaml predict` on classes never shown, with and without the packaged
prior, and what are its promises worth?

    python benchmarks/answers.py embeddings.npz splits.json --split test

Each task is 10 classes; the other classes of the split are the unknown ones. Simple heads
beside it have their hyper-parameters and a temperature from the validation classes, for every
number of shots. Differences are paired over tasks; intervals are 95 %.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import torch
from scipy.stats import rankdata
from torch import Tensor
from torch.nn.functional import normalize

from ibaml.answers.head import Head
from ibaml.answers.prior import Prior, packaged_for
from ibaml.answers.promises import Promises
from ibaml.assessment.simple_heads import Arm, Tables, simple_heads
from ibaml.evaluation import ClassScores, Interval, paired
from ibaml.evaluation.intervals import mean_interval
from ibaml.evaluation.temperature import fit_log_temperature
from ibaml.tasks import TaskBatch

WAYS, QUERIES = 10, 15


class Split:
    """Tasks from the classes of one split: rows of support, queries and unknown queries."""

    def __init__(self, y: np.ndarray, classes: list[str], shots: int, tasks: int) -> None:
        self.shots, rng = shots, np.random.default_rng(shots)
        members = {c: np.flatnonzero(y == c) for c in classes}
        enough = [c for c in classes if len(members[c]) >= shots + QUERIES]
        self.tasks, self.names = [], []
        for _ in range(tasks):
            order = [enough[i] for i in rng.permutation(len(enough))]
            known = [rng.permutation(members[c])[: shots + QUERIES] for c in order[:WAYS]]
            new = [rng.permutation(members[c])[:QUERIES] for c in order[WAYS:]]
            self.tasks.append(
                (np.stack([r[:shots] for r in known]), np.stack([r[shots:] for r in known]),
                 np.concatenate(new))
            )  # fmt: skip
            self.names.append(order[:WAYS])
        self.asked = torch.arange(WAYS).repeat_interleave(QUERIES)
        self.shown = torch.arange(WAYS).repeat_interleave(shots)

    def batches(self, table: Tensor) -> Iterator[TaskBatch]:
        for key, (support, query, _) in enumerate(self.tasks):
            yield TaskBatch(
                table[support.reshape(1, -1)], self.shown[None], table[query.reshape(1, -1)],
                self.asked[None], [key], validate=False, classes=WAYS,
            )  # fmt: skip


def auroc(known: np.ndarray, new: np.ndarray) -> float:
    ranks = rankdata(np.concatenate([known, new]))[: len(known)]
    return float((ranks.sum() - len(known) * (len(known) + 1) / 2) / (len(known) * len(new)))


def simple(arm: Arm, test: Split, val: Split) -> tuple[str, Tensor]:
    """Its log probabilities on the test tasks, with what was best on the validation tasks."""
    best = None
    for values in arm.grid:
        table = arm.table(values)
        with torch.no_grad():
            scores = torch.cat([arm.answer(b, values).double() for b in val.batches(table)])
        if not bool(scores.isfinite().all()):
            continue
        log_p = scores.log_softmax(-1)
        log_t = 0.0
        for _ in range(4):
            step = fit_log_temperature(
                [np.exp(log_t) * log_p[:, None]], [val.asked.expand(len(log_p), -1)]
            )
            log_t += step
        nll = -(np.exp(log_t) * log_p).log_softmax(-1)[:, range(len(val.asked)), val.asked].mean()
        if best is None or nll < best[0]:
            best = (float(nll), values, log_t)
    assert best is not None
    _, values, log_t = best
    table = arm.table(values)
    with torch.no_grad():
        scores = torch.cat([arm.answer(b, values).double() for b in test.batches(table)])
    return f"{arm.name} {dict(values)} t {np.exp(log_t):.3g}", (
        np.exp(log_t) * scores.log_softmax(-1)
    ).log_softmax(-1)


def ours(
    prior: Prior | None, promises: Promises | None, x: Tensor, test: Split, lines: list[str]
) -> Tensor:
    """Log probabilities on the test tasks; what is familiar and what is sure goes to the lines."""
    name = "prior=none" if prior is None else f"prior={prior.name}"
    here = x if prior is None else prior.mapped(x)
    own = None if prior is None else prior.done
    found: dict[str, list[float]] = {"familiarity": [], "max softmax": [], "centroid": []}
    alarms: dict[str, list[float]] = {}
    caught, errors, coverage, answers, seconds = [], [], [], [], 0.0
    for (support, query, new), names in zip(test.tasks, test.names, strict=True):
        began = time.perf_counter()
        head = Head.of(own, here[support.ravel()], test.shown, WAYS, promises)
        z = head.prior.mapped(here[np.concatenate([query.ravel(), new])])
        log_p, familiar = head.log_probabilities(z), head.familiar(z)
        seconds += time.perf_counter() - began
        n = query.size
        best = log_p.max(-1)
        rows = np.concatenate([support.ravel(), query.ravel(), new])
        raw = normalize(x[rows] - x[support.ravel()].mean(0), dim=-1)
        middle = raw[: support.size].view(WAYS, test.shots, -1).mean(1)
        away = -torch.cdist(raw[support.size :], middle).amin(-1).numpy()
        total = head.likeness(z).numpy()
        for word, score in (
            ("familiarity", total),
            ("max softmax", best.values.numpy()),
            ("centroid", away),
        ):
            found[word].append(auroc(score[:n], score[n:]))
        for c, name_ in enumerate(names):
            alarms.setdefault(name_, []).append(
                float((familiar[c * QUERIES : (c + 1) * QUERIES] < 0.05).mean())
            )
        caught.append(float((familiar[n:] < 0.05).mean()))
        if head.promises is not None:
            sure = best.values[:n].exp().numpy() >= head.promises.sure(0.05, WAYS, test.shots)
            wrong = (best.indices[:n] != test.asked).numpy() & sure
            errors.append(wrong.sum() / max(sure.sum(), 1))
            coverage.append(sure.mean())
        answers.append(log_p[:n])
    of = {word: mean_interval(np.array(values)) for word, values in found.items()}
    more = [
        mean_interval(np.array(found["familiarity"]) - np.array(found[w])).low
        for w in ("max softmax", "centroid")
    ]
    per_class = mean_interval(np.array([np.mean(v) for v in alarms.values()]))
    lines.append(
        f"  {name}, {1000 * seconds / len(test.tasks):.1f} ms a task: AUROC of unknown "
        + ", ".join(f"{w} {i.value:.4f}" for w, i in of.items())
        + f" (lead at least {more[0]:+.4f} and {more[1]:+.4f})"
    )
    lines.append(
        f"    at 5 % false alarms: {100 * per_class.value:.1f} % ({100 * per_class.low:.1f} … "
        f"{100 * per_class.high:.1f} over {len(alarms)} classes) of known called unknown, "
        f"{100 * np.mean(caught):.1f} % of unknown caught"
    )
    if errors:
        kept = np.mean(np.array(errors) <= 0.05)
        lines.append(
            f"    sure at 5 %: {100 * np.mean(coverage):.1f} % answered (least "
            f"{100 * np.min(coverage):.0f} %), error {100 * np.mean(errors):.2f} %, at most 5 % in "
            f"{100 * kept:.1f} % of tasks"
        )
    return torch.stack(answers).double()


def _words(figures: Mapping[str, Interval]) -> str:
    a, n, e = figures["accuracy"], figures["nll"], figures["ece"]
    text = f"accuracy {100 * a.value:.2f} ({100 * a.low:.2f} … {100 * a.high:.2f})"
    text += f", nll {n.value:.4f} ({n.low:.4f} … {n.high:.4f})"
    return f"{text}, ECE {100 * e.value:.2f} ({100 * e.low:.2f} … {100 * e.high:.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("embeddings", type=Path)
    parser.add_argument("splits", type=Path)
    parser.add_argument("--split", default="val")
    parser.add_argument("--tasks", type=int, default=500)
    parser.add_argument("--shots", type=int, nargs="+", default=[1, 2, 5, 10])
    parser.add_argument("--simple", nargs="*", default=["centroid", "logistic", "lda"])
    given = parser.parse_args()
    torch.set_num_threads(1)
    with np.load(given.embeddings) as data:
        x, y = torch.from_numpy(data["x"]), data["y"]
        prior = packaged_for(json.loads(str(data["embed"]))["embed"])
    splits = json.loads(given.splits.read_text())
    assert prior is not None
    base = np.isin(y, splits["train"])
    labels = torch.from_numpy(np.unique(y[base], return_inverse=True)[1])
    tables = Tables(x, x[base], labels)
    mine = (f"prior={prior.name}", "prior=none")
    for shots in given.shots:
        test = Split(y, splits[given.split], shots, given.tasks)
        val = Split(y, splits["val"], shots, min(given.tasks, 200))
        lines: list[str] = []
        rows = {
            mine[0]: ours(prior, None, x, test, lines),
            mine[1]: ours(None, prior.without, x, test, lines),
        }
        rows |= dict(simple(arm, test, val) for arm in simple_heads(tables, given.simple))
        print(f"{shots} shots, {WAYS} ways, {given.tasks} tasks of {given.split} classes")
        keys = tuple(range(given.tasks))
        asked = test.asked.expand(given.tasks, -1)
        scores = {name: ClassScores.of(keys, p.exp(), asked) for name, p in rows.items()}
        for name, one in scores.items():
            print(f"  {name}: {_words(one.summary())}")
            for own in mine:
                if name not in (mine[0], own):
                    print(f"      minus {own}: {_words(paired(scores[own], one))}")
        print("\n".join(lines), flush=True)


if __name__ == "__main__":
    main()
