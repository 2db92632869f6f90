"""Intervals cover what they say. `python tests/test_intervals.py` prints the docs' table."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from ibaml.evaluation import (
    Interval,
    bin_sums,
    bootstrap,
    bootstrap_difference,
    ece,
    mce,
    mean_interval,
)

QUERIES = 75
# (sharpening of the logit of being right, shift of it, spread of what a task hides)
POPULATIONS = {
    "overconfident": (2.0, 0.5, 0.4),
    "mildly so": (1.25, 0.15, 0.4),
    "slightly so": (1.1, 0.05, 0.3),
    "nearly calibrated": (1.0, 0.0, 0.3),
    "calibrated": (1.0, 0.0, 0.0),
}


def population(rng: np.random.Generator, tasks: int, name: str) -> np.ndarray:
    """Bin sums of tasks whose queries share a difficulty the learner sees and one it does not."""
    sharp, shift, hidden = POPULATIONS[name]
    shared = rng.standard_normal((2, tasks, 1))
    logit = 1.3 + 0.5 * shared[0] + 1.3 * rng.standard_normal((tasks, QUERIES))
    confidence = np.clip(_sigmoid(sharp * logit + shift), 0.2, 1)
    chance = np.clip(_sigmoid(logit + hidden * shared[1]), 0.2, 1)
    return bin_sums(confidence, rng.random((tasks, QUERIES)) < chance)


def truth(name: str, figure, tasks: int = 20_000) -> float:
    if name == "calibrated":
        return 0.0
    rng, step = np.random.default_rng(10**6), 5000
    return float(figure(sum(population(rng, step, name).sum(0) for _ in range(tasks // step))))


def covered(name: str, figure, tasks: int, sets: int, resamples: int, aim: float) -> float:
    rng = np.random.default_rng(1)
    intervals = (
        bootstrap(figure, population(rng, tasks, name), resamples, bounds=(0, 1))
        for _ in range(sets)
    )
    return sum(one.low <= aim <= one.high for one in intervals) / sets


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


class TestMean:
    def test_equals_scipy(self):
        values = np.random.default_rng(0).gamma(2.0, size=17)
        low, high = stats.t.interval(0.9, 16, values.mean(), stats.sem(values))
        interval = mean_interval(values, level=0.9)
        assert (interval.value, interval.low, interval.high) == pytest.approx(
            (values.mean(), low, high)
        )

    def test_one_task_says_nothing_of_the_spread(self):
        assert mean_interval(np.array([0.7])) == Interval(0.7, -math.inf, math.inf)

    @pytest.mark.parametrize("tasks", [3, 20])
    def test_covers_as_often_as_it_says(self, tasks):
        """4000 normal samples: the share has standard deviation 0.0034, four of them allowed."""
        values = np.random.default_rng(2).standard_normal((4000, tasks))
        intervals = [mean_interval(row) for row in values]
        share = np.mean([one.low <= 0 <= one.high for one in intervals])
        assert share == pytest.approx(0.95, abs=4 * math.sqrt(0.95 * 0.05 / 4000))

    @pytest.mark.parametrize(
        ("values", "message"),
        [([], "one number per task"), ([[1.0]], "one number"), ([1, math.inf], r"values\[1\]")],
    )
    def test_bad_input_is_named(self, values, message):
        with pytest.raises(ValueError, match=message):
            mean_interval(np.array(values))

    def test_a_level_that_is_no_share_is_named(self):
        with pytest.raises(ValueError, match=r"level .* got 95"):
            mean_interval(np.arange(3.0), level=95)


def mean(sums: np.ndarray) -> np.ndarray:
    return sums[..., 1] / sums[..., 0]


def columns(values: np.ndarray) -> np.ndarray:
    return np.stack([np.ones_like(values), values], -1)


class TestBootstrap:
    def test_of_a_mean_is_the_t_interval(self):
        """No bias to correct; 20000 resamples leave half a percent of noise in the width."""
        values = np.random.default_rng(3).normal(5, 1, 200)
        interval, expected = bootstrap(mean, columns(values), 20_000), mean_interval(values)
        assert interval.value == pytest.approx(expected.value)
        width = expected.high - expected.low
        assert interval.low == pytest.approx(expected.low, abs=0.03 * width)
        assert interval.high == pytest.approx(expected.high, abs=0.03 * width)

    @pytest.mark.parametrize("figure", [ece, mce])
    def test_covers_a_miscalibrated_population(self, figure):
        """At 0.95, 250 sets have a standard deviation of 0.014: three and a half allowed."""
        name = "overconfident"
        share = covered(name, figure, 100, 250, 200, truth(name, figure))
        assert share == pytest.approx(0.95, abs=3.5 * math.sqrt(0.95 * 0.05 / 250))

    def test_does_not_call_a_calibrated_population_miscalibrated(self):
        """Resampling alone (the percentile interval) never covers 0. Measured: 0.90 of 2000."""
        share = covered("calibrated", ece, 100, 250, 200, 0.0)
        assert share > 0.90 - 3.5 * math.sqrt(0.9 * 0.1 / 250)

    def test_holds_the_value_and_keeps_the_bounds(self):
        rng = np.random.default_rng(4)
        for tasks in (2, 5, 40):
            for _ in range(20):
                interval = bootstrap(mce, population(rng, tasks, "calibrated"), 50, bounds=(0, 1))
                assert 0 <= interval.low <= interval.value <= interval.high <= 1

    def test_one_task_says_nothing_of_the_spread(self):
        sums = population(np.random.default_rng(0), 1, "overconfident")
        interval = bootstrap(ece, sums, bounds=(0, 1))
        assert (interval.low, interval.high) == (0, 1)
        assert bootstrap(ece, sums).high == math.inf

    def test_another_seed_draws_other_resamples(self):
        sums = population(np.random.default_rng(5), 30, "mildly so")
        first = bootstrap(ece, sums, 100)
        assert bootstrap(ece, sums, 100) == first
        assert bootstrap(ece, sums, 100, seed=1) != first

    def test_many_tasks_are_resampled_in_parts_as_if_at_once(self):
        sums = np.tile(population(np.random.default_rng(5), 30, "mildly so"), (700, 1, 1))
        seen = []

        def watched(total):
            seen.append(total)
            return ece(total)

        bootstrap(watched, sums, 120)
        _figure, *parts = seen
        assert len(parts) > 1  # memory does not grow with the resamples
        share = np.full(len(sums), 1 / len(sums))
        weights = np.random.default_rng(0).multinomial(len(sums), share, size=120)
        at_once = np.tensordot(weights.astype(float), sums, 1)
        np.testing.assert_allclose(np.concatenate(parts), at_once, rtol=1e-12)

    def test_bad_input_is_named(self):
        with pytest.raises(ValueError, match="one row per task"):
            bootstrap(ece, np.zeros((0, 16, 3)))
        with pytest.raises(ValueError, match="resamples"):
            bootstrap(ece, np.ones((2, 16, 3)), resamples=1)


class TestDifference:
    def test_of_equals_is_nothing(self):
        sums = population(np.random.default_rng(6), 40, "mildly so")
        assert bootstrap_difference(ece, sums, sums, 100) == Interval(0, 0, 0)

    def test_pairing_takes_away_what_tasks_share(self):
        rng = np.random.default_rng(7)
        a = rng.normal(0, 10, 300)
        b = a + rng.normal(0.5, 1, 300)
        differences = bootstrap_difference(mean, columns(a), columns(b))
        expected = mean_interval(b - a)
        assert differences.value == pytest.approx(expected.value)
        assert differences.high - differences.low == pytest.approx(
            expected.high - expected.low, rel=0.1
        )

    def test_covers_the_difference_of_two_populations(self):
        """At 0.95, 250 sets have a standard deviation of 0.014: three and a half allowed."""
        rng = np.random.default_rng(8)
        names = "mildly so", "overconfident"
        aim = truth(names[1], ece) - truth(names[0], ece)
        intervals = (
            bootstrap_difference(ece, *(population(rng, 100, name) for name in names), 200)
            for _ in range(250)
        )
        share = sum(one.low <= aim <= one.high for one in intervals) / 250
        assert share == pytest.approx(0.95, abs=3.5 * math.sqrt(0.95 * 0.05 / 250))

    def test_bad_input_is_named(self):
        with pytest.raises(ValueError, match="same tasks"):
            bootstrap_difference(ece, np.ones((2, 16, 3)), np.ones((3, 16, 3)))


def covered_by_groups(count: int, sets: int, resamples: int, draws: int = 1000):
    """How often a mean's interval over groups covers, and how often one over the draws does, where
    1,000 draws repeat a few groups."""
    rng, hits = np.random.default_rng(9), np.zeros(2)
    for _ in range(sets):
        drawn = rng.integers(count, size=draws)
        values = rng.standard_normal(count)[drawn] + 0.5 * rng.standard_normal(draws)
        groups = [f"group {g}" for g in drawn]
        both = mean_interval(values, groups=groups, resamples=resamples), mean_interval(values)
        hits += [one.low <= 0 <= one.high for one in both]
    return hits / sets


class TestGroups:
    def test_intervals_over_groups_cover_and_over_their_draws_do_not(self):
        """At 0.95, 300 sets have a standard deviation of 0.013: three and a half allowed."""
        over_groups, over_draws = covered_by_groups(26, 300, 400)
        assert over_groups == pytest.approx(0.95, abs=3.5 * math.sqrt(0.95 * 0.05 / 300))
        assert over_draws < 0.5

    def test_of_equally_large_groups_it_is_the_t_interval_of_their_means(self):
        values = np.random.default_rng(3).normal(5, 1, 200)
        groups = [str(i) for i in range(200) for _ in range(3)]
        interval = mean_interval(values.repeat(3), groups=groups, resamples=20_000)
        expected = mean_interval(values)
        width = expected.high - expected.low
        assert interval.value == pytest.approx(expected.value)
        assert interval.low == pytest.approx(expected.low, abs=0.03 * width)
        assert interval.high == pytest.approx(expected.high, abs=0.03 * width)

    def test_one_group_says_nothing_of_the_spread(self):
        interval = mean_interval(np.arange(3.0), groups=["a"] * 3)
        assert interval == Interval(1.0, -math.inf, math.inf)

    def test_a_bootstrap_over_groups_is_that_of_their_sums(self):
        sums = population(np.random.default_rng(5), 30, "mildly so")
        other = population(np.random.default_rng(6), 30, "overconfident")
        groups = [str(i // 3) for i in range(30)]
        totals, others = (s.reshape(10, 3, 16, 3).sum(1) for s in (sums, other))
        assert bootstrap(ece, sums, 100, groups=groups) == bootstrap(ece, totals, 100)
        differences = bootstrap_difference(ece, sums, other, 100, groups=groups)
        expected = bootstrap_difference(ece, totals, others, 100)
        assert (differences.low, differences.high) == pytest.approx((expected.low, expected.high))

    def test_groups_of_other_tasks_are_named(self):
        with pytest.raises(ValueError, match="groups name 2 tasks, and there are 3"):
            mean_interval(np.arange(3.0), groups=["a", "b"])


if __name__ == "__main__":
    for each in POPULATIONS:
        for measure in (ece, mce):
            right = truth(each, measure, 300_000)
            for count in (30, 100, 300):
                share = covered(each, measure, count, 1000, 500, right)
                print(f"{each:18} {measure.__name__} {right:.4f}  {count:3} tasks: {share:.3f}")
    for count in (10, 26, 100):
        shares = covered_by_groups(count, 2000, 500)
        print(f"{count:3} groups in 1,000 draws: {shares[0]:.3f}, over the draws {shares[1]:.3f}")
