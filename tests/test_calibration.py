"""ECE and MCE equal torchmetrics', also where rounding decides the bin."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torchmetrics.classification import MulticlassCalibrationError

from ibaml.evaluation import bin_sums, ece, mce, reliability

CLASSES = 5


def theirs(confidence: np.ndarray, correct: np.ndarray, norm: str) -> float:
    """torchmetrics, given predictions that have this top probability and are right or wrong."""
    top = torch.as_tensor(confidence).flatten()
    p = ((1 - top) / (CLASSES - 1))[:, None].repeat(1, CLASSES)
    p[:, 0] = top
    target = torch.where(torch.as_tensor(correct).flatten(), 0, 1)
    return float(MulticlassCalibrationError(CLASSES, n_bins=15, norm=norm)(p, target))


def check(confidence: np.ndarray, correct: np.ndarray) -> None:
    sums = bin_sums(confidence, correct).sum(0)
    assert ece(sums) == pytest.approx(theirs(confidence, correct, "l1"), abs=1e-6)
    assert mce(sums) == pytest.approx(theirs(confidence, correct, "max"), abs=1e-6)


def drawn(seed: int, tasks: int = 4, queries: int = 50) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    confidence = rng.uniform(0.21, 1, (tasks, queries))
    return confidence, rng.random((tasks, queries)) < confidence**2


EDGES = torch.linspace(0, 1, 16).numpy()[4:]  # 0.2667 and up: a top probability of 5 classes
SATURATED = torch.tensor([[0.0, 20.0, 5.0], [0.0, 4.0, 200.0], [0.0, 15.9, 0.1]]).softmax(-1)


class TestEqualsTorchmetrics:
    @pytest.mark.parametrize("dtype", [np.float32, np.float64])
    @pytest.mark.parametrize("seed", range(5))
    def test_on_random_predictions(self, seed, dtype):
        confidence, correct = drawn(seed)
        check(confidence.astype(dtype), correct)

    @pytest.mark.parametrize("right", [True, False])
    def test_all_right_or_all_wrong(self, right):
        confidence, _ = drawn(0)
        check(confidence, np.full(confidence.shape, right))

    def test_everything_in_one_bin(self):
        confidence, correct = drawn(1)
        check(0.61 + 0.05 * confidence, correct)
        check(np.full_like(confidence, 0.5), correct)

    @pytest.mark.parametrize("right", [True, False])
    def test_a_confidence_of_one_has_its_own_bin(self, right):
        confidence = np.array([[1.0, 1.0, 0.99, 0.95, 0.94]])
        check(confidence, np.array([[right, True, False, True, not right]]))
        # together they would average out: 0.98 against one half
        apart = bin_sums(np.array([[1.0, 0.96]]), np.array([[True, False]])).sum(0)
        assert mce(apart) == pytest.approx(0.96)

    @pytest.mark.parametrize("dtype", [np.float32, np.float64])
    @pytest.mark.parametrize("side", [-1, 0, 1])
    def test_on_and_beside_every_boundary(self, dtype, side):
        """One float below a boundary belongs to the bin below, the boundary to the one above."""
        edges = EDGES.astype(dtype)
        near = edges if side == 0 else np.nextafter(edges, dtype(side * 2))
        near = np.minimum(near, 1)[None]
        for correct in (np.arange(near.size) % 2 == 0, np.arange(near.size) % 3 == 0):
            check(near, correct[None])

    def test_saturated_float32_beside_nearly_sure(self):
        sure = np.concatenate([SATURATED.max(-1).values.numpy(), [0.9999999, 0.99, 0.934]])
        assert (sure == 1).sum() == 1
        check(sure[None].astype(np.float32), np.array([[True, False, True, False, True, True]]))
        check(sure[None], np.array([[True, False, True, False, True, True]]))

    @settings(max_examples=60)
    @given(
        st.lists(
            st.tuples(
                st.one_of(st.floats(0.21, 1), st.sampled_from([float(e) for e in EDGES])),
                st.booleans(),
            ),
            min_size=1,
            max_size=40,
        )
    )
    def test_on_anything(self, pairs):
        confidence, correct = (np.array(column)[None] for column in zip(*pairs, strict=True))
        check(confidence, correct)


def test_hand_made():
    sums = bin_sums(np.array([[0.5, 0.5, 0.9, 0.9]]), np.array([[True, False, True, False]]))
    assert ece(sums.sum(0)) == pytest.approx(0.5 * 0.0 + 0.5 * 0.4)
    assert mce(sums.sum(0)) == pytest.approx(0.4)


def test_tasks_add_up_and_leading_axes_stay():
    confidence, correct = drawn(3, tasks=6)
    sums = bin_sums(confidence, correct)
    assert sums.shape == (6, 16, 3)
    whole = bin_sums(confidence.reshape(1, -1), correct.reshape(1, -1))[0]
    np.testing.assert_allclose(sums.sum(0), whole, atol=1e-12)
    for figure in (ece, mce):
        each = figure(sums.reshape(2, 3, 16, 3))
        assert each.shape == (2, 3)
        assert each[1, 0] == pytest.approx(float(figure(sums[3])))


def test_reliability_is_per_bin():
    diagram = reliability(
        bin_sums(np.array([[0.5, 0.52, 0.9]]), np.array([[True, False, True]]))[0]
    )
    assert diagram.count.sum() == 3
    assert diagram.confidence[7] == pytest.approx(0.51)
    assert diagram.accuracy[7] == pytest.approx(0.5)
    assert diagram.accuracy[13] == 1
    assert np.isnan(diagram.accuracy[0])


@pytest.mark.parametrize(
    ("confidence", "correct", "message"),
    [
        ([[1.2]], [[True]], "not logits"),
        ([[np.nan]], [[True]], r"in \[0, 1\]"),
        ([[0.5, 0.6]], [[True]], "alike"),
        ([0.5], [True], "tasks, predictions"),
    ],
)
def test_bad_input_is_named(confidence, correct, message):
    with pytest.raises(ValueError, match=message):
        bin_sums(np.array(confidence), np.array(correct))
