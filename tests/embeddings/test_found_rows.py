"""Rows that are read where they lie, against numpy's indexing."""

from __future__ import annotations

import gc

import numpy as np
import pytest
import torch

from dglkge.embeddings.row_lookup import FoundRows

RNG = np.random.default_rng(5)
LOCAL, REMOTE = (RNG.normal(size=(num, 7)).astype(np.float32) for num in (11, 4))


@pytest.mark.parametrize("places", [[], [0], [10, 3, 3, 0], [-1, -4, 5, -1, 10, -2], [-3]])
def test_rows_of_two_arrays(places: list[int]) -> None:
    found = FoundRows.in_either(LOCAL, REMOTE, np.array(places, np.int64))
    expected = [LOCAL[place] if place >= 0 else REMOTE[-1 - place] for place in places]
    assert np.array_equal(found.copied().numpy(), np.array(expected).reshape(-1, 7))


def test_rows_of_one_array() -> None:
    places = RNG.integers(0, 11, 40)
    assert np.array_equal(FoundRows.in_array(LOCAL, places).copied().numpy(), LOCAL[places])
    assert np.array_equal(FoundRows.in_array(LOCAL).copied().numpy(), LOCAL)


def test_a_part_is_copied_where_there_is_room() -> None:
    room = torch.full((3, 7), torch.nan)
    copied = FoundRows.in_array(LOCAL).part(slice(2, 5)).copied(room)
    assert copied is room
    assert np.array_equal(room.numpy(), LOCAL[2:5])


def test_rows_are_read_when_they_are_copied_not_before() -> None:
    rows = LOCAL.copy()
    found = FoundRows.in_array(rows, np.array([4]))
    rows[4] = 2
    assert found.copied().tolist() == [[2.0] * 7]


def test_arrays_are_kept_alive() -> None:
    rows = np.full((50_000, 7), 3, np.float32)
    found = FoundRows.in_array(rows, np.array([49_999])).part(slice(None))
    del rows
    gc.collect()
    assert found.copied().tolist() == [[3.0] * 7]
