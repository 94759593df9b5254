"""Dropout of rows: masks by SplitMix64 in Python's integers, and the share that is dropped."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dglkge.step.row_transforms import RowDropout
from tests.training.dense_loops import dropout_mask


def test_masks_are_those_of_the_formula_and_do_not_depend_on_the_place() -> None:
    ids = torch.tensor([2, 0, 1, 3])
    dropout = RowDropout({"person": 0.5, "town": 0.0}, {"person": ids, "town": ids}, seed=7)
    dropout.start_batch(9)
    expected = dropout_mask("person", 9, 4, 6, 0.5, seed=7)[ids]
    rows = torch.ones(4, 6)
    dropout.forward("person", torch.arange(4), rows)
    torch.testing.assert_close(rows.double(), expected)
    some = torch.ones(3, 6)
    dropout.backward("person", torch.tensor([3, 1, 3]), some)
    torch.testing.assert_close(some, rows[[3, 1, 3]])
    assert dropout.tables == ["person"]
    dropout.start_batch(10)
    other = torch.ones(4, 6)
    dropout.forward("person", torch.arange(4), other)
    assert not torch.equal(other, rows)


@pytest.mark.parametrize(("dim", "rate"), [(1, 0.3), (4, 1.0 - 2**-17), (7, 1.0 - 2**-17), (100, 0.3)])
def test_the_loop_and_its_plain_twin_are_equal_bit_for_bit(dim: int, rate: float) -> None:
    ids = torch.randperm(500, generator=torch.Generator().manual_seed(2))
    places = torch.from_numpy(np.random.default_rng(4).integers(0, 500, 900))
    rows = torch.randn(900, dim + 3, generator=torch.Generator().manual_seed(3))
    rows[5, :] = torch.nan
    rows[6:9, 0], rows[9, 0] = torch.inf, -0.0
    found = []
    for kernels in ("auto", "reference"):
        dropout = RowDropout({"person": rate}, {"person": ids}, seed=1, kernels=kernels)
        dropout.start_batch(3)
        of_all, of_part = rows[:, :dim].clone(), rows.clone()
        dropout.forward("person", places, of_all)
        dropout.forward("person", places, of_part[:, :dim])  # columns of wider rows
        assert torch.equal(of_part[:, dim:].nan_to_num(7), rows[:, dim:].nan_to_num(7))
        assert of_part[:, :dim].numpy().tobytes() == of_all.numpy().tobytes()
        found.append(of_all.numpy().tobytes())
    assert found[0] == found[1] != rows[:, :dim].numpy().tobytes()


@pytest.mark.parametrize("rate", [0.1, 0.9])
def test_the_mean_stays_and_the_share_is_dropped(rate: float) -> None:
    """Of 2,000,000 numbers the share is within 5 standard deviations, in all columns of a word."""
    dropout = RowDropout({"person": rate}, {"person": torch.arange(20_000)}, seed=1)
    dropout.start_batch(3)
    rows = torch.ones(20_000, 100)
    dropout.forward("person", torch.arange(20_000), rows)
    is_dropped = (rows == 0).double()
    assert float(is_dropped.mean()) == pytest.approx(rate, abs=5 * (rate * (1 - rate) / 2e6) ** 0.5)
    for column in range(4):
        share = float(is_dropped[:, column::4].mean())
        assert share == pytest.approx(rate, abs=5 * (rate * (1 - rate) / 5e5) ** 0.5)
    assert float(rows.double().mean()) == pytest.approx(1, abs=0.02)
    assert float(rows.max()) == pytest.approx(1 / (1 - rate), rel=1e-3)
