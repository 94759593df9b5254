"""Candidates that a trainer holds: both directions of reciprocal relations, and none at all."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dglkge.step.objectives.all_candidates import Candidates, of_directions, only_answers


@pytest.mark.parametrize("each", [1, 2])
def test_candidates_of_rows_are_views_of_them_also_of_none(each: int) -> None:
    candidates = Candidates(None, 0, 3, each, None, only_answers(0, 3))  # type: ignore[arg-type]
    rows = torch.arange(12.0).view(3, 4)
    assert candidates.each(rows).tolist() == np.arange(12.0).reshape(3 * each, 4 // each).tolist()
    candidates.each(rows)[0] = -1
    assert rows[0].tolist() == [-1.0] * (4 // each) + [2.0, 3.0] * (each - 1)
    assert candidates.each(rows[:0]).shape == (0, 4 // each)


def test_a_relation_answers_in_its_direction() -> None:
    """Rows 4 and 5 of a shard that begins at 4: each has a candidate for either direction."""
    answers = of_directions(only_answers(4, 6))(np.array([2 * 5 + 1, 2 * 3, 2 * 4, 2 * 5]))
    assert answers.places.tolist() == [3, 0, 2]
    assert answers.starts.tolist() == [0, 1, 1, 2, 3]
