"""What is kept of predictions, its summary, and two learners on the same tasks."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torchmetrics.classification import MulticlassAccuracy, MulticlassCalibrationError

from ibaml.evaluation import ClassScores, Interval, RegressionScores, paired

TASKS, QUERIES, WAYS = 12, 30, 5


def predictions(seed: int = 0, sharp: float = 2.0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(WAYS, (TASKS, QUERIES), generator=generator)
    logits = torch.randn(TASKS, QUERIES, WAYS, generator=generator)
    logits = logits + 1.5 * torch.nn.functional.one_hot(labels, WAYS)
    return (sharp * logits).softmax(-1), labels


def classes(seed: int = 0, sharp: float = 2.0) -> ClassScores:
    return ClassScores.of(range(TASKS), *predictions(seed, sharp))


def regression(seed: int = 0, tasks: int = 20) -> RegressionScores:
    rng = np.random.default_rng(seed)
    return RegressionScores(
        keys=tuple(range(tasks)),
        count=np.full(tasks, 10),
        nll=rng.normal(0, 1, tasks),
        mse=rng.gamma(2, 0.5, tasks),
        inside=rng.beta(19, 1, tasks),
    )


def by_hand(confidence, correct) -> ClassScores:
    confidence, correct = np.atleast_2d(confidence), np.atleast_2d(correct)
    zeros = np.zeros(confidence.shape)
    return ClassScores(tuple(range(len(zeros))), zeros, confidence, correct, zeros)


class TestClassScores:
    def test_hand_made(self):
        p = np.array([[[0.7, 0.2, 0.1], [0.25, 0.25, 0.5]]])
        scores = ClassScores.of([7], p, np.array([[0, 1]]))
        assert scores.keys == (7,)
        np.testing.assert_allclose(scores.nll, [[-math.log(0.7), -math.log(0.25)]])
        np.testing.assert_allclose(scores.confidence, [[0.7, 0.5]])
        np.testing.assert_array_equal(scores.correct, [[True, False]])
        np.testing.assert_allclose(
            scores.brier, [[0.09 + 0.04 + 0.01, 0.0625 + 0.5625 + 0.25]], atol=1e-12
        )
        (row,) = scores.rows()
        assert row["key"] == 7
        assert (row["accuracy"], row["confidence"]) == pytest.approx((0.5, 0.6))
        assert row["brier"] == pytest.approx((0.14 + 0.875) / 2)

    def test_summary_equals_others_figures(self):
        p, y = predictions()
        summary = ClassScores.of(range(TASKS), p, y).summary()
        assert set(summary) == {"accuracy", "nll", "brier", "ece", "mce"}
        flat, target = p.flatten(0, 1), y.flatten()
        nll = torch.nn.functional.nll_loss(flat.double().log(), target)
        assert summary["nll"].value == pytest.approx(float(nll))
        accuracy = MulticlassAccuracy(WAYS, average="micro")(flat, target)
        assert summary["accuracy"].value == pytest.approx(float(accuracy))
        for name, norm in (("ece", "l1"), ("mce", "max")):
            metric = MulticlassCalibrationError(WAYS, n_bins=15, norm=norm)
            assert summary[name].value == pytest.approx(float(metric(flat, target)), abs=1e-6)
        assert all(one.low <= one.value <= one.high for one in summary.values())

    def test_how_tasks_were_parted_and_ordered_makes_no_difference(self):
        p, y = predictions()
        whole = ClassScores.of(range(TASKS), p, y)
        order = np.random.default_rng(0).permutation(TASKS)
        parts = [
            ClassScores.of(order[cut].tolist(), p[order[cut]], y[order[cut]])
            for cut in (slice(0, 5), slice(5, 6), slice(6, None))
        ]
        joined = ClassScores.join(parts)
        assert joined.rows() == whole.rows()
        assert joined.summary(resamples=50) == whole.summary(resamples=50)

    def test_tensors_and_arrays_alike(self):
        p, y = predictions()
        assert (
            ClassScores.of(range(TASKS), p, y).rows()
            == ClassScores.of(range(TASKS), p.numpy(), y.numpy()).rows()
        )

    @pytest.mark.parametrize(
        ("dtype", "most"),
        [(torch.float32, 88), (torch.float64, 709), (torch.bfloat16, 88), (torch.half, 88)],
    )
    def test_sure_and_wrong_stays_finite(self, dtype, most):
        p = torch.tensor([[[1.0, 0.0]]], dtype=dtype)
        nll = ClassScores.of([0], p, torch.tensor([[1]])).nll.item()
        assert most - 2 < nll < most

    @pytest.mark.parametrize(
        ("p", "y", "message"),
        [
            ([[[2.0, -1.0]]], [[0]], "task 3, prediction 0.*not logits"),
            ([[[0.5, 0.1]]], [[0]], "no distribution"),
            ([[[math.nan, 1.0]]], [[0]], "task 3"),
            ([[[0.5, 0.5]]], [[2]], r"labels must be 0 … 1, got 2"),
            ([[[0.5, 0.5]]], [[0.0]], "integers"),
            ([[[0.5, 0.5]]], [[0, 1]], r"labels must be integers \(1, 1\)"),
            ([[0.5, 0.5]], [0], "tasks, predictions, classes"),
            ([[[0.5, 0.5]]] * 2, [[0]] * 2, "2 tasks and keys of 1"),
        ],
    )
    def test_bad_input_is_named(self, p, y, message):
        with pytest.raises(ValueError, match=message):
            ClassScores.of([3], np.array(p), np.array(y))

    def test_bad_parts_are_named(self):
        with pytest.raises(ValueError, match="task 0 is there twice"):
            ClassScores.join([classes(0), classes(1)])
        with pytest.raises(ValueError, match="at least one part"):
            ClassScores.join([])
        with pytest.raises(ValueError, match="as many queries"):
            ClassScores.join([by_hand([0.5], [True]), by_hand([0.5, 0.5], [True, True])])


class TestSelective:
    def test_the_surest_first(self):
        coverage, accuracy = by_hand([0.6, 0.9, 0.7, 0.8], [0, 1, 0, 1]).selective(4)
        np.testing.assert_allclose(coverage, [0.25, 0.5, 0.75, 1])
        np.testing.assert_allclose(accuracy, [1, 1, 2 / 3, 0.5])

    def test_all_equally_sure_is_flat(self):
        for correct in ([1, 1, 0, 0], [0, 0, 1, 1]):
            _, accuracy = by_hand([0.5] * 4, correct).selective(7)
            np.testing.assert_allclose(accuracy, 0.5)

    def test_a_tie_is_the_mean_over_its_orders(self):
        _, accuracy = by_hand([0.9, 0.5, 0.5, 0.5], [1, 1, 0, 0]).selective(4)
        np.testing.assert_allclose(accuracy, [1, (1 + 1 / 3) / 2, (1 + 2 / 3) / 3, 0.5])

    def test_ends_at_the_accuracy(self):
        scores = classes()
        _, accuracy = scores.selective(13)
        assert accuracy[-1] == pytest.approx(scores.correct.mean())

    def test_bad_input_is_named(self):
        with pytest.raises(ValueError, match="points"):
            classes().selective(0)


class TestRegressionScores:
    def test_summary_by_hand(self):
        scores = RegressionScores(
            (1, 2), np.array([5, 9]), np.array([1.0, 3.0]), np.array([3.0, 5.0]), np.array([1, 0.8])
        )
        summary = scores.summary()
        assert summary["rmse"].value == pytest.approx(2.0)  # tasks count alike, whatever their size
        half = 12.706204736 * math.sqrt(2) / math.sqrt(2)
        assert summary["rmse"].low == 0
        assert summary["rmse"].high == pytest.approx(math.sqrt(4 + half))
        assert summary["nll"].value == 2
        assert summary["coverage"].value == pytest.approx(0.9)
        assert scores.rows()[1] == {"key": 2, "count": 9, "nll": 3.0, "mse": 5.0, "coverage": 0.8}

    def test_one_task(self):
        one = RegressionScores((1,), *(np.ones(1) for _ in range(4))).summary()
        assert one["rmse"] == Interval(1, 0, math.inf)

    def test_join(self):
        whole = regression()
        parts = [
            RegressionScores(
                whole.keys[cut], whole.count[cut], whole.nll[cut], whole.mse[cut], whole.inside[cut]
            )
            for cut in (slice(8, None), slice(0, 8))
        ]
        assert RegressionScores.join(parts).summary() == whole.summary()

    def test_bad_input_is_named(self):
        ones = np.ones(2)
        with pytest.raises(ValueError, match="nll of task 5 is not finite"):
            RegressionScores((4, 5), ones, np.array([0, math.nan]), ones, ones)
        with pytest.raises(ValueError, match="mse is of 3 tasks and keys of 2"):
            RegressionScores((4, 5), ones, ones, np.ones(3), ones)
        with pytest.raises(ValueError, match="inside must be one number per task"):
            RegressionScores((4, 5), ones, ones, ones, np.ones((2, 3)))
        with pytest.raises(ValueError, match="no tasks"):
            RegressionScores((), *(np.ones(0) for _ in range(4)))


class TestGroups:
    """Tasks drawn more than once from the same few."""

    @pytest.mark.parametrize("scores", [classes(), regression()], ids=["classes", "regression"])
    def test_every_interval_is_over_groups(self, scores):
        """Each task ten times over says no more than each task once."""
        tasks = len(scores.keys)
        groups = tuple(f"g{t}" for t in range(tasks))
        copies = [
            replace(scores, keys=tuple(tasks * i + k for k in scores.keys), groups=groups)
            for i in range(10)
        ]
        once, often = copies[0].summary(), type(scores).join(copies).summary()
        alone = type(scores).join([replace(c, groups=None) for c in copies]).summary()
        for name, interval in often.items():
            assert interval.value == pytest.approx(once[name].value)
            assert (interval.low, interval.high) == pytest.approx((once[name].low, once[name].high))
            if name != "mce":  # a maximum's interval does not shrink as a mean's does
                assert interval.high - interval.low > 2 * (alone[name].high - alone[name].low)

    def test_groups_go_with_their_keys(self):
        scores = RegressionScores((7, 3), *np.ones((4, 2)), groups=("late", "early"))
        assert (scores.keys, scores.groups) == ((3, 7), ("early", "late"))
        joined = RegressionScores.join([scores, replace(scores, keys=(5, 1))])
        assert joined.groups == ("late", "early", "early", "late")
        assert joined.keys == (1, 3, 5, 7)
        assert joined.distinct == 2
        assert [row["task"] for row in joined.rows()] == list(joined.groups)

    def test_differences_are_over_groups_too(self):
        a, b = (regression(seed, tasks=40) for seed in (0, 1))
        groups = tuple(str(t % 4) for t in range(40))
        shift = np.array([0.0, 0.0, 0.0, 8.0])[np.arange(40) % 4]  # it is one group that differs
        b = replace(b, nll=a.nll + shift, mse=a.mse + shift)
        alone = paired(a, b)
        differences = paired(*(replace(scores, groups=groups) for scores in (a, b)))
        for name in ("nll", "rmse"):
            assert differences[name].value == pytest.approx(alone[name].value)
            assert alone[name].low > 0 > differences[name].low

    def test_groups_that_do_not_fit_are_named(self):
        one = regression(tasks=2)
        with pytest.raises(ValueError, match="groups is of 1 tasks and keys of 2"):
            replace(one, groups=("a",))
        grouped = replace(one, groups=("a", "b"))
        with pytest.raises(ValueError, match="some parts have them"):
            RegressionScores.join([grouped, replace(one, keys=(8, 9))])
        with pytest.raises(ValueError, match="task 1 is of group 'b' in a and 'c' in b"):
            paired(grouped, replace(one, groups=("a", "c")))
        with pytest.raises(ValueError, match="task 0 is of group 'a' in a and None in b"):
            paired(grouped, one)


class TestPaired:
    def test_is_b_minus_a_for_every_figure(self):
        for a, b in ((classes(0), classes(0, 4.0)), (regression(0), regression(1))):
            differences, first, second = paired(a, b), a.summary(), b.summary()
            assert set(differences) == set(first)
            for name, one in differences.items():
                assert one.value == pytest.approx(second[name].value - first[name].value)
                assert one.low <= one.value <= one.high

    def test_turned_round(self):
        a, b = classes(0), classes(0, 4.0)
        there, back = paired(a, b), paired(b, a)
        for name in there:
            expected = (-there[name].high, -there[name].low)
            assert (back[name].low, back[name].high) == pytest.approx(expected)

    def test_of_equals_is_nothing(self):
        assert set(paired(classes(), classes()).values()) == {Interval(0, 0, 0)}

    def test_a_small_gain_in_every_task_is_seen(self):
        """The tasks differ by far more than the learners do."""
        a = regression(tasks=40)
        better = RegressionScores(a.keys, a.count, a.nll - 0.05, 0.9 * a.mse, a.inside)
        alone, differences = a.summary(), paired(a, better)
        for name in ("nll", "rmse"):
            assert differences[name].high < 0
            assert alone[name].low < better.summary()[name].value < alone[name].high

    def test_tasks_are_matched_by_key(self):
        p, y = predictions()
        back = list(reversed(range(TASKS)))
        turned = ClassScores.of(back, p[back], y[back])
        assert set(paired(classes(), turned).values()) == {Interval(0, 0, 0)}

    def test_other_tasks_are_named(self):
        p, y = predictions()
        other = ClassScores.of([*range(TASKS - 2), 98, 99], p, y)
        with pytest.raises(ValueError, match="task 10 is in a and not in b"):
            paired(classes(), other)
        with pytest.raises(ValueError, match="task 0 has 30 queries in a and 9 in b"):
            paired(classes(), ClassScores.of(range(TASKS), p[:, :9], y[:, :9]))
        with pytest.raises(ValueError, match="ClassScores with RegressionScores"):
            paired(classes(), regression())
