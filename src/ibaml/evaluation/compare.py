"""Which of two learners is better, on the same tasks?"""

from __future__ import annotations

from ibaml.evaluation.intervals import Interval, bootstrap_difference, mean_interval
from ibaml.evaluation.scores import Scores


def paired(
    a: Scores, b: Scores, level: float = 0.95, resamples: int = 2000, seed: int = 0
) -> dict[str, Interval]:
    """b − a for every figure of their `summary`, task by task.

    Figures that are means over tasks get the t interval of the tasks' differences. The others (ece,
    mce, rmse) get a bootstrap in which both learners see the same resampled tasks. If tasks share
    groups, all figures get a bootstrap over the same resampled groups.
    """
    if type(a) is not type(b):
        raise ValueError(f"cannot compare {type(a).__name__} with {type(b).__name__}")
    if a.keys != b.keys:
        key = min(set(a.keys) ^ set(b.keys))
        has, lacks = ("a", "b") if key in a.keys else ("b", "a")
        raise ValueError(
            f"the tasks differ: task {key} is in {has} and not in {lacks}; evaluate both on the "
            "same tasks"
        )
    for key, ours, theirs in zip(a.keys, a.count, b.count, strict=True):
        if ours != theirs:
            raise ValueError(
                f"the tasks differ: task {key} has {ours} queries in a and {theirs} in b"
            )
    groups = [scores.groups or (None,) * len(scores.keys) for scores in (a, b)]
    for key, ours, theirs in zip(a.keys, *groups, strict=True):
        if ours != theirs:
            raise ValueError(
                f"the tasks differ: task {key} is of group {ours!r} in a and {theirs!r} in b"
            )
    means, others = a.means(), b.means()
    result = {
        name: mean_interval(others[name] - means[name], level, a.groups, resamples, seed)
        for name in means
    }
    pooled, other_pooled = a.pooled(), b.pooled()
    for name, (statistic, sums) in pooled.items():
        result[name] = bootstrap_difference(
            statistic, sums, other_pooled[name][1], resamples, seed, level, a.groups
        )
    return result
