"""A protocol names what a figure was measured against, and refuses what it cannot do."""

from __future__ import annotations

import pytest

from dglkge.errors import InputError
from dglkge.evaluation.metrics import Protocol


def test_names_everything_that_changes_a_figure():
    assert Protocol().describe() == "test split, filtered, all candidates, realistic ties"
    assert Protocol().to_dict() == {
        "split": "test",
        "filtering": "filtered",
        "candidates": "all",
        "ties": "realistic",
    }
    sampled = Protocol(split="valid", filtered=False, num_candidates=500, ties="pessimistic", seed=3)
    assert sampled.describe() == "valid split, raw, sampled 500 candidates, pessimistic ties"
    assert sampled.to_dict() == {
        "split": "valid",
        "filtering": "raw",
        "candidates": "sampled 500",
        "ties": "pessimistic",
        "seed": 3,
    }


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"ties": "best"}, "unknown rule for ties 'best'"),
        ({"num_candidates": 0}, r"the number of candidates must be at least 1 \(or none, for all\), got 0"),
        ({"batch_size": 0}, "the batch size of the evaluation must be at least 1, got 0"),
    ],
)
def test_out_of_range(fields, message):
    with pytest.raises(InputError, match=message):
        Protocol(**fields)
