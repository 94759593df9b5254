"""The order of training: every triple once, the same windows for every cluster."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dglkge.sampling import triple_order

SIZES = st.integers(min_value=1, max_value=3000)
KEYS = st.tuples(st.integers(0, 2**40), st.integers(0, 10_000))


@given(num=SIZES, key=KEYS)
def test_permute_is_a_bijection_and_its_inverse_undoes_it(num: int, key: tuple[int, int]) -> None:
    seed, epoch = key
    ids = np.arange(num)
    positions = triple_order.permute(ids, num, seed, epoch)
    assert sorted(positions.tolist()) == ids.tolist()
    assert triple_order.inverse_permute(positions, num, seed, epoch).tolist() == ids.tolist()


@given(num=SIZES, batch_size=st.integers(1, 700), key=KEYS)
def test_windows_of_an_epoch_hold_every_triple_once(num: int, batch_size: int, key: tuple[int, int]) -> None:
    batches = triple_order.num_batches(num, batch_size)
    windows = [triple_order.window(index, batch_size, num) for index in range(batches)]
    assert all(len(window) == batch_size for window in windows[:-1])
    seen = triple_order.inverse_permute(np.concatenate(windows), num, *key)
    assert sorted(seen.tolist()) == list(range(num))


def test_a_part_of_the_order_equals_the_same_part_of_the_whole() -> None:
    num = 1234
    whole = triple_order.inverse_permute(np.arange(num), num, seed=5, epoch=2)
    part = triple_order.inverse_permute(np.arange(700, 900), num, seed=5, epoch=2)
    assert part.tolist() == whole[700:900].tolist()


@pytest.mark.parametrize("num", [1000, 4096, 99_991])
def test_the_order_looks_random(num: int) -> None:
    """Neighbours in the file are not neighbours in the order, and epochs do not repeat one another."""
    ids = np.arange(num)
    first = triple_order.permute(ids, num, seed=0, epoch=0)
    second = triple_order.permute(ids, num, seed=0, epoch=1)
    other = triple_order.permute(ids, num, seed=1, epoch=0)
    limit = 5 / np.sqrt(num)  # five standard deviations of the correlation of independent orders
    for a, b in ((first, ids), (first, second), (first, other), (first[1:], first[:-1])):
        assert abs(np.corrcoef(a, b)[0, 1]) < limit
    # Windows draw evenly from the file: chi-square of a 20 x 20 table, 361 degrees of freedom.
    table, _, _ = np.histogram2d(ids, first, bins=20)
    expected = num / 400
    assert ((table - expected) ** 2 / expected).sum() < 361 + 5 * np.sqrt(2 * 361)
