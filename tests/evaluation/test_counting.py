"""The compiled count and torch's count agree with comparing one number at a time."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dglkge.evaluation.ranking import count_greater, count_greater_plainly
from dglkge.kernels.full_scores import STRIP_COLUMNS


@settings(max_examples=40, deadline=None)
@given(
    num_rows=st.integers(1, 5),
    num_columns=st.sampled_from([0, 1, 7, STRIP_COLUMNS - 1, STRIP_COLUMNS, 2 * STRIP_COLUMNS + 3]),
    num_answers=st.integers(0, 9),
    seed=st.integers(0, 10_000),
    spread=st.sampled_from([0.0, 0.05, 3.0]),
)
def test_equals_counting_by_hand(num_rows, num_columns, num_answers, seed, spread):
    random = torch.Generator().manual_seed(seed)
    scores = torch.randn(num_rows, num_columns, generator=random).mul(4).round().div(4)
    scores[torch.rand(scores.shape, generator=random) < 0.1] = -torch.inf
    row_of = torch.randint(num_rows, (num_answers,), generator=random).sort().values
    middle = torch.randn(num_answers, generator=random).mul(4).round().div(4)
    low, high = middle - spread, middle + spread
    expected_greater = [sum(s > h for s in scores[r].tolist()) for r, h in zip(row_of, high.tolist())]
    expected_close = [
        (k, column)
        for k in range(num_answers)
        for column, score in enumerate(scores[row_of[k]].tolist())
        if low[k] <= score <= high[k]
    ]
    for count in (count_greater, count_greater_plainly):
        num_greater, close, column = count(scores, row_of, low, high)
        assert num_greater.tolist() == expected_greater
        assert list(zip(close.tolist(), column.tolist())) == expected_close


@pytest.mark.parametrize("count", [count_greater, count_greater_plainly])
def test_limits_belong_to_the_close(count):
    scores = torch.tensor([[0.0, 1.0, 2.0, 3.0, -torch.inf]])
    greater, close, column = count(scores, torch.tensor([0]), torch.tensor([1.0]), torch.tensor([2.0]))
    assert (greater.tolist(), close.tolist(), column.tolist()) == ([1], [0, 0], [1, 2])


def test_scores_need_not_be_contiguous():
    scores = torch.randn(6, 4).T
    row_of, low, high = torch.tensor([0, 3]), torch.tensor([-0.5, 0.0]), torch.tensor([0.5, 0.2])
    for found, expected in zip(
        count_greater(scores, row_of, low, high), count_greater(scores.clone(), row_of, low, high)
    ):
        assert found.tolist() == expected.tolist()
