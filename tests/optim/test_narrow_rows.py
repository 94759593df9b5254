"""Optimizers over rows of 16 bits: against float64 with the same random bits, and what rounding may lose."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import dglkge.optim
from dglkge.kernels.hashing import combine, stream_key
from dglkge.kernels.rows import round_rows_plain
from dglkge.optim import NarrowEmbedding, SparseAdagrad
from dglkge.optim.dgl_tables import fetch, write_back
from dglkge.optim.narrow_rows import widen
from tests.optim.conftest import TABLE_NUMBERS
from tests.optim.oracle import EVERYTHING, NUM_ROWS, Case, Oracle
from tests.optim.test_row_storage import LateTensor

ROW_IDS = np.random.default_rng(5).permutation(NUM_ROWS)


@pytest.fixture
def make_narrow(standalone_graph: Any) -> Callable[..., NarrowEmbedding]:

    def make(dim: int = 6, dtype: torch.dtype = torch.bfloat16, **options: Any) -> NarrowEmbedding:
        policy, name = standalone_graph.get_node_partition_policy("thing"), f"narrow{next(TABLE_NUMBERS)}"
        table = NarrowEmbedding(NUM_ROWS, dim, name, policy, dtype=dtype, row_ids=ROW_IDS, **options)
        draw = torch.Generator().manual_seed(dim)
        table.write(EVERYTHING, torch.randn(NUM_ROWS, dim, generator=draw))
        return table

    return make


def all_rows(table: NarrowEmbedding) -> torch.Tensor:
    return table.read(EVERYTHING)


@pytest.mark.parametrize(
    ("name", "dtype", "kernels"),
    [
        ("SparseAdagrad", torch.bfloat16, "auto"),
        ("SparseAdagrad", torch.float16, "reference"),
        ("RowAdagrad", torch.float16, "auto"),
        ("SparseAdam", torch.bfloat16, "auto"),
        ("SparseAdam", torch.bfloat16, "reference"),
    ],
    ids=str,
)
def test_steps_are_those_of_float64_rounded_by_the_same_bits(make_narrow, monkeypatch, name, dtype, kernels):
    if kernels == "auto":
        monkeypatch.setattr("dglkge.optim.narrow_rows.NarrowUpdate.NUMBERS_A_BLOCK", 65)
    table = make_narrow(7, dtype, seed=3)
    optimizer = getattr(dglkge.optim, name)([table], lr=0.1, kernels=kernels)
    oracle = Oracle(Case("", name, lr=0.1), NUM_ROWS, 7)
    rng = np.random.default_rng(1)
    is_half, num_same, num_all = dtype == torch.float16, 0, 0
    for number in range(100, 112):
        before = all_rows(table)
        ids = rng.integers(0, NUM_ROWS, 60)
        gradients = rng.standard_normal((60, 7)).astype(np.float32)
        optimizer.step_rows([(table, torch.from_numpy(ids), torch.from_numpy(gradients))], number=number)
        oracle.rows = before.double()
        oracle.step(torch.from_numpy(ids), torch.from_numpy(gradients))
        words = np.zeros((NUM_ROWS, 7), np.uint16)
        key = combine(int(stream_key(3, "rounding", table.name)[0]), number)
        round_rows_plain(oracle.rows.float().numpy(), words, np.arange(NUM_ROWS), ROW_IDS, key, is_half)
        expected = torch.from_numpy(words.view(np.int16)).view(dtype).float()
        rows = all_rows(table)
        # Float32 differs from float64 in the last digits, and may so cross a random limit: at most one unit.
        unit = torch.finfo(dtype).eps * torch.maximum(expected.abs(), before.abs())
        assert bool(((rows - expected).abs() <= unit).all())
        num_same, num_all = num_same + int((rows == expected).sum()), num_all + rows.numel()
        untouched = np.setdiff1d(np.arange(NUM_ROWS), ids)
        assert torch.equal(rows[untouched], before[untouched])
    assert num_same > 0.99 * num_all
    assert all(tensor.dtype == torch.float32 for tensor in optimizer.state_tensors(table).values())


def test_reads_are_float32_and_their_gradients_arrive(make_narrow) -> None:
    table = make_narrow()
    assert table.weight.dtype == torch.int16 and table.weight.shape == (NUM_ROWS, 6)
    optimizer = SparseAdagrad([table], lr=0.5)
    before = all_rows(table)
    rows = table(torch.tensor([4, 4, 9]))
    assert rows.dtype == torch.float32 and torch.equal(rows.detach(), before[[4, 4, 9]])
    rows.sum().backward()
    optimizer.step()
    after = all_rows(table)
    moved = (before - after).abs().sum(dim=1).nonzero().squeeze(1).tolist()
    assert moved == [4, 9]
    # Adagrad's first step is lr times the sign of the gradient.
    torch.testing.assert_close(after[[4, 9]], before[[4, 9]] - 0.5, rtol=2**-7, atol=2**-7)


def test_small_steps_are_lost_by_nearest_and_kept_in_the_mean_by_stochastic(make_narrow):
    num_steps, lr = 64, 2.0**-12  # the next bfloat16 below 1 is 1 - 2**-8
    moved = {}
    for rounding in ("nearest", "stochastic"):
        table = make_narrow(100, rounding=rounding)
        table.write(EVERYTHING, torch.ones(NUM_ROWS, 100))
        optimizer = SparseAdagrad([table], lr=lr)
        for step in range(num_steps):
            # Gradients that grow: g / sqrt(sum of g**2) tends to a constant.
            gradient = torch.full((NUM_ROWS, 100), 2.0**step)
            optimizer.step_rows([(table, EVERYTHING, gradient)])
        moved[rounding] = 1 - all_rows(table).double()
    squares = np.cumsum(4.0 ** np.arange(num_steps))
    exact = lr * (2.0 ** np.arange(num_steps) / np.sqrt(squares)).sum()
    assert not moved["nearest"].any()
    error = float(moved["stochastic"].std()) / np.sqrt(moved["stochastic"].numel())
    assert abs(float(moved["stochastic"].mean()) - exact) < 5 * error


def test_rows_are_limited_before_rounding_and_kept_without_a_finite_gradient(make_narrow) -> None:
    table = make_narrow(20)
    optimizer = SparseAdagrad([table], lr=1.0, nonfinite="skip")
    optimizer.limit_norms(table, 0.5)
    before, gradient = all_rows(table), torch.randn(11, 20)
    gradient[10, 3] = torch.nan
    optimizer.step_rows([(table, EVERYTHING[:11], gradient)])
    after = all_rows(table)
    assert bool((after[:10].norm(dim=1) < 0.5 * (1 + 2**-7)).all())
    assert torch.equal(after[10:], before[10:]) and bool((before.norm(dim=1) > 1).all())
    assert optimizer.num_skipped_rows == 1


def test_words_travel_through_the_kvstore_as_they_are() -> None:
    tensor = LateTensor(torch.tensor([[1, -2], [3, -4]], dtype=torch.int16), 2)
    (words,) = fetch([tensor], np.array([1]))
    assert words.dtype == np.uint16 and words.tolist() == [[3, 65532]]
    write_back([tensor], np.array([0]), [words], 10.0)
    assert tensor.rows.tolist() == [[3, -4], [3, -4]]


def test_mistakes_are_named(make_narrow) -> None:
    with pytest.raises(ValueError, match="dtype must be torch.bfloat16 or torch.float16, got torch.float32"):
        make_narrow(dtype=torch.float32)
    with pytest.raises(ValueError, match="rounding must be 'stochastic' or 'nearest', got 'up'"):
        make_narrow(rounding="up")
    rows = torch.zeros(3, 2, dtype=torch.bfloat16)
    with pytest.raises(IndexError, match="rows 1 to 3, expected 0 to 2"):
        widen(rows, np.array([1, 3]))
